"""Faults reported in public against other implementations, one test for each, by a short name.

A case is a small function of one path; it returns pairs (got, expected), which
must agree to 1e-14 (times the size given third), or asserts on its own. A gradient
is one of an order of the loops instead.
"""
import inspect
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import flashlit
from flashlit.backward import flash_attention_vjp
from flashlit.decode import decode_attention
from flashlit.variants import alibi_slopes
from helpers import FEW, agree, check, merge, naive, normal, qkv, same, tiled, vjp
from oracle import oracle, within

INF = np.inf
LN = np.log
CASES, GRADIENTS = {}, {}
ROOT = Path(__file__).parents[1]


def case(name, table=CASES):
    """Enters a function into the table."""

    def enter(f):
        table[name] = f
        return f

    return enter


def flat(path, n, values, dtype=np.float64, **options):
    """Attention of n queries whose logits are all zero, over values of width 1."""
    v = np.array(values, dtype)[:, None]
    o, lse = path(np.zeros((n, 1), dtype), np.zeros_like(v), v, return_lse=True, **options)
    return o[:, 0], lse


def one(path, q, k, v, dtype=np.float64, **options):
    """Attention of one query over keys of width 1."""
    q, k, v = (np.array(x, dtype)[:, None] for x in (q, k, v))
    o, lse = path(q, k, v, return_lse=True, **options)
    return o[0, 0], lse[0]


# who sees whom


@case("mask-01")
def _(path):
    o, lse = flat(path, 2, [1, 2, 3], mask=np.array([[False] * 3, [True] * 3]))
    return (o, [0, 2]), (lse, [-INF, LN(3)])


@case("mask-05")
def _(path):
    o, lse = flat(path, 5, [1, 2], causal=True, align="bottom_right")
    top = flat(path, 5, [1, 2], causal=True, align="top_left")[0]
    return (o, [0, 0, 0, 1, 1.5]), (lse, [-INF, -INF, -INF, 0, LN(2)]), (top, [1, 1.5, 1.5, 1.5, 1.5])


@case("mask-06")
def _(path):
    return [(flat(path, 1, [1, 2, 3, 4, 5], causal=True, align="bottom_right")[0], [3])]


@case("mask-08")
def _(path):
    v = np.arange(128.0)
    o = flat(path, 3, v, causal=True, align="bottom_right")[0]
    return [(o, [v[: 126 + i].mean() for i in range(3)], 128)]


@case("mask-11")
def _(path):
    q, k = np.zeros((1, 4)), np.zeros((2, 4))
    return [(path(q, k, np.array([[0.0], [1.0]]), bias=np.array([0, LN(3)])), [[0.75]])]


@case("mask-12")
def _(path):
    return [(flat(path, 4, [1, 2, 3, 4], causal=True, window=(1, 0))[0], [1, 1.5, 2.5, 3.5])]


@case("mask-13")
def _(path):
    return [(flat(path, 4, [1, 2, 3, 4], window=(0, 1))[0], [1.5, 2.5, 3.5, 4])]


@case("mask-14")
def _(path):
    return [(flat(path, 4, [1, 2, 3, 4], window=(1, 0))[0], [1, 1.5, 2.5, 3.5])]


@case("mask-21")
def _(path):
    mask = np.array([[1, 1, 1], [0, 1, 1], [1, 1, 0]], bool)
    return [(flat(path, 3, [1, 2, 3], causal=True, mask=mask)[0], [1, 2, 1.5])]


@case("mask-22")
def _(path):
    mask = np.array([[0, 1, 1], [1, 1, 1], [1, 1, 1]], bool)
    o, lse = flat(path, 3, [1, 2, 3], causal=True, mask=mask)
    return (o, [0, 1.5, 2]), (lse, [-INF, LN(2), LN(3)])


@case("mask-24")
def _(path):
    q = np.zeros((1, 1, 4, 1))
    v = np.arange(1.0, 5)[None, None, :, None]
    padding = np.array([1, 1, 0, 0], bool).reshape(1, 1, 1, 4)
    return [(path(q, q, v, mask=padding), np.full((1, 1, 4, 1), 1.5))]


@case("mask-26")
def _(path):
    o, lse = one(path, [-20000], [1, 0], [1, 100], np.float32, scale=1, mask=np.array([True, False]))
    assert o == 1 and lse == -20000


@case("mask-27")
def _(path):
    bias = np.array([[-INF] * 3, [0.0] * 3])
    o, lse = flat(path, 2, [1, 2, 3], causal=True, align="top_left", bias=bias)
    return (o, [0, 1.5]), (lse, [-INF, LN(2)])


@case("mask-28")
def _(path):
    return [(flat(path, 1, [1, 2], mask=np.array([True, False]))[0], [1])]


@case("mask-30")
def _(path):
    q, k = np.zeros((2, 1, 1, 1)), np.zeros((2, 1, 4, 1))
    v = np.broadcast_to(np.arange(1.0, 5)[:, None], k.shape)
    return [(path(q, k, v, kv_lengths=np.array([2, 4])).ravel(), [1.5, 2.5])]


# numbers


@case("num-02")
def _(path):
    o, lse = one(path, [1], [-60000, -60001], [1, 0], np.float32, scale=1)
    assert abs(o - 0.7310586) < 1e-6 and abs(lse - -59999.6867) < 0.004


@case("num-03")
def _(path):
    o, lse = one(path, [1], [-20000, -20000], [1, 2], scale=1)
    mild = one(path, [1], [0, 0], [1, 2], scale=1)
    assert o == 1.5 and mild[0] == 1.5
    return (lse, -19999.3068528194400547, 2e4), (mild[1], LN(2))


@case("num-04")
def _(path):
    o, lse = one(path, [1], [100, 0, 1, 2], [1, 0, 0, 0], np.float32, scale=1)
    assert abs(o - 1) < 1e-6 and abs(lse - 100) < 1e-5


@case("num-05")
def _(path):
    q, k, v = qkv(64, 64, d=8)
    for block in (1, 2, 3, 5, 8, 16, 63, 64, 65, 1000):
        got = tiled(q, k, v, block_q=block, block_kv=block, return_lse=True)
        agree(got, naive(q, k, v, return_lse=True))


@case("num-06")
def _(path):
    q = np.full((1, 64), 300, np.float16)
    k = np.stack([np.full(64, 300), np.full(64, 299)]).astype(np.float16)
    o, lse = path(q, k, np.array([[1], [0]], np.float16), return_lse=True)
    assert o == 1 and lse == 720000


@case("num-08")
def _(path):
    o, _ = one(path, [2.0**64], [2.0**64, 0], [1, 0], np.float32, scale=2.0**-128)
    assert abs(o - 0.7310586) < 1e-6


@case("num-09")
def _(path):
    assert flat(path, 1, [60000] * 40, np.float16)[0] == 60000


@case("num-11")
def _(path):
    q, k, v = qkv(5, 32, d=8)
    o, lse = path(q, k, v, return_lse=True)
    assert o.dtype == lse.dtype == np.float64
    return zip((o, lse), oracle(q, k, v))


@case("num-12")
def _(path):  # every path here runs under np.errstate(all="raise")
    q, k, v = qkv(5, 32, d=8)
    mask = normal((5, 32), seed=9) < 0
    return zip(path(q, k, v, mask=mask, return_lse=True), oracle(q, k, v, mask=mask))


@case("num-16")
def _(path):
    assert abs(one(path, [2], [1, -1], [1, 0], scale=3)[0] - 0.9999939) < 1e-7


# heads, lengths, shapes


@case("gqa-01")
def _(path):
    q, k = np.zeros((4, 1, 1)), np.zeros((2, 2, 1))
    v = np.array([[[1.0], [3.0]], [[10.0], [30.0]]])
    return [(path(q, k, v).ravel(), [2, 2, 20, 20], 30)]


@case("gqa-04")
def _(path):
    for heads, kv_heads in ((6, 1), (6, 2), (12, 2), (5, 5), (7, 1)):
        q, k, v = qkv(9, 9, lead=(heads,), kv_lead=(kv_heads,))
        yield path(q, k, v), oracle(q, k, v)[0]


@case("shape-05")
def _(path):
    assert (flat(path, 5, [1, 2, 3, 4, 5])[0] == 3).all()


@case("shape-06")
def _(path):
    for n in (3, 1):
        q, k, v = qkv(n, 1)
        got = tiled(q, k, v, block_q=128, block_kv=128, return_lse=True)
        yield from zip(got, path(q, k, v, return_lse=True))


@case("shape-09")
def _(path):
    for n, m in ((3, 7), (7, 3)):
        q, k, v = qkv(n, m)
        for align in (None, "top_left", "bottom_right"):
            options = {"causal": align is not None, "align": align}
            yield from zip(path(q, k, v, return_lse=True, **options), oracle(q, k, v, **options))


@case("shape-10")
def _(path):
    q, k, v = qkv(2, 3)
    o, lse = path(q, k[:0], v[:0], return_lse=True)
    assert path(q[:0], k, v).shape == (0, 4)
    assert path(*(x[None, None][:0] for x in (q, k, v))).shape == (0, 1, 2, 4)
    return (o, np.zeros((2, 4))), (lse, [-INF, -INF])


@case("shape-11")
def _(path):
    q, k, v = np.ones((1, 1, 3, 4)), np.ones((1, 1, 0, 4)), np.ones((1, 1, 0, 2))
    for options in (
        {}, {"causal": True, "align": "bottom_right"}, {"causal": True, "align": "top_left"},
        {"mask": np.ones((3, 0), bool)}, {"bias": np.ones((3, 0))}, {"softcap": 2.0},
    ):  # fmt: skip
        o, lse = path(q, k, v, return_lse=True, **options)
        yield o, np.zeros((1, 1, 3, 2))
        yield lse, np.full((1, 1, 3), -INF)


@case("shape-12")
def _(path):
    q, k, v = qkv(3, 4, lead=(2, 2))
    for shape in ((4,), (1, 4), (3, 1), (1, 1, 1, 4), (2, 1, 1, 4), (2, 1, 1)):
        x = normal(shape, seed=5)
        for options in ({"mask": x < 0.5}, {"bias": x}):
            yield path(q, k, v, **options), oracle(q, k, v, **options)[0]
    for options in ({"mask": np.ones(5, bool)}, {"bias": np.ones(5)}):
        with pytest.raises(ValueError):
            path(q, k, v, **options)


# log-sum-exp and merging


@case("lse-03")
def _(path):
    for held in (0, np.nan, 7):
        part = np.full((1, 1), float(held)), np.array([-INF])
        same(merge(part, part), (np.zeros((1, 1)), np.array([-INF])))


@case("lse-04")
def _(path):
    empty = path(*qkv(1, 3, dv=1), mask=np.zeros(3, bool), return_lse=True)
    part = np.array([[3.0]]), np.array([0.5])
    same(merge(empty, part), part)
    same(merge(part, empty), part)


@case("lse-08")
def _(path):
    i = np.arange(2)
    lse = flat(path, 2, [0, 0], causal=True, bias=-np.abs(i[:, None] - i).astype(float))[1]
    return [(lse, [0, LN(1 + np.exp(-1))])]


@case("lse-09")
def _(path):
    q, k, v = qkv(3, 37)
    whole = path(q, k, v, return_lse=True)
    for parts in range(1, 41):
        ends = np.linspace(0, 37, parts + 1).astype(int).tolist()
        got = merge(*(path(q, k[i:j], v[i:j], return_lse=True) for i, j in pairwise(ends)))
        yield from zip(got, whole)


@case("lse-10")
def _(path):
    q, k, v = qkv(33, 33, d=16, lead=(8, 2), dtype="float32")
    o = path(q, k, v)
    same([path(q, k, v)], [o])
    for b in range(8):
        same([path(*(x[b : b + 1] for x in (q, k, v)))], [o[b : b + 1]])


@case("lse-11")
def _(path):
    eight = 0.5 ** np.arange(1, 9)
    same([alibi_slopes(8)], [eight])
    same([alibi_slopes(3)], [np.array([2.0**-4, 2.0**-8, 2.0**-2])])
    yield alibi_slopes(12), np.append(eight, 0.5 ** np.array([0.5, 1.5, 2.5, 3.5]))
    q, k = np.zeros((3, 1, 1)), np.zeros((3, 2, 1))  # and what they do as a bias
    bias = -alibi_slopes(3)[:, None, None] * np.array([0, 1])
    lse = path(q, k, k, bias=bias, return_lse=True)[1]
    yield lse[:, 0], np.log1p(np.exp(-alibi_slopes(3)))


# types


@case("dtype-02")
def _(path):
    with pytest.raises(TypeError, match="(?=.*bool)(?=.*bias)"):
        flat(path, 1, [1, 3], mask=np.array([1, 0]))


@case("dtype-03")
def _(path):
    q, k, v = qkv(3, 5, dtype="float32")
    with pytest.raises(TypeError):
        path(q, k.astype(np.float16), v.astype(np.float16))
    for dtype in (np.float16, np.float32, np.float64):
        o, lse = path(*(x.astype(dtype) for x in (q, k, v)), return_lse=True)
        assert o.dtype == dtype and lse.dtype.itemsize >= 4


@case("dtype-04")
def _(path):
    q, k, v = qkv(64, 64, d=64, dtype="float16")
    ref = oracle(q, k, v)[0]
    s = q.astype(np.float32) @ k.astype(np.float32).T / np.float32(8)
    p = np.exp(s - s.max(-1, keepdims=True))
    good = (p / p.sum(-1, keepdims=True) @ v.astype(np.float32)).astype(np.float16)
    assert np.abs(path(q, k, v) - ref).max() <= 2 * np.abs(good - ref).max()


# the tests themselves


@case("test-01")
def _(path):
    for got, ref in (([1.0], [np.nan]), ([np.nan], [1.0]), ([INF], [-INF]), ([1.0, 1.0], [[1.0], [1.0]])):
        got, ref = np.array(got), np.array(ref, np.longdouble)
        assert not within(got, ref, got)
    assert within(np.array([np.nan, INF, 1]), np.array([np.nan, INF, 1]), np.ones(3))
    assert not within(np.array([1 + 1e-13]), np.array([1.0]), np.array([1.0]))


@case("test-04")
def _(path):
    q, k, v = qkv(4, 6, lead=(6,), kv_lead=(2,))
    k2, v2 = (x[[0, 0, 0, 1, 1, 1]] for x in (k, v))
    same([path(q, k, v)], [path(q, k2, v2)])
    check(path(q, k, v, return_lse=True), q, k, v)


@pytest.mark.parametrize("path", FEW.values(), ids=FEW)
@pytest.mark.parametrize("name", CASES)
def test_case(name, path):
    for got, expected, *size in CASES[name](path) or ():
        agree([got], [np.array(expected)], *size)


# gradients


def slopes(order, k, v, do, dlse=None, **options):
    """Gradients for one query of 1, keys and values of width 1."""
    k, v = (np.array(x, float)[:, None] for x in (k, v))
    dlse = None if dlse is None else np.array([dlse])
    grads = vjp(np.ones((1, 1)), k, v, np.array([[do]]), dlse, order, scale=1, **options)[1]
    return grads.q.ravel(), grads.k.ravel(), grads.v.ravel()


@case("bwd-02", GRADIENTS)
def _(order):
    dq, dk, _ = slopes(order, [3, 0], [1, 0], 1.0, softcap=2)
    assert np.abs(dq - 0.0655061).max() < 1e-7
    assert np.abs(dk - [0.0218354, -0.1208333]).max() < 1e-7


@case("bwd-05", GRADIENTS)
def _(order):
    dq, dk, dv = slopes(order, [2, 0], [0, 0], 0.0, 1.0)
    p = 1 / (1 + np.exp(-2))
    return (dq, [2 * p]), (dk, [p, 1 - p]), (dv, [0, 0])


@case("bwd-06", GRADIENTS)
def _(order):
    q, k = np.zeros((4, 1, 3)), np.zeros((2, 2, 3))
    grads = vjp(q, k, k, np.ones(q.shape), None, order)[1]
    return (grads.v, np.ones(k.shape)), (grads.k, np.zeros(k.shape)), (grads.q, np.zeros(q.shape))


@case("bwd-08", GRADIENTS)
def _(order):
    """Dropout would have to be scaled by 1 / (1 - p): there is none, in any door."""
    for door in (flashlit.attention, flashlit.flash_attention, decode_attention, flash_attention_vjp):
        assert not [x for x in inspect.signature(door).parameters if "drop" in x]
        with pytest.raises(TypeError, match="dropout"):
            door(*qkv(2, 2), dropout=0.25)


@pytest.mark.parametrize("order", ["keys", "queries"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(name, order):
    for got, expected, *size in GRADIENTS[name](order) or ():
        agree([got], [np.array(expected)], *size)


def test_05():
    """Whatever a notebook prints is rounded: no number of more than ten digits."""
    for book in sorted(ROOT.glob("nbs/*.ipynb")):
        for cell in json.loads(book.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                text = "".join([*output.get("text", ""), *output.get("data", {}).get("text/plain", "")])
                digits = [len(a.lstrip("0") + b) for a, b in re.findall(r"(\d+)\.(\d+)", text)]
                assert max(digits, default=0) <= 10, (book.name, cell["id"], text)


ALL = """
    mask-01 mask-05 mask-06 mask-08 mask-11 mask-12 mask-13 mask-14 mask-21 mask-22 mask-24 mask-26
    mask-27 mask-28 mask-30 num-02 num-03 num-04 num-05 num-06 num-08 num-09 num-11 num-12 num-16
    gqa-01 gqa-04 lse-03 lse-04 lse-08 lse-09 lse-10 lse-11 shape-05 shape-06 shape-09 shape-10
    shape-11 shape-12 dtype-02 dtype-03 dtype-04 bwd-02 bwd-05 bwd-06 bwd-08 test-01 test-04 test-05
"""


def test_every_case_on_attention_and_testing_is_here():
    assert sorted([*CASES, *GRADIENTS, "test-05"]) == sorted(ALL.split())
