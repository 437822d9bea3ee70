"""No cell is skipped, the notebooks are clean, and flashlit/ is exactly what they export.

nbdev's commands run on a copy, so work in progress is neither touched nor needed
to be committed.
"""
import shutil
import subprocess
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
        subprocess.run([command], cwd=copy, check=True)
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


@pytest.mark.parametrize("path", sorted((ROOT / "nbs").glob("*.ipynb")), ids=lambda p: p.stem)
def test_no_cell_is_skipped(path):
    text = path.read_text(encoding="utf-8").lower()
    assert not [word for word in ("nbval-skip", "nbval_skip") if word in text]
