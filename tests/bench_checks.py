"""How long the book and the checks take on this machine.

How to read it: wall-clock seconds of one run each, on a warm environment. The
book is built from stored outputs, from nothing; `make test` is everything that
CI runs, the book in a browser included.
"""
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = {"site": 20, "test": 360}  # seconds


def main():
    print(__doc__)
    for name, target in TARGETS.items():
        start = time.perf_counter()
        done = subprocess.run(["make", name], cwd=ROOT, capture_output=True, text=True)
        took = time.perf_counter() - start
        said = "" if done.returncode == 0 else f"   FAILED with status {done.returncode}"
        print(f"make {name:10} {took:6.1f} s   target: at most {target} s{said}")


if __name__ == "__main__":
    main()
