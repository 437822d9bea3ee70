"""What holds for every input, on examples that Hypothesis makes up."""
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import DTYPES, agree, naive, normal, qkv, quick, same, split, tiled, uncompiled, vjp
from oracle import largest, oracle, plain, visible, within
from oracle_grad import oracle_vjp
from flashlit.scores import Band, pairs

SIZES = st.integers(0, 9)
SOME = st.sampled_from([2, 3, 4, 5, 6, 7, 8, 9, 1, 0])  # the same, 0 no more often than 9
FEWER = st.sampled_from([2, 3, 4, 5, 6, 1, 0])  # the slow gradients need short rows
ALIGNS = st.sampled_from(["bottom_right", "top_left"]) | st.integers(-4, 4)
BOUNDS = st.none() | st.integers(0, 4)
BANDS = st.fixed_dictionaries(
    {"causal": st.booleans(), "window": st.none() | st.tuples(BOUNDS, BOUNDS), "align": ALIGNS}
)
SHAPES = st.tuples(SIZES, SIZES)
BLOCKS = st.fixed_dictionaries({x: st.integers(1, 11) for x in ("block_q", "block_kv")})
POSITION = {"causal", "window", "align", "kv_lengths", "cu_seqlens_q", "cu_seqlens_kv"}
KINDS = ["matrices", "heads", "batch", "kv_lengths", "packed"]


@st.composite
def shapes(draw, kind):
    """Batch and heads of q, of k, of v and of the scores."""
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    if kind == "packed":
        kind = draw(st.sampled_from(KINDS[:2]))
    if kind == "kv_lengths":
        kind = draw(st.sampled_from(KINDS[:3]))
    if kind != "batch":
        lead, kv_lead = ((heads,), (kv_heads,)) if kind == "heads" else ((), ())
        return lead, kv_lead, kv_lead, lead
    some = st.sampled_from([(), (1,), (2,), (2, 1), (1, 2)])  # axes of length 1 broadcast
    q, k, v = draw(st.tuples(some, some, some))
    return (*q, heads), (*k, kv_heads), (*v, kv_heads), (*np.broadcast_shapes(q, k, v), heads)


@st.composite
def offsets(draw, total, documents):
    """Where packed documents, empty ones too, begin and end."""
    inner = draw(st.lists(st.integers(0, total), min_size=documents - 1, max_size=documents - 1))
    return np.array([0, *sorted(inner), total], np.int32)


@st.composite
def lengths(draw, kind, lead, n, m):
    """What a call says of its lengths."""
    if kind == "packed":
        documents = draw(st.integers(1, 3))
        return {
            "cu_seqlens_q": draw(offsets(n, documents)),
            "cu_seqlens_kv": draw(offsets(m, documents)),
        }
    if kind == "kv_lengths":
        batch = lead[:-1][draw(st.integers(0, len(lead))) :]
        shape = [draw(st.sampled_from([1, x])) for x in batch]
        size = int(np.prod(shape))
        some = draw(st.lists(st.integers(0, m), min_size=size, max_size=size))
        return {"kv_lengths": np.array(some, int).reshape(shape)}
    return {}


@st.composite
def poisoned(draw, x):
    """x with NaN or inf in one of its places, or in a row of them."""
    at = tuple(draw(st.integers(0, size - 1)) for size in x.shape)
    x[at if draw(st.booleans()) else at[:-1]] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return x


@st.composite
def calls(draw, kinds=KINDS, dtypes=("float64",), spoil=True, sizes=SOME):
    """q, k, v and every option at once."""
    kind, dtype = draw(st.sampled_from(kinds)), draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 10**6))
    n, m = draw(st.tuples(sizes, sizes))
    d, dv = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    *leads, lead = draw(shapes(kind))
    sizes = [(n, d), (m, d), (m, dv)]
    q, k, v = (normal((*x, *y), dtype, [seed, i]) for i, (x, y) in enumerate(zip(leads, sizes)))
    options = draw(BANDS) | draw(lengths(kind, lead, n, m)) | {
        "softcap": draw(st.none() | st.sampled_from([0.5, 3.0, 50.0])),
        "scale": draw(st.none() | st.sampled_from([0.0, -0.7, 1.0, 5.0])),
    }  # fmt: skip
    if kind in KINDS[:3] and n == m and draw(st.booleans()):
        options["align"] = None
    shape = (*lead, n, m)
    over = shape[draw(st.integers(0, len(shape))) :]
    over = tuple(draw(st.sampled_from([1, x])) for x in over)
    if draw(st.booleans()):
        options["mask"] = np.asarray(normal(over, seed=seed) < draw(st.sampled_from([-1, 0, 1])))
    if draw(st.booleans()):
        options["bias"] = np.asarray(normal(over, dtype, seed=seed + 1))
        if draw(st.booleans()) and not dtype.startswith("float8"):
            options["bias"] = np.where(options["bias"] < 0, -np.inf, options["bias"]).astype(DTYPES[dtype])
    if draw(st.booleans()):
        options["sinks"] = normal((1, *lead)[-1:], draw(st.sampled_from([dtype, "float32"])), seed + 2)
        if draw(st.booleans()) and not dtype.startswith("float8"):
            options["sinks"][-1] = -np.inf
    if spoil:
        for x in (q, k, v, options.get("bias", np.zeros(()))):
            if x.size and draw(st.integers(0, 3)) == 0:
                draw(poisoned(x))
    for x in (q, k, v, *options.values()):
        if isinstance(x, np.ndarray):
            x.flags.writeable = False  # nothing is ever written to
    return (q, k, v), options


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=1000)
@given(st.data(), BLOCKS)
def test_every_option_at_once(kind, data, blocks):
    """5,000 combinations through every path, against loops in extended precision."""
    given_, options = data.draw(calls([kind]))
    refs, lows = oracle(*given_, **options), plain(np.float64, *given_, **options)
    sizes = largest(given_[2]), largest(refs[1])
    splits = data.draw(st.integers(1, 11))
    paths = {"naive": naive, "tiled": partial(tiled, **blocks), "split": partial(split, splits=splits)}
    paths |= {"fast": partial(quick, **blocks), "NumPy's step": partial(uncompiled, **blocks)}
    for name, path in paths.items():
        got = path(*given_, return_lse=True, **options)
        for x, ref, low, size in zip(got, refs, lows, sizes, strict=True):
            assert within(x, ref, low, size), f"{name}: got {x!r}, expected {ref!r}"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=1000)
@given(st.data(), BLOCKS, st.sampled_from(["keys", "queries"]))
def test_gradients_of_every_option_at_once(kind, data, blocks, order):
    """5,000 combinations backward; what is not finite is so in the same places."""
    given_, options = data.draw(calls([kind], sizes=FEWER))
    (o, lse), seed = naive(*given_, return_lse=True, **options), data.draw(st.integers(0, 10**6))
    do, dlse = normal(o.shape, o.dtype, seed), normal(lse.shape, lse.dtype, seed + 1)
    dlse = data.draw(st.sampled_from([dlse, None]))
    (x, y), grads = vjp(*given_, do, dlse, order, **blocks, **options)
    same((x, y), quick(*given_, return_lse=True, **blocks, **options))
    refs = {name: x for name, x in oracle_vjp(*given_, do, dlse, **options).items() if x is not None}
    size = max(1, *map(largest, refs.values()))
    for name, ref in refs.items():
        x, finite = getattr(grads, name), np.isfinite(ref)
        assert x.shape == ref.shape and np.array_equal(np.isfinite(x), finite), (name, x, ref)
        error, reach = largest(x[finite] - ref[finite]), max(1e-13, np.finfo(x.dtype).eps)
        assert error <= reach * size, f"d{name}: off by {error}; got {x!r}, expected {ref!r}"


@given(calls(dtypes=["float32", "float16", "bfloat16", "float8_e4m3fn"], spoil=False), BLOCKS)
def test_tiled_is_naive_in_every_type(call, blocks):
    given_, options = call
    o, lse = naive(*given_, return_lse=True, **options)
    eps = {4: 1e-6, 2: 1e-2 if given_[0].dtype != np.float16 else 1e-3}[o.dtype.itemsize]
    for path in (tiled, quick, uncompiled):
        x, y = path(*given_, return_lse=True, **blocks, **options)
        assert x.dtype == o.dtype and y.dtype == lse.dtype
        np.testing.assert_allclose(x.astype(float), o.astype(float), rtol=eps, atol=4 * eps)
        np.testing.assert_allclose(y, lse, rtol=1e-6, atol=4e-6)


@given(calls(), BLOCKS)
def test_o_needs_no_lse(call, blocks):
    given_, options = call
    same([naive(*given_, **options)], naive(*given_, return_lse=True, **options)[:1])
    for path in (tiled, quick):
        o = path(*given_, return_lse=True, **blocks, **options)[0]
        same([path(*given_, **blocks, **options)], [o])


@given(SHAPES, st.permutations(range(9)), st.integers(0, 10**6), BLOCKS)
def test_order_of_keys_does_not_matter(shape, order, seed, blocks):
    n, m = shape
    q, k, v = qkv(n, m, seed=seed)
    bias = normal((n, m), seed=seed)
    order = [j for j in order if j < m]
    for path, tile in ((naive, {}), (tiled, blocks), (quick, blocks), (uncompiled, blocks)):
        a = path(q, k, v, bias=bias, return_lse=True, **tile)
        b = path(q, k[order], v[order], bias=bias[:, order], return_lse=True, **tile)
        agree(a, b)


@given(SHAPES, st.floats(-1e6, 1e6), st.integers(0, 10**6), BLOCKS)
def test_a_constant_added_to_a_row_moves_only_its_lse(shape, c, seed, blocks):
    n, m = shape
    q, k, v = qkv(n, m, seed=seed)
    for path, tile in ((naive, {}), (tiled, blocks), (quick, blocks), (uncompiled, blocks)):
        o, lse = path(q, k, v, return_lse=True, **tile)
        moved = path(q, k, v, bias=np.full((n, 1), c), return_lse=True, **tile)
        agree(moved, (o, lse + c), size=4 * abs(c))


@given(calls(), BLOCKS, st.integers(0, 9), st.sampled_from([np.nan, np.inf, 1e300, 0.0]))
def test_a_hidden_key_changes_nothing(call, blocks, at, held):
    (q, k, v), options = call
    n, m = q.shape[-2], k.shape[-2]
    at = min(at, m)
    shown = visible(n, m, **{x: options.pop(x) for x in POSITION & options.keys()})
    shape = (*naive(q, k, v).shape[:-1], m)
    mask = (np.broadcast_to(options.pop("mask", True), shape) & shown).reshape(shape)
    bias = np.broadcast_to(options.pop("bias", 0.0), shape)
    more = {
        "mask": np.insert(mask, at, False, axis=-1),
        "bias": np.insert(bias, at, held, axis=-1),
    }
    k2, v2 = np.insert(k, at, held, axis=-2), np.insert(v, at, held, axis=-2)
    for path, tile in ((naive, {}), (tiled, blocks), (quick, blocks), (uncompiled, blocks)):
        a = path(q, k, v, mask=mask, bias=bias, return_lse=True, **tile, **options)
        agree(path(q, k2, v2, return_lse=True, **tile, **more, **options), a, size=10)


@given(SHAPES, BANDS)
def test_pairs_counts_what_is_visible(shape, band):
    count = pairs(*shape, **band)
    assert type(count) is int and count == visible(*shape, **band).sum()


@given(SHAPES, BANDS, BLOCKS)
def test_kind_of_a_tile(shape, band, blocks):
    n, m = shape
    shown, stripe = visible(n, m, **band), Band(**band).diagonals(n, m)
    kinds = {0: "empty", 1: "full"}
    for i in range(0, n, blocks["block_q"]):
        for j in range(0, m, blocks["block_kv"]):
            rows, cols = slice(i, min(i + blocks["block_q"], n)), slice(j, min(j + blocks["block_kv"], m))
            tile = shown[rows, cols]
            assert np.array_equal(stripe.visible(rows, cols), tile)
            kind = stripe.kind(rows, cols)
            # never a wrong promise; a tile that the stripe passes by at a corner may be partial
            assert kind == kinds.get(tile.mean(), "partial")
