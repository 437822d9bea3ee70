"""No cell is skipped, the notebooks are clean, and flashlit/ is exactly what they export.

nbdev's commands run on a copy, so work in progress is neither touched nor needed
to be committed.
"""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SKIP = {"_modidx.py", "__pycache__", ".ipynb_checkpoints"}


def contents(folder):
    """Relative path -> bytes, of all files that belong in the repository."""
    files = (p for p in folder.rglob("*") if p.is_file())
    paths = {p.relative_to(folder): p for p in files}
    return {str(r): p.read_bytes() for r, p in paths.items() if not SKIP & set(r.parts)}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A copy whose modules are gone, after `nbdev_clean` and `nbdev_export`."""
    copy = tmp_path_factory.mktemp("fresh")
    shutil.copy(ROOT / "settings.ini", copy)
    for name in ("nbs", "flashlit"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(*SKIP))
    for p in (copy / "flashlit").iterdir():
        if p.name not in ("__init__.py", "__main__.py", "data"):
            shutil.rmtree(p) if p.is_dir() else p.unlink()
    for command in ("nbdev_clean", "nbdev_export"):
        subprocess.run([Path(sys.executable).with_name(command)], cwd=copy, check=True)
    return copy


@pytest.mark.parametrize("name", ["nbs", "flashlit"])
def test_in_step(fresh, name):
    ours, theirs = contents(ROOT / name), contents(fresh / name)
    changed = sorted(f for f in ours if f in theirs and ours[f] != theirs[f])
    stray, missing = sorted(ours.keys() - theirs), sorted(theirs.keys() - ours)
    assert not (changed or stray or missing), (
        f"{name}/ is not what nbdev_clean and nbdev_export make of it: run "
        f"`make notebooks`. Changed: {changed}, from no notebook: {stray}, "
        f"missing: {missing}"
    )


each_notebook = pytest.mark.parametrize(
    "path", sorted((ROOT / "nbs").glob("*.ipynb")), ids=lambda p: p.stem
)


def cells(path, kind="code"):
    """Cell name -> cell, of one notebook."""
    return {c["id"]: c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind}


@each_notebook
def test_no_cell_is_skipped(path):
    text = path.read_text(encoding="utf-8").lower()
    assert not [word for word in ("nbval-skip", "nbval_skip") if word in text]


@each_notebook
def test_cells_have_names(path):
    made_up = [name for name in cells(path) if re.fullmatch(r"[0-9a-f]{8}(-.*)?", name)]
    assert not made_up, "give the cell an id that says what it holds: it stands in the module"


@each_notebook
def test_what_a_cell_prints_is_one_output(path):
    for name, cell in cells(path).items():
        streams = [o["name"] for o in cell["outputs"] if o["output_type"] == "stream"]
        assert len(streams) == len(set(streams)), f"cell {name}: run `make notebooks`"


@each_notebook
def test_outputs_hold_results_alone(path):
    """No errors, no addresses, no text in angle brackets where an object was meant."""
    for name, cell in cells(path).items():
        text = json.dumps([o for o in cell["outputs"] if "image/png" not in o.get("data", {})])
        assert '"output_type": "error"' not in text, f"cell {name} raised"
        assert not re.search(r"<\w[^>]*>|0x[0-9a-f]{6}", text), f"cell {name} shows an object"
        pictures = [o["data"] for o in cell["outputs"] if "image/png" in o.get("data", {})]
        assert all("text/plain" not in data for data in pictures), f"cell {name}: `make notebooks`"


@each_notebook
def test_code_fits_the_page(path):
    for name, cell in cells(path).items():
        code = [line for line in "".join(cell["source"]).splitlines() if line[:2] != "#|"]
        assert all(len(line) <= 80 for line in code), f"cell {name}: a line of over 80 characters"
