"""Inputs that break attention: huge, hidden, missing, oddly stored."""
import warnings

import numpy as np
import pytest

from helpers import DTYPES, FEW, PATHS, agree, check, naive, normal, qkv, quick, same, tiled, uncompiled

NAN, INF = np.nan, np.inf
every_path = pytest.mark.parametrize("path", FEW.values(), ids=FEW)


def column(*numbers, dtype="float64"):
    """Numbers as rows of width 1."""
    return np.array(numbers, DTYPES[dtype])[:, None]


# Large numbers


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e4, -1e4, 1e6, -1e6, 1e30, -1e30])
@every_path
def test_large_logits(path, size, dtype):
    q, v = column(1, 1, dtype=dtype), column(1, 5, 3, dtype=dtype)
    k = column(size, 0, size, dtype=dtype)
    assert (path(q, k, v, scale=1) == (2 if size > 0 else 5)).all()
    o, lse = path(q, k[::2], v[::2], scale=1, return_lse=True)
    assert (o == 2).all()
    np.testing.assert_allclose(lse, float(k[0, 0]) + np.log(2), rtol=1e-6)


@pytest.mark.parametrize("tau, expected", [(1e4, 2.0), (-1e4, 5.0)])
@every_path
def test_large_scale(path, tau, expected):
    o = path(column(1.0), column(1, 0, 1), column(1, 5, 3), scale=tau)
    assert o == expected


@every_path
def test_logits_of_standard_normal_inputs_times_1e4(path):
    q, k, v = qkv(7, 9, d=16)
    got = path(1e4 * q, k, v, return_lse=True)
    check(got, 1e4 * q, k, v)


SMALL_SCALE = [  # type, q, k, scale: q k overflows, scale q k is 1
    ("float32", 2.0**64, 2.0**64, 2.0**-128),
    ("float32", 2.0**120, 2.0**8, 2.0**-128),
    ("float32", 2.0**8, 2.0**120, 2.0**-128),
    ("float32", 2.0**-20, 2.0**127, 2.0**-107),
    ("float32", 2.0**120, 2.0**120, 2.0**-240),
    ("float32", 2.0**-120, 2.0**-120, 2.0**240),
    ("bfloat16", 2.0**64, 2.0**64, 2.0**-128),
    ("float64", 2.0**1000, 2.0**70, 2.0**-1070),
    ("float64", 2.0**530, 2.0**530, 2.0**-1060),
    ("float32", 2.0**-100, 2.0**-20, 2.0**120),
    ("float32", 2.0**-20, 2.0**-100, 2.0**120),
]


@pytest.mark.parametrize("dtype, a, b, scale", SMALL_SCALE)
@every_path
def test_overflow_before_a_small_scale(path, dtype, a, b, scale):
    q, k = column(a, dtype=dtype), column(b, 0, dtype=dtype)
    o = path(q, k, column(1, 0, dtype=dtype), scale=scale)
    rtol = 4e-3 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(o.astype(float), 1 / (1 + np.exp(-1)), rtol)


HUGE = {"float32": 3e38, "bfloat16": 3e38, "float64": 1e308, "float16": 6e4}


@pytest.mark.parametrize("dtype, a", HUGE.items())
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_average_of_huge_values_is_exact(path, dtype, a):
    k = np.zeros((40, 2), DTYPES[dtype])
    v = np.full((40, 3), a, DTYPES[dtype])
    o, lse = path(k[:2], k, v, return_lse=True)
    same([o], [v[:2]])
    np.testing.assert_allclose(lse, np.log(40), rtol=1e-6)


@pytest.mark.parametrize("dtype, a", HUGE.items())
@every_path
def test_huge_values_of_both_signs_cancel(path, dtype, a):
    k = np.zeros((40, 1), DTYPES[dtype])
    v = np.where(np.arange(40)[:, None] < 20, a, -a).astype(k.dtype)
    assert np.abs(path(k[:1], k, v).astype(float)) <= 1e-7 * a


@every_path
def test_huge_values_beside_ordinary_ones(path):
    q, k, v = qkv(5, 9, d=2, dv=3)
    v[4, 1] = 1e308
    check(path(q, k, v, return_lse=True), q, k, v)
    quiet = v.copy()
    quiet[4, 1] = 0
    agree([path(q, k, v)[:, [0, 2]]], [path(q, k, quiet)[:, [0, 2]]])


@pytest.mark.parametrize("cap", [1e-300, 1e-30, 1.0, 1e30, 1e38, 1e300])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@every_path
def test_softcap_of_any_size(path, dtype, cap):
    q, k, v = qkv(5, 6, lead=(4,), dtype=dtype)
    check(path(q, k, v, softcap=cap, return_lse=True), q, k, v, softcap=cap)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@every_path
def test_tiny_numbers_are_kept(path, dtype):
    tiny = np.finfo(dtype).tiny
    o = path(column(0, dtype=dtype), column(0, 0, dtype=dtype), column(tiny, tiny, dtype=dtype))
    assert o == tiny


# Rows that see nothing


def blind(n, m):
    """A mask in which every second row sees nothing."""
    return np.broadcast_to(np.arange(n)[:, None] % 2 == 1, (n, m))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_rows_hidden_by_a_mask(path, dtype):
    q, k, v = qkv(5, 7, dtype=dtype)
    o, lse = path(q, k, v, mask=blind(5, 7), return_lse=True)
    assert (o[::2] == 0).all() and (lse[::2] == -INF).all()
    same([o[1::2], lse[1::2]], [x[1::2] for x in path(q, k, v, return_lse=True)])


HIDING = {
    "mask": {"mask": np.zeros((3, 5), bool)},
    "bias": {"bias": np.full((3, 5), -INF)},
    "causal": {"causal": True, "align": -3},
    "window before": {"window": (0, 0), "align": -3},
    "window beyond": {"window": (0, 0), "align": 5},
    "far beyond": {"window": (0, 0), "align": 10**30},
    "mask and causal": {"mask": np.arange(5) > 2, "causal": True, "align": "top_left"},
    "bias and window": {
        "bias": np.where(np.arange(5) < 3, -INF, 0), "window": (None, 0), "align": "top_left",
    },
}  # fmt: skip


@pytest.mark.parametrize("hiding", HIDING.values(), ids=HIDING)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_all_hidden(path, hiding):
    o, lse = path(*qkv(3, 5), return_lse=True, **hiding)
    assert np.array_equal(o, np.zeros((3, 4))) and not np.signbit(o).any()
    assert np.array_equal(lse, np.full(3, -INF))


@every_path
def test_visible_logits_that_are_all_minus_infinity(path):
    k = column(-INF, -INF)
    o, lse = path(column(1, 1), k, column(1, 2), return_lse=True)
    assert (o == 0).all() and (lse == -INF).all()


@every_path
def test_a_visible_minus_infinity_has_probability_0(path):
    o, lse = path(column(1.0), column(-INF, 0, 0), column(7, 1, 2), return_lse=True)
    assert o == 1.5
    agree([lse], [np.log([2.0])])


# NaN and infinity out of sight


OUT_OF_SIGHT = {  # how keys 2 and 4 of 5 are hidden from every row that exists
    "mask": {"mask": np.array([1, 1, 0, 1, 0], bool)},
    "mask by row": {"mask": np.tile(np.array([1, 1, 0, 1, 0], bool), (3, 1))},
    "bias": {"bias": np.array([0, 0.5, -INF, 1, -INF])},
}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["k", "v", "both"])
@pytest.mark.parametrize("hiding", OUT_OF_SIGHT.values(), ids=OUT_OF_SIGHT)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_hidden_everywhere(path, hiding, where, bad):
    q, k, v = qkv(3, 5)
    expected = path(q, k, v, return_lse=True, **hiding)
    for x in {"k": [k], "v": [v], "both": [k, v]}[where]:
        x[[2, 4], 1] = bad
    agree(path(q, k, v, return_lse=True, **hiding), expected)
    check(path(q, k, v, return_lse=True, **hiding), q, k, v, **hiding)


BANDS = {
    "causal": {"causal": True},
    "window": {"window": (1, 0)},
    "mask": {"mask": np.tri(6, dtype=bool)},
    "bias": {"bias": np.where(np.tri(6), 0, -INF)},
}


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_no_effect_on_rows_that_do_not_see_it(path, band, where, dtype, bad):
    q, k, v = qkv(6, 6, dtype=dtype)
    band = dict(band)
    if "bias" in band:
        band["bias"] = band["bias"].astype(np.float32)
    expected = path(q, k, v, return_lse=True, **band)
    (k if where == "k" else v)[3, 1] = bad
    got = path(q, k, v, return_lse=True, **band)
    sees = np.array([3 <= i and (i <= 4 or "window" not in band) for i in range(6)])
    same([x[~sees] for x in got], [x[~sees] for x in expected])
    if where == "v":  # in column 1 of the rows that see it, and nowhere else
        same([got[0][:, [0, 2, 3]], got[1]], [expected[0][:, [0, 2, 3]], expected[1]])
        assert not np.isfinite(got[0][sees, 1].astype(float)).any()


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_visible_bad_logit_spoils_its_row_only(path, bad):
    q, k, v = qkv(5, 7)
    expected = path(q, k, v, return_lse=True)
    bias = np.zeros((5, 7))
    bias[2, 4] = bad
    got = path(q, k, v, bias=bias, return_lse=True)
    assert np.isnan(got[0][2]).all() and np.isnan(got[1][2])
    rest = np.arange(5) != 2
    same([x[rest] for x in got], [x[rest] for x in expected])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@every_path
def test_a_bad_query_spoils_its_row_only(path, bad):
    q, k, v = qkv(5, 7)
    expected = path(q, k, v, return_lse=True)
    q[2] = bad
    got = path(q, k, v, return_lse=True)
    assert np.isnan(got[0][2]).all() and np.isnan(got[1][2])
    rest = np.arange(5) != 2
    same([x[rest] for x in got], [x[rest] for x in expected])


@pytest.mark.parametrize("bad", [NAN, INF])
@every_path
def test_a_bad_query_that_sees_nothing_gives_0(path, bad):
    q, k, v = qkv(5, 7)
    q[2] = bad
    o, lse = path(q, k, v, mask=np.arange(5)[:, None] != 2, return_lse=True)
    assert (o[2] == 0).all() and lse[2] == -INF and np.isfinite(o).all()


@pytest.mark.parametrize("values", [[INF, 1], [-INF, 1], [INF, -INF], [NAN, 1], [NAN, INF]])
@every_path
def test_visible_infinite_values(path, values):
    with np.errstate(invalid="ignore"):
        expected = sum(values)
    o = path(column(0.0), column(0, 0), column(*values))
    np.testing.assert_array_equal(o, [[expected]])


@every_path
def test_minus_infinite_bias_hides_a_nan_and_an_infinite_logit(path):
    bias = np.array([-INF, -INF, 0])
    o, lse = path(column(1.0), column(NAN, INF, 0), column(7, 8, 2), bias=bias, return_lse=True)
    assert o == 2 and lse == 0


@pytest.mark.parametrize("bad", [NAN, INF])
@every_path
def test_a_hidden_bias_has_no_effect(path, bad):
    q, k, v = qkv(3, 4)
    mask, bias = np.array([1, 0, 1, 1], bool), np.array([0.5, bad, 0, 1])
    got = path(q, k, v, mask=mask, bias=bias, return_lse=True)
    same(got, path(q, k, v, mask=mask, bias=np.array([0.5, 0, 0, 1]), return_lse=True))


# Empty arrays


EMPTY = [  # lead, n, m
    ((), 3, 0), ((), 0, 5), ((), 0, 0), ((2, 3), 3, 0), ((2, 3), 0, 4),
    ((0, 2), 3, 4), ((2, 0), 3, 4), ((0, 0), 0, 0),
]  # fmt: skip
EMPTY_OPTIONS = {
    "nothing": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"window": (1, 1), "align": "top_left"},
    "softcap": {"softcap": 3.0},
    "mask": {"mask": True},
    "bias": {"bias": True},
}


@pytest.mark.parametrize("name", EMPTY_OPTIONS)
@pytest.mark.parametrize("lead, n, m", EMPTY)
@every_path
def test_empty(path, lead, n, m, name):
    q, k, v = qkv(n, m, d=4, dv=2, lead=lead)
    options = dict(EMPTY_OPTIONS[name])
    if name in ("mask", "bias"):
        options[name] = np.ones((n, m), bool if name == "mask" else float)
    o, lse = path(q, k, v, return_lse=True, **options)
    assert np.array_equal(o, np.zeros((*lead, n, 2)))
    assert np.array_equal(lse, np.full((*lead, n), -INF))


# Stored oddly


def reversed_copy(x):
    return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]


def strided(x):
    return np.repeat(np.repeat(x, 3, axis=-1), 2, axis=-2)[..., ::2, ::3]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x):
    room = np.zeros(x.nbytes + 1, np.uint8)[1:]
    y = room.view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


STORED = {
    "read-only": read_only,
    "strided": strided,
    "negative strides": reversed_copy,
    "Fortran": np.asfortranarray,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "seq first": lambda x: np.swapaxes(np.swapaxes(x, -2, -3).copy(), -2, -3),
    "unaligned": unaligned,
    "list": lambda x: x.tolist(),
}


@pytest.mark.parametrize("store", STORED.values(), ids=STORED)
@every_path
def test_storage_does_not_matter(path, store):
    q, k, v = qkv(5, 6, lead=(2, 3))
    options = {"mask": normal((5, 6), seed=5) < 0.7, "bias": normal((3, 5, 6), seed=6), "return_lse": True}
    expected = path(q, k, v, **options)
    options["bias"] = store(options["bias"])
    got = path(*map(store, (q, k, v)), **options)
    assert got[0].dtype.newbyteorder("=") == np.float64
    agree(got, expected)


@every_path
def test_matrices_are_arrays(path):
    q, k, v = qkv(5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrices = [np.asmatrix(x) for x in (q, k, v)]
    got = path(*matrices, return_lse=True)
    assert type(got[0]) is np.ndarray
    same(got, path(q, k, v, return_lse=True))


@pytest.mark.parametrize("dtype", DTYPES)
@every_path
def test_inputs_are_not_written_to(path, dtype):
    q, k, v = qkv(5, 6, lead=(2,), dtype=dtype)
    if not dtype.startswith("float8"):
        v[0, 3, 1] = INF
    mask, bias = normal((5, 6), seed=5) < 0.7, normal((5, 6), dtype, seed=6)
    given = (q, k, v, mask, bias)
    before = [x.tobytes() for x in given]
    path(q, k, v, mask=mask, bias=bias, causal=True, align="bottom_right", softcap=3.0)
    assert [x.tobytes() for x in given] == before


@every_path
def test_one_array_may_serve_three_times(path):
    x = normal((6, 4))
    check(path(x, x, x, causal=True, return_lse=True), x, x, x, causal=True)


# The same bits


OPTIONS = {"causal": True, "softcap": 3.0, "return_lse": True}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_repeated(path):
    q, k, v = qkv(33, 33, d=16, lead=(2,), dtype="float32")
    same(path(q, k, v, **OPTIONS), path(q, k, v, **OPTIONS))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block", [5, 16, None])
@pytest.mark.parametrize("path", [quick, uncompiled])
def test_batch_entry_alone_in_the_fast_loop(path, block, dtype):
    q, k, v = qkv(33, 33, d=16, lead=(8, 4), kv_lead=(8, 2), dtype=dtype)
    options = {"block_q": block, "block_kv": block, **OPTIONS}
    o, lse = path(q, k, v, **options)
    for b in range(8):
        alone = slice(b, b + 1)
        same(path(q[alone], k[alone], v[alone], **options), (o[alone], lse[alone]))
        same(path(q[b], k[b], v[b], **options), (o[b], lse[b]))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("block", [5, 16, None])
def test_batch_entry_alone(block, dtype):
    q, k, v = qkv(33, 33, d=16, lead=(8, 2), dtype=dtype)
    options = {"block_q": block, "block_kv": block, **OPTIONS}
    o, lse = tiled(q, k, v, **options)
    for b in range(8):
        alone = slice(b, b + 1)
        same(tiled(q[alone], k[alone], v[alone], **options), (o[alone], lse[alone]))
        same(tiled(q[b, 1], k[b, 1], v[b, 1], **options), (o[b, 1], lse[b, 1]))


def test_batch_entry_alone_with_default_tiles_of_several():
    q, k, v = qkv(300, 1100, d=8, lead=(2, 2), dtype="float32")
    o = tiled(q, k, v)
    same([tiled(q[1, 1], k[1, 1], v[1, 1])], [o[1, 1]])


def test_a_neighbour_full_of_nan_changes_nothing():
    q, k, v = qkv(9, 9, lead=(2, 2))
    expected = {path: path(q, k, v, **OPTIONS) for path in (naive, tiled, quick, uncompiled)}
    for x in (q, k, v):
        x[0] = NAN
    for path, bits in expected.items():
        same([x[1] for x in path(q, k, v, **OPTIONS)], [x[1] for x in bits])


# One row, one key: none spoils another


@every_path
def test_a_large_scale_spoils_no_other_row(path):
    q, k = column(1e-38, NAN, dtype="float32"), column(3e38, 2e38, dtype="float32")
    o = path(q, k, column(1, 2, dtype="float32"))  # width 1: the scale is 1
    assert np.isnan(o[1]) and np.isclose(o[0, 0], 1 + 1 / (1 + np.e), rtol=1e-5)


@pytest.mark.parametrize("hidden", [INF, -INF, NAN, 1e30])
@every_path
def test_a_large_scale_looks_at_no_hidden_key(path, hidden):
    q, k = column(1e30, dtype="float32"), column(1e-30, hidden, dtype="float32")
    mask = np.array([[True, False]])
    assert path(q, k, column(1, 2, dtype="float32"), scale=1e10, mask=mask) == 1


@every_path
def test_a_large_scale_of_one_row_is_not_that_of_another(path):
    q, k = column(1e20, 1e-20, dtype="float32"), column(1e-20, 1e20, dtype="float32")
    o = path(q, k, column(1, 2, dtype="float32"), scale=1e19, causal=True)
    assert o.ravel().tolist() == [1, 2]


@pytest.mark.parametrize("dtype, huge", [("float32", 3e38), ("float64", 1.7e308)])
@every_path
def test_a_hidden_huge_value_changes_no_bit(path, dtype, huge):
    q, k, v = qkv(6, 9, dtype=dtype)
    poisoned = v.copy()
    poisoned[4] = huge
    mask = np.arange(9) != 4
    same([path(q, k, poisoned, mask=mask)], [path(q, k, v, mask=mask)])


# Storage


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@every_path
def test_layout_changes_no_bit(path, dtype):
    q, k, v = qkv(33, 40, d=16, lead=(2,), dtype=dtype)
    turned = [np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (q, k, v)]
    fortran = [np.asfortranarray(x) for x in (q, k, v)]
    for inputs in (turned, fortran):
        o = path(*inputs)
        same([o], [path(q, k, v)])
        assert o.flags.c_contiguous


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("options", [{}, {"kv_lengths": 0}, {"mask": np.zeros((3, 5), bool)}], ids=str)
@every_path
def test_a_bad_sink_spoils_all_rows_of_its_head(path, options, bad):
    q, k, v = qkv(3, 5, lead=(2,))
    o, lse = path(q, k, v, sinks=np.array([bad, 0.5]), return_lse=True, **options)
    assert np.isnan(o[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(o[1]).all() and np.isfinite(lse[1]).all()
