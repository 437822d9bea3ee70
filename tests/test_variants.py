"""Key lengths, packed documents, sinks and ALiBi, each held against the calls it stands for."""
from itertools import pairwise

import numpy as np
import pytest

from flashlit.variants import alibi_bias, alibi_slopes
from helpers import DTYPES, PATHS, agree, check, merge, normal, qkv, same

each_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
BANDS = {
    "all": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "top left": {"causal": True, "align": "top_left"},
    "window": {"window": (2, 1), "align": "bottom_right"},
    "shifted": {"causal": True, "window": (3, None), "align": -1},
}
each_band = pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)


# key lengths


@each_band
@each_path
def test_lengths_are_shorter_keys(path, band):
    """Bit for bit, whatever stands beyond the length; a length of 0 too."""
    lengths = np.array([[9, 4, 0], [1, 11, 5]], np.uint8)
    q, k, v = qkv(6, 11, lead=(2, 3, 4), kv_lead=(2, 3, 2))
    for at, m in np.ndenumerate(lengths):
        k[at][:, m:], v[at][:, m:] = np.nan, np.inf
    o, lse = path(q, k, v, kv_lengths=lengths, return_lse=True, **band)
    for at, m in np.ndenumerate(lengths):
        same((o[at], lse[at]), path(q[at], k[at][:, :m], v[at][:, :m], return_lse=True, **band))


@pytest.mark.parametrize("lengths", [5, [5], [[2], [7]], [0, 3, 7], [[1, 2, 3], [4, 5, 6]]])
@each_path
def test_lengths_broadcast_to_the_batch(path, lengths):
    q, k, v = qkv(3, 7, lead=(2, 3, 2))
    whole = np.broadcast_to(lengths, (2, 3))
    got, want = (path(q, k, v, kv_lengths=x, return_lse=True) for x in (lengths, whole))
    same(got, want)
    agree(got, path(q, k, v, mask=np.arange(7) < whole[..., None, None, None], return_lse=True))


# packed documents

TEXTS = [[0, 0, 4, 5, 5, 12], [0, 3, 3, 9, 11, 14]]  # some without queries, some without keys


@each_band
@each_path
def test_documents_are_attended_alone(path, band):
    """Bit for bit, masks and biases included."""
    q, k, v = qkv(12, 14, lead=(4,), kv_lead=(2,))
    mask, bias = normal((12, 14), seed=5) < 0.7, normal((4, 1, 14), seed=6)
    options = {"sinks": normal(4, seed=7), "return_lse": True, **band}
    cu_q, cu_kv = TEXTS
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": np.array(cu_kv)}
    o, lse = path(q, k, v, mask=mask, bias=bias, **packed, **options)
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_kv)):
        some = {"mask": mask[a:b, c:d], "bias": bias[..., c:d]}
        same((o[:, a:b], lse[:, a:b]), path(q[:, a:b], k[:, c:d], v[:, c:d], **some, **options))


@each_path
def test_a_document_does_not_see_another(path):
    q, k, v = qkv(12, 14, lead=(4,), kv_lead=(2,))
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), TEXTS))
    o, lse = path(q, k, v, return_lse=True, **packed)
    k[:, :11], v[:, :11] = np.nan, np.inf  # the last document's begin at 11
    x, y = path(q, k, v, return_lse=True, **packed)
    assert np.isnan(x[:, 4]).all() and np.isnan(y[:, 4]).all()
    x[:, 4], y[:, 4] = o[:, 4], lse[:, 4]
    same((x, y), (o, lse))


@each_path
def test_one_document_is_no_packing(path):
    q, k, v = qkv(5, 7, lead=(2,))
    one = {"cu_seqlens_q": [0, 5], "cu_seqlens_kv": [0, 7]}
    for band in BANDS.values():
        got, want = (path(q, k, v, return_lse=True, **x, **band) for x in (one, {}))
        same(got, want)


# sinks


@each_path
def test_a_sink_is_a_key_whose_value_is_zero(path):
    """Neither scaled nor capped: as the key it is a bias added to a score of 0."""
    q, k, v = qkv(5, 7, lead=(3,))
    sinks, options = np.array([0.5, -40.0, 3.0]), {"scale": 3.0, "softcap": 2.0, "return_lse": True}
    more = [np.pad(x, ((0, 0), (0, 1), (0, 0))) for x in (k, v)]
    bias = np.zeros((3, 1, 8))
    bias[..., -1] = sinks[:, None]
    agree(path(q, k, v, sinks=sinks, **options), path(q, *more, bias=bias, **options), 40)


@each_path
def test_no_key_leaves_the_sink(path):
    """And neither a mask nor a length hides it."""
    q, k, v = qkv(3, 4, lead=(2, 2))
    sinks = np.array([0.25, -np.inf])
    for options in ({"mask": np.zeros(4, bool)}, {"bias": np.full(4, -np.inf)}, {"kv_lengths": 0}):
        got = path(q, k, v, sinks=sinks, return_lse=True, **options)
        same(got, (np.zeros(q.shape), np.broadcast_to(sinks[:, None], (2, 2, 3)).copy()))


@each_path
def test_a_sink_takes_all_or_nothing(path):
    q, k, v = qkv(3, 4, lead=(3,))
    o, lse = path(q, k, v, sinks=np.array([1e4, -1e4, -np.inf]), return_lse=True)
    same((o[0], lse[0]), (np.zeros((3, 4)), np.full(3, 1e4)))
    agree((o[1:], lse[1:]), path(q[1:], k[1:], v[1:], return_lse=True))


@each_path
def test_in_a_merge_one_part_carries_the_sink(path):
    q, k, v = qkv(3, 9, lead=(2,))
    options = {"sinks": np.array([1.0, 2.0]), "return_lse": True}
    first = path(q, k[:, :4], v[:, :4], **options)
    second = path(q, k[:, 4:], v[:, 4:], return_lse=True)
    agree(merge(first, second), path(q, k, v, **options))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@each_path
def test_sinks_in_every_type(path, dtype):
    q, k, v = qkv(5, 7, d=8, lead=(4,), kv_lead=(2,), dtype=dtype)
    for kind in {dtype, "float32"}:
        sinks = normal(4, kind, seed=3)
        o, lse = path(q, k, v, sinks=sinks, return_lse=True)
        assert o.dtype == q.dtype and lse.dtype == (np.float64 if dtype == "float64" else np.float32)
        check((o, lse), q, k, v, sinks=sinks)


# ALiBi

SLOPES = {1: np.array([2.0**-8]), 3: np.array([2.0**-4, 2.0**-8, 2.0**-2]), 8: 0.5 ** np.arange(1, 9)}

@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads", SLOPES)
@each_path
def test_alibi_is_a_bias(path, heads, dtype):
    q, k, v = qkv(5, 7, d=8, lead=(heads,), dtype=dtype)
    bias = alibi_bias(alibi_slopes(heads), 5, 7, 2, DTYPES[dtype])
    own = np.abs(np.arange(5)[:, None] + 2 - np.arange(7))
    same([bias], [(-SLOPES[heads][:, None, None] * own).astype(DTYPES[dtype])])
    options = {"bias": bias, "causal": True, "align": "bottom_right"}
    check(path(q, k, v, return_lse=True, **options), q, k, v, **options)
