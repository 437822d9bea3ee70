"""All paths under the strictest NumPy there is, and inputs to give them."""
import warnings
from functools import partial, wraps

import ml_dtypes
import numpy as np

from flashlit import backward, bench, decode, fast
from flashlit import naive as naive_module
from flashlit import online, tiled as tiled_module
from oracle import largest, oracle, plain, within

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def strict(f):
    """f, where a NumPy warning of any kind is an exception."""

    @wraps(f)
    def call(*args, **options):
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            return f(*args, **options)

    return call


naive = strict(naive_module.attention)
tiled = strict(tiled_module.flash_attention)
quick = strict(fast.flash_attention)
uncompiled = bench.numpy_step()(quick)  # as without Numba
split = strict(decode.decode_attention)
merge = strict(online.merge)


@strict
def vjp(q, k, v, do, dlse=None, order="keys", **options):
    """(o, lse) and the gradients."""
    got, pullback = backward.flash_attention_vjp(q, k, v, **options)
    return got, pullback(do, dlse, order=order)


TILES = [(1, 1), (2, 3), (3, 2), (5, 1), (16, 5), (1000, 1000), (None, None)]
PATHS = {"naive": naive} | {
    f"tiles {q} x {kv}": partial(tiled, block_q=q, block_kv=kv) for q, kv in TILES
} | {
    f"fast {q} x {kv}": partial(quick, block_q=q, block_kv=kv) for q, kv in TILES
} | {
    "NumPy's step 2 x 3": partial(uncompiled, block_q=2, block_kv=3), "NumPy's step None x None": uncompiled
} | {f"splits {n}": partial(split, splits=n) for n in (1, 3)}
FEW = {name: PATHS[name] for name in (
    "naive", "tiles 1 x 1", "tiles 3 x 2", "tiles None x None", "splits 3", "fast 2 x 3", "fast None x None",
    "NumPy's step 2 x 3",
)}  # fmt: skip


def normal(shape, dtype="float64", seed=0):
    """Standard normal numbers, rounded to dtype."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return x.astype(DTYPES[dtype] if isinstance(dtype, str) else dtype)


def qkv(n, m, d=4, dv=None, lead=(), kv_lead=None, dtype="float64", seed=0):
    """Standard normal q, k and v."""
    kv_lead, dv = lead if kv_lead is None else kv_lead, d if dv is None else dv
    shapes = [(*lead, n, d), (*kv_lead, m, d), (*kv_lead, m, dv)]
    return [normal(shape, dtype, [seed, i]) for i, shape in enumerate(shapes)]


def check(got, q, k, v, **options):
    """(o, lse) against the oracle, by the measuring stick."""
    for x, ref, low, size in judged(got, q, k, v, **options):
        assert within(x, ref, low, size), f"got {x!r}, expected {ref!r}"


def judged(got, q, k, v, **options):
    """What came, what is right, plain attention in that type, the size of a value."""
    refs = oracle(q, k, v, **options)
    for i, x in enumerate(got):
        size = largest(v) if i == 0 else largest(refs[1])
        yield x, refs[i], plain(x.dtype, q, k, v, **options)[i], size


def agree(a, b, size=1.0):
    """Within 1e-14 of each other (times size), NaN and inf in the same places."""
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-14 * max(1, size), equal_nan=True)


def same(a, b):
    """The same bits."""
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
