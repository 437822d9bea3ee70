"""What `import flashlit` costs beyond `import numpy`.

How to read it: each figure is the median of 11 whole processes, start to exit.
The two kinds of process take turns, so that a busy machine slows both alike.
"""
import subprocess
import sys
import time
from statistics import median

RUNS = 11
CODES = {"import numpy": "import numpy", "import numpy, flashlit": "import numpy, flashlit"}
TARGET = 30  # ms


def seconds(code):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main():
    print(__doc__)
    for code in CODES.values():
        seconds(code)  # fills the caches
    times = {name: [] for name in CODES}
    for _ in range(RUNS):
        for name, code in CODES.items():
            times[name].append(1e3 * seconds(code))
    middle = [median(x) for x in times.values()]
    for name, ms in zip(times, middle):
        print(f"{name:26} {ms:8.1f} ms   (fastest {min(times[name]):.1f})")
    print(f"{'difference':26} {middle[1] - middle[0]:8.1f} ms   target: at most {TARGET} ms")


if __name__ == "__main__":
    main()
