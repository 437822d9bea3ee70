"""Run notebooks in place: python book/run_notebooks.py NOTEBOOK...

Text that one cell prints is stored as one output, however it arrived, so that a
second run changes nothing. A failure names the notebook and the cell.
"""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def run(path):
    """None, or what went wrong; the notebook is written only if all went well."""
    nb, failed = nbformat.read(path, 4), []
    client = NotebookClient(
        nb,
        timeout=300,  # seconds a cell may take
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
        on_cell_error=lambda cell, **_: failed.append(cell.id),
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return f"{path}, cell {failed[-1]}:\n{error}"
    nbformat.write(nb, path)


def main(paths):
    """The exit status: 1 if any notebook failed."""
    with ThreadPoolExecutor(2) as pool:
        problems = [problem for problem in pool.map(run, map(Path, paths)) if problem]
    print("\n".join(problems), file=sys.stderr, end="\n" * bool(problems))
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
