"""How exact the tiled path is, and how its time compares with the naive path's.

How to read it: the first table is max |tiled - naive| in float64 on
standard-normal inputs, over tiles of 1 to 1000 and plain, causal and windowed
attention, as a multiple of 1e-14: at most 1 is the target. The second is the
largest error as a share of FlashAttention's measuring stick: at most 1 is the
target. The third is time, the best of 3 runs, and has no target: NumPy has no
on-chip memory, so the tiled path pays for its loops and gains what stays in cache.
"""
import time

import numpy as np

from helpers import judged, naive, qkv, tiled
from oracle import largest, limit, wide

BLOCKS = (1, 3, 16, 64, 1000)
OPTIONS = {"plain": {}, "causal": {"causal": True}, "window": {"window": (20, 5)}}
LENGTHS = (1, 7, 64, 150)


def exactness(n, options):
    """max |tiled - naive| of o and lse in units of 1e-14."""
    q, k, v = qkv(n, n, d=16)
    expected = naive(q, k, v, return_lse=True, **options)
    worst = 0.0
    for b in BLOCKS:
        got = tiled(q, k, v, block_q=b, block_kv=b, return_lse=True, **options)
        worst = max(worst, *(np.abs(x - y).max() for x, y in zip(got, expected)))
    return worst / 1e-14


def share(dtype, options, path):
    """The largest error over lengths as a share of the stick."""
    shares = []
    for n in (16, 64, 96):
        q, k, v = qkv(n, n, d=32, dtype=dtype)
        got = path(q, k, v, return_lse=True, **options)
        for x, ref, low, size in judged(got, q, k, v, **options):
            shares.append(largest(wide(x) - ref) / limit(x.dtype, ref, low, size))
    return float(max(shares))


def seconds(path, n, causal):
    q, k, v = qkv(n, n, d=64, lead=(4,), dtype="float32")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        path(q, k, v, causal=causal)
        times.append(time.perf_counter() - start)
    return min(times)


def table(title, columns, rows):
    print(f"\n{title:24}" + "".join(f"{x:>12}" for x in columns))
    for name, numbers in rows:
        print(f"{name:24}" + "".join(f"{x:12.3f}" for x in numbers))


def main():
    print(__doc__)
    rows = ((f"{n} tokens", [exactness(n, x) for x in OPTIONS.values()]) for n in LENGTHS)
    table("tiled - naive, 1e-14", OPTIONS, rows)
    rows = (
        (f"{dtype}, {name}", [share(dtype, x, path) for x in OPTIONS.values()])
        for dtype in ("float64", "float32", "float16", "bfloat16")
        for name, path in (("naive", naive), ("tiled", tiled))
    )
    table("share of the stick", OPTIONS, rows)
    rows = []
    for n in (512, 2048):
        for causal in (False, True):
            a, b = seconds(naive, n, causal), seconds(tiled, n, causal)
            rows.append((f"{n} tokens{', causal' * causal}", [1e3 * a, 1e3 * b, b / a]))
    table("4 heads of 64, float32", ["naive, ms", "tiled, ms", "ratio"], rows)


if __name__ == "__main__":
    main()
