"""Plants every exhibit of the museum in a copy of the package: the tests must turn red.

One line for each, with the test that noticed. Exit status 1 if one survives, or if the
tests are red before anything was planted. The working tree is not touched. Names of
exhibits on the command line choose among them.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashlit.museum import MUSEUM, faulty

ROOT = Path(__file__).parents[1]
TESTS = (  # those that notice most, or soonest, come first; none knows the museum
    "cases", "meter", "decode", "backward", "attention", "merge", "errors", "hostile", "properties",
)  # fmt: skip


def copy(folder):
    """What the tests need of the repository."""
    unwanted = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("flashlit", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", folder)


def run(folder, test):
    """(exit status, output) of one file of tests, on the package in `folder`."""
    quick = ["-x", "-q", "-rfE", "--tb=no", "--no-header", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *quick, f"tests/test_{test}.py"]
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def is_copy(folder):
    """Whether Python, started there, imports the package from there."""
    command = [sys.executable, "-c", "import flashlit; print(flashlit.__file__)"]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return Path(done.stdout.strip()).parent == folder / "flashlit"


def first_red(exhibit=None):
    """The first test that fails on a copy with the fault planted; None if all pass."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy(folder)
        assert is_copy(folder)
        if exhibit:
            (folder / "flashlit" / f"{exhibit.module}.py").write_text(faulty(exhibit), "utf-8")
        for test in TESTS:
            status, output = run(folder, test)
            if status:
                red = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", output, re.M)
                return red[1] if red else f"test_{test}.py: {output[-2000:]}"
    return None


def main(names):
    exhibits = [MUSEUM[name] for name in names or MUSEUM]
    if red := first_red():
        print(f"red before anything was planted: {red}")
        return 1
    print(f"{'nothing planted':26} all green", flush=True)
    survivors = 0
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for exhibit, red in zip(exhibits, pool.map(first_red, exhibits)):
            survivors += red is None
            print(f"{exhibit.name:26} {red or 'SURVIVES'}", flush=True)
    print(f"{len(exhibits)} planted, {survivors} survive")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
