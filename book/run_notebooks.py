"""Run notebooks in place: python book/run_notebooks.py NOTEBOOK...

Text that one cell prints is stored as one output, however it arrived, and a picture
without the text that comes with it, so that a second run changes nothing. A failure,
a cell that hangs or a kernel that dies names the notebook and the cell.
"""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

LIMIT = 300  # seconds a cell may take
FAILURES = (CellExecutionError, CellTimeoutError, DeadKernelError)


def run(path):
    """None, or what went wrong; the notebook is written only if all went well."""
    nb, started = nbformat.read(path, 4), []
    client = NotebookClient(
        nb,
        timeout=LIMIT,
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
        on_cell_execute=lambda cell, **_: started.append(cell.id),
    )
    try:
        client.execute()
    except FAILURES as error:
        return f"{path}, cell {started[-1]}: {error}"
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"].pop("text/plain", None)
    nbformat.write(nb, path)


def main(paths):
    """The exit status: 1 if any notebook failed."""
    with ThreadPoolExecutor(2) as pool:
        problems = [problem for problem in pool.map(run, map(Path, paths)) if problem]
    print("\n".join(problems), file=sys.stderr, end="\n" * bool(problems))
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
