"""Both paths against the oracle: shapes, tiles, options and types."""
import numpy as np
import pytest

from helpers import DTYPES, FEW, PATHS, agree, check, naive, normal, qkv, same, tiled

SHAPES = [(1, 1), (1, 4), (4, 1), (3, 7), (7, 3), (9, 9)]
BOTTOM, TOP = {"align": "bottom_right"}, {"align": "top_left"}
OPTIONS = {
    "nothing": {},
    "causal bottom right": {"causal": True, **BOTTOM},
    "causal top left": {"causal": True, **TOP},
    "causal shift 2": {"causal": True, "align": 2},
    "causal shift -1": {"causal": True, "align": -1},
    "window 0 0": {"window": (0, 0), **BOTTOM},
    "window 1 0": {"window": (1, 0), **TOP},
    "window 0 1": {"window": (0, 1), **BOTTOM},
    "window 2 none": {"window": (2, None), **TOP},
    "window none 1": {"window": (None, 1), **BOTTOM},
    "window 3 5 causal": {"window": (3, 5), "causal": True, **TOP},
    "window none none": {"window": (None, None)},
    "softcap": {"softcap": 1.5},
    "scale 0": {"scale": 0},
    "scale -1": {"scale": -1.0},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "all": {
        "mask": True, "bias": True, "softcap": 2.0, "scale": 0.7,
        "causal": True, "window": (4, 1), **BOTTOM,
    },
}


def options_for(name, n, m, dtype="float64"):
    """An entry of OPTIONS, with True replaced by an array of the scores' shape."""
    options = dict(OPTIONS[name])
    if options.get("mask"):
        options["mask"] = normal((n, m), seed=7) < 0.5
    if options.get("bias"):
        options["bias"] = normal((n, m), dtype, seed=8)
    return options


@pytest.mark.parametrize("n, m", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_oracle(name, dtype, n, m):
    q, k, v = qkv(n, m, d=5, dv=3, lead=(8,), dtype=dtype)  # a stick needs a crowd
    options = options_for(name, n, m, dtype)
    for path in FEW.values():
        check(path(q, k, v, return_lse=True, **options), q, k, v, **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_tile_size(name, path):
    q, k, v = qkv(19, 23, d=8)
    options = options_for(name, 19, 23)
    got = PATHS[path](q, k, v, return_lse=True, **options)
    agree(got, naive(q, k, v, return_lse=True, **options))
    check(got, q, k, v, **options)


# Head dims and lengths of FlashAttention's own tests.
FLASH_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
FLASH_SHAPES = [
    (1, 1), (1, 3), (2, 1), (3, 3), (64, 1), (239, 1), (799, 3), (511, 1), (3, 513),
    (1, 147), (1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217),
    (113, 211), (108, 256), (256, 512), (512, 256), (307, 256), (640, 128),
    (1023, 1024), (1024, 1023), (2048, 2048),
]  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, m", FLASH_SHAPES)
def test_tiled_is_naive_on_flash_attention_shapes(n, m, causal):
    q, k, v = qkv(n, m, d=FLASH_DIMS[(n + m) % len(FLASH_DIMS)])
    options = {"causal": causal, "align": "bottom_right", "return_lse": True}
    expected = naive(q, k, v, **options)
    for block in ((64, 48), (None, None)):
        agree(tiled(q, k, v, block_q=block[0], block_kv=block[1], **options), expected)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("d", FLASH_DIMS)
def test_oracle_on_flash_attention_dims(d, dtype):
    q, k, v = qkv(11, 37, d=d, dtype=dtype)
    for path in (naive, tiled):
        check(path(q, k, v, return_lse=True), q, k, v)


LEADS = [  # of q, and of k and v
    ((), ()),
    ((3,), (3,)),
    ((2, 3), (2, 3)),
    ((2, 3), (1, 3)),
    ((1, 3), (2, 3)),
    ((3,), (2, 3)),
    ((4, 1, 3), (2, 3)),
    ((4, 1, 2), (1, 5, 2)),
    ((2, 3), ()),
]


@pytest.mark.parametrize("lead, kv_lead", LEADS)
@pytest.mark.parametrize("path", FEW)
def test_leading_axes_broadcast(path, lead, kv_lead):
    q, k, v = qkv(3, 5, d=2, lead=lead, kv_lead=kv_lead)
    got = FEW[path](q, k, v, return_lse=True)
    assert got[0].shape == (*np.broadcast_shapes(lead, kv_lead), 3, 2)
    check(got, q, k, v)


@pytest.mark.parametrize("path", FEW)
def test_k_and_v_broadcast_apart(path):
    q, k, v = qkv(3, 5, lead=(2, 3))
    got = FEW[path](q, k[:1], v, return_lse=True)
    same(got, FEW[path](q, np.repeat(k[:1], 2, axis=0), v, return_lse=True))


@pytest.mark.parametrize("heads, kv_heads", [(6, 1), (6, 2), (12, 2), (5, 5), (7, 1), (4, 2)])
@pytest.mark.parametrize("path", FEW)
def test_grouped_heads(path, heads, kv_heads):
    q, k, v = qkv(4, 6, lead=(2, heads), kv_lead=(2, kv_heads))
    got = FEW[path](q, k, v, causal=True, align="bottom_right", return_lse=True)
    check(got, q, k, v, causal=True, align="bottom_right")
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    same(got, FEW[path](q, k, v, causal=True, align="bottom_right", return_lse=True))


@pytest.mark.parametrize("dv", [0, 1, 7])
@pytest.mark.parametrize("path", FEW)
def test_value_dim(path, dv):
    q, k, v = qkv(3, 5, d=4, dv=dv)
    got = FEW[path](q, k, v, return_lse=True)
    assert got[0].shape == (3, dv)
    check(got, q, k, v)


OVER = [
    (), (5,), (1, 5), (3, 1), (3, 5), (1, 1),
    (2, 3, 5), (2, 1, 1), (4, 1, 1, 5), (4, 1, 3, 1), (4, 2, 3, 5),
]  # fmt: skip


@pytest.mark.parametrize("shape", OVER)
@pytest.mark.parametrize("path", FEW)
def test_mask_and_bias_broadcast(path, shape):
    q, k, v = qkv(3, 5, lead=(4, 2))
    mask, bias = normal(shape, seed=3) < 0.6, normal(shape, seed=4)
    mask, bias = np.asarray(mask), np.asarray(bias)
    got = FEW[path](q, k, v, mask=mask, bias=bias, return_lse=True)
    check(got, q, k, v, mask=mask, bias=bias)


@pytest.mark.parametrize("path", FEW)
def test_mask_and_bias_under_grouped_heads(path):
    q, k, v = qkv(3, 5, lead=(2, 4), kv_lead=(2, 2))
    options = {"mask": normal((4, 3, 5), seed=3) < 0.6, "bias": normal((2, 1, 3, 1), seed=4)}
    check(FEW[path](q, k, v, return_lse=True, **options), q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", FEW)
def test_bias_may_be_float32(path, dtype):
    q, k, v = qkv(3, 5, dtype=dtype)
    bias = normal((3, 5), "float32", seed=4)
    got = FEW[path](q, k, v, bias=bias, return_lse=True)
    check(got, q, k, v, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", FEW)
def test_types_of_the_result(path, dtype):
    q, k, v = qkv(3, 5, dtype=dtype)
    o, lse = FEW[path](q, k, v, return_lse=True)
    assert o.dtype == (np.float32 if dtype.startswith("float8") else DTYPES[dtype])
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert (o.shape, lse.shape) == ((3, 4), (3,))


@pytest.mark.parametrize("path", FEW)
def test_without_lse_only_o_comes_back(path):
    q, k, v = qkv(3, 5)
    same([FEW[path](q, k, v)], [FEW[path](q, k, v, return_lse=True)[0]])


@pytest.mark.parametrize("path", FEW)
def test_align_without_a_band_is_ignored(path):
    q, k, v = qkv(3, 5)
    same([FEW[path](q, k, v, align="top_left")], [FEW[path](q, k, v)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", FEW)
def test_out_is_filled_and_returned(path, dtype):
    q, k, v = qkv(3, 5, lead=(2,), dtype=dtype)
    expected = FEW[path](q, k, v)
    out = np.full_like(expected, 9)
    o, lse = FEW[path](q, k, v, out=out, return_lse=True)
    assert o is out
    same([out], [expected])


@pytest.mark.parametrize("path", FEW)
def test_out_may_be_a_view(path):
    q, k, v = qkv(3, 5)
    room = np.full((4, 6), 9.0)
    FEW[path](q, k, v, out=room[:3, 1:5])
    same([room[:3, 1:5].copy()], [FEW[path](q, k, v)])
    assert (room[3] == 9).all() and (room[:, [0, 5]] == 9).all()


@pytest.mark.parametrize("path", FEW)
def test_first_causal_row_is_the_first_value(path):
    q, k, v = qkv(6, 6)
    assert np.array_equal(FEW[path](q, k, v, causal=True)[0], v[0])


def test_a_hidden_tile_leaves_no_maximum_behind():
    """A row sees nothing in its first tiles, and then logits far below zero."""
    q, k, v = np.ones((1, 1)), np.full((5, 1), -1000.0), np.arange(5.0)[:, None]
    for path in PATHS.values():
        o, lse = path(q, k, v, scale=1, mask=np.arange(5) > 2, return_lse=True)
        np.testing.assert_allclose((o[0, 0], lse[0]), (3.5, np.log(2) - 1000), rtol=1e-14)
