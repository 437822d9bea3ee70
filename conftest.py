"""How the notebooks are tested: nbval runs every cell and compares its output.

Three things are mended on the way. `nbdev_clean` strips execution counts, and nbval
takes a cell without one for a cell that was never run: zero stands for "run, count
not kept". A picture comes with a text that holds its size in dots, which is neither
stored nor compared. And two kernels that start at once may pick the same port, of
which one dies: a kernel that never came up is started once more.
"""
from functools import wraps

import nbval.kernel


def pytest_collection_modifyitems(items):
    for item in items:
        cell = getattr(item, "cell", None)  # only nbval's items have one
        if cell is None:
            continue
        if cell.get("execution_count", 0) is None:
            cell["execution_count"] = 0
        item.compare_outputs = without_picture_text(item.compare_outputs)


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
