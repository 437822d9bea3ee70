"""How the notebooks are tested: nbval runs every cell and compares its output.

`nbdev_clean` strips execution counts, and nbval takes a cell without one for a
cell that was never run. Zero stands for "run, count not kept".
"""


def pytest_collection_modifyitems(items):
    for item in items:
        cell = getattr(item, "cell", None)  # only nbval's items have one
        if cell is not None and cell.get("execution_count", 0) is None:
            cell["execution_count"] = 0
