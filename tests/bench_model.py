"""How long the formulas take.

How to read it: each figure is the best of 5 runs. One million lengths, drawn
evenly from 512 to 131,072, go through each formula in one call; the profile is
what the book and `flashlit model` draw.
"""
import time

import numpy as np

from flashlit import model
from flashlit.model import estimate
from flashlit.roofline import DEVICES
from flashlit.traffic import (
    Problem, compulsory_bytes, flash_bytes, flops, largest_block, lower_bound, score_count, standard_bytes,
)  # fmt: skip

SEED = Problem(8192, batch=8, heads=32, causal=True)
DEVICE = DEVICES["seed"]
MANY = SEED.at(np.linspace(512, 131072, 1_000_000).round())
FORMULAS = {
    "score_count": score_count,
    "flops": flops,
    "compulsory_bytes": compulsory_bytes,
    "standard_bytes": standard_bytes,
    "flash_bytes, queries outside": flash_bytes,
    "flash_bytes, keys outside": lambda p: flash_bytes(p, order="keys"),
    "lower_bound": lambda p: lower_bound(p, DEVICE.sram),
    "largest_block": lambda p: largest_block(p, DEVICE.sram),
    "estimate": lambda p: estimate(p, DEVICE),
}


def best(f, *args, runs=5):
    """Seconds of the fastest run."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        f(*args)
        times.append(time.perf_counter() - start)
    return min(times)


def profile():
    """The 48 lengths of the seed document through the model."""
    if hasattr(model, "profile"):
        return model.profile(SEED, DEVICE)
    return estimate(SEED.at(np.geomspace(512, 131072, 48)), DEVICE).speedup


def main():
    print(__doc__)
    print(f"{'profile, 48 lengths':32} {1e3 * best(profile, runs=50):9.3f} ms   target: at most 2 ms")
    print(f"{'estimate, one length':32} {1e3 * best(estimate, SEED, DEVICE, runs=50):9.3f} ms")
    print("\n1,000,000 lengths                               target: at most 1000 ms each")
    for name, f in FORMULAS.items():
        print(f"{name:32} {1e3 * best(f, MANY):9.1f} ms")


if __name__ == "__main__":
    main()
