"""What holds for every input, on examples that Hypothesis makes up."""
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from helpers import DTYPES, agree, check, naive, normal, qkv, same, tiled
from oracle import visible
from flashlit.scores import Band, pairs

SIZES = st.integers(0, 9)
ALIGNS = st.sampled_from(["bottom_right", "top_left"]) | st.integers(-4, 4)
BOUNDS = st.none() | st.integers(0, 4)
BANDS = st.fixed_dictionaries(
    {"causal": st.booleans(), "window": st.none() | st.tuples(BOUNDS, BOUNDS), "align": ALIGNS}
)
SHAPES = st.tuples(SIZES, SIZES)
BLOCKS = st.fixed_dictionaries({x: st.integers(1, 11) for x in ("block_q", "block_kv")})


@st.composite
def calls(draw, dtypes=("float64",), spoil=True):
    """q, k, v and every option at once."""
    n, m = draw(SHAPES)
    group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    lead, kv_lead = draw(
        st.sampled_from([
            ((), ()),
            ((group * kv_heads,), (kv_heads,)),
            ((2, group * kv_heads), (1, kv_heads)),
        ])
    )  # fmt: skip
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 10**6))
    q, k, v = qkv(n, m, draw(st.integers(1, 4)), draw(st.integers(0, 3)), lead, kv_lead, dtype, seed)
    options = draw(BANDS) | {
        "softcap": draw(st.none() | st.sampled_from([0.5, 3.0, 50.0])),
        "scale": draw(st.none() | st.sampled_from([0.0, -0.7, 1.0, 5.0])),
    }
    shape = (*lead, n, m)
    over = shape[draw(st.integers(0, len(shape))) :]
    over = tuple(draw(st.sampled_from([1, x])) for x in over)
    if draw(st.booleans()):
        options["mask"] = np.asarray(normal(over, seed=seed) < draw(st.sampled_from([-1, 0, 1])))
    if draw(st.booleans()):
        options["bias"] = np.asarray(normal(over, dtype, seed=seed + 1))
        if draw(st.booleans()) and not dtype.startswith("float8"):
            options["bias"] = np.where(options["bias"] < 0, -np.inf, options["bias"]).astype(DTYPES[dtype])
    if spoil and m and draw(st.booleans()):  # NaN or inf in one key or value
        x, j = draw(st.sampled_from([k, v])), draw(st.integers(0, m - 1))
        x[..., j, :] = draw(st.sampled_from([np.nan, np.inf]))
    return (q, k, v), options


@given(calls(), BLOCKS)
def test_both_paths_are_the_oracle(call, blocks):
    given_, options = call
    check(naive(*given_, return_lse=True, **options), *given_, **options)
    check(tiled(*given_, return_lse=True, **blocks, **options), *given_, **options)


@given(calls(["float32", "float16", "bfloat16", "float8_e4m3fn"], spoil=False), BLOCKS)
def test_tiled_is_naive_in_every_type(call, blocks):
    given_, options = call
    o, lse = naive(*given_, return_lse=True, **options)
    x, y = tiled(*given_, return_lse=True, **blocks, **options)
    eps = {4: 1e-6, 2: 1e-2 if given_[0].dtype != np.float16 else 1e-3}[o.dtype.itemsize]
    assert x.dtype == o.dtype and y.dtype == lse.dtype
    np.testing.assert_allclose(x.astype(float), o.astype(float), rtol=eps, atol=4 * eps)
    np.testing.assert_allclose(y, lse, rtol=1e-6, atol=4e-6)


@given(calls(), BLOCKS)
def test_o_needs_no_lse(call, blocks):
    given_, options = call
    same([naive(*given_, **options)], naive(*given_, return_lse=True, **options)[:1])
    o = tiled(*given_, return_lse=True, **blocks, **options)[0]
    same([tiled(*given_, **blocks, **options)], [o])


@given(SHAPES, st.permutations(range(9)), st.integers(0, 10**6), BLOCKS)
def test_order_of_keys_does_not_matter(shape, order, seed, blocks):
    n, m = shape
    q, k, v = qkv(n, m, seed=seed)
    bias = normal((n, m), seed=seed)
    order = [j for j in order if j < m]
    for path, tile in ((naive, {}), (tiled, blocks)):
        a = path(q, k, v, bias=bias, return_lse=True, **tile)
        b = path(q, k[order], v[order], bias=bias[:, order], return_lse=True, **tile)
        agree(a, b)


@given(SHAPES, st.floats(-1e6, 1e6), st.integers(0, 10**6), BLOCKS)
def test_a_constant_added_to_a_row_moves_only_its_lse(shape, c, seed, blocks):
    n, m = shape
    q, k, v = qkv(n, m, seed=seed)
    for path, tile in ((naive, {}), (tiled, blocks)):
        o, lse = path(q, k, v, return_lse=True, **tile)
        moved = path(q, k, v, bias=np.full((n, 1), c), return_lse=True, **tile)
        agree(moved, (o, lse + c), size=4 * abs(c))


@given(calls(), BLOCKS, st.integers(0, 9), st.sampled_from([np.nan, np.inf, 1e300, 0.0]))
def test_a_hidden_key_changes_nothing(call, blocks, at, held):
    (q, k, v), options = call
    n, m = q.shape[-2], k.shape[-2]
    at = min(at, m)
    shown = visible(n, m, **{x: options.pop(x) for x in ("causal", "window", "align")})
    shape = (*np.broadcast_shapes(q.shape[:-2], k.shape[:-3] + (1,) * (k.ndim > 2)), n, m)
    mask = np.broadcast_to(options.pop("mask", True), shape) & shown
    bias = np.broadcast_to(options.pop("bias", 0.0), shape)
    more = {
        "mask": np.insert(mask, at, False, axis=-1),
        "bias": np.insert(bias, at, held, axis=-1),
    }
    k2, v2 = np.insert(k, at, held, axis=-2), np.insert(v, at, held, axis=-2)
    for path, tile in ((naive, {}), (tiled, blocks)):
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
