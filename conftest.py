"""How the notebooks are tested: nbval runs every cell and compares its output.

Three things are mended on the way. `nbdev_clean` strips execution counts, and nbval
takes a cell without one for a cell that was never run: zero stands for "run, count
not kept". A picture comes with a text that holds its size in dots, which is neither
stored nor compared. And two kernels that start at once may pick the same port, of
which one dies: a kernel that never came up is started once more.

A cell tagged `needs-torch` is skipped where PyTorch is not installed.
"""
from functools import wraps
from importlib.util import find_spec

import nbval.kernel
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        cell = getattr(item, "cell", None)  # only nbval's items have one
        if cell is None:
            continue
        if cell.get("execution_count", 0) is None:
            cell["execution_count"] = 0
        item.compare_outputs = without_picture_text(item.compare_outputs)
        if "needs-torch" in cell.metadata.get("tags", ()) and not find_spec("torch"):
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))


def without_picture_text(compare):
    @wraps(compare)
    def wrapped(test, ref, *args, **options):
        for output in test:
            if "image/png" in output.get("data", {}):
                output["data"].pop("text/plain", None)
        return compare(test, ref, *args, **options)

    return wrapped


def once_more(start):
    @wraps(start)
    def wrapped(*args, **options):
        try:
            return start(*args, **options)
        except RuntimeError:  # it died before it was ready
            return start(*args, **options)

    return wrapped


nbval.kernel.start_new_kernel = once_more(nbval.kernel.start_new_kernel)
