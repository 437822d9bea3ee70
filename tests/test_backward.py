"""Gradients: against a slow second writing, central differences and PyTorch's autograd."""
import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlit import backward
from flashlit.backward import Grads, _grown, backward_bytes, backward_flops
from flashlit.hbm import HBM, Meter
from flashlit.traffic import Problem, flash_bytes, flops
from helpers import DTYPES, normal, qkv, quick, same, strict, tiled
from oracle import largest, limit
from oracle_grad import oracle_vjp
from test_meter import arrays, band, blocks, option_bytes, problems, several

TILES = [(1, 1), (2, 3), (3, 2), (5, 5), (1000, 1000), (None, None)]
ORDERS = ["keys", "queries"]
each_order = pytest.mark.parametrize("order", ORDERS)


def vjp(*given_, **options):
    """((o, lse), pullback), both under the strictest NumPy."""
    pair, pullback = strict(backward.flash_attention_vjp)(*given_, **options)
    return pair, strict(pullback)


def gradients(q, k, v, do, dlse=None, order="keys", **options):
    return vjp(q, k, v, **options)[1](do, dlse, order=order)


def incoming(q, k, v, seed=9, **options):
    """Normal do and dlse for a call."""
    o, lse = tiled(q, k, v, return_lse=True, **options)
    return normal(o.shape, o.dtype, [seed, 0]), normal(lse.shape, lse.dtype, [seed, 1])


def close(got, want, reach=1e-13):
    """Within `reach` of the largest entry, or 2e-14; what is not finite in the same places."""
    for name, x in zip(Grads._fields, got):
        w = want[name]
        assert (x is None) == (w is None), name
        if x is None:
            continue
        assert x.shape == w.shape, name
        good = np.isfinite(w)
        assert np.array_equal(np.isfinite(x), good), f"{name}: {x!r}, expected {w!r}"
        error = np.abs(x[good] - w[good]).max(initial=0)
        assert error <= reach * max(1e-30, np.abs(w[good]).max(initial=0)) + 2e-14, f"{name}: {error}"


# the slow second writing

LEADS = [
    ((), ()), ((4,), (2,)), ((2, 4), (2, 2)), ((2, 1, 4), (3, 2)), ((4,), ()), ((), (3, 1)), ((3, 2), (1, 1)),
]  # fmt: skip
WAYS = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"window": (2, 1), "align": 1},
    "causal top left": {"causal": True, "align": "top_left"},
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "negative scale": {"scale": -0.7},
    "zero scale": {"scale": 0.0},
    "some keys": {"mask": normal((7, 9), seed=3) < 0.3},
    "sinks": {"sinks": True},
    "bias": {"bias": normal((7, 9), seed=4), "softcap": 2.0},
    "bias of a key": {"bias": normal(9, seed=4)},
    "bias of a query": {"bias": normal((7, 1), seed=4), "causal": True, "align": 2},
    "one bias": {"bias": normal((), seed=4)},
    "bias that hides": {"bias": np.where(normal((7, 9), seed=5) < 0, -np.inf, 1.0)},
    "lengths": {"kv_lengths": True, "causal": True, "align": "bottom_right", "sinks": True},
}


def filled(options, lead):
    """The options for arrays with these leading axes."""
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = normal((1, *lead)[-1:], seed=6)
    if "kv_lengths" in options:
        options["kv_lengths"] = np.random.default_rng(0).integers(0, 10, lead[:-1])
    return options


@pytest.mark.parametrize("leads", LEADS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_option_and_broadcast(way, leads):
    given_ = qkv(7, 9, 4, 3, *leads)
    lead = tiled(*given_).shape[:-2]
    options = filled(WAYS[way], lead)
    do, dlse = incoming(*given_, **options)
    want = oracle_vjp(*given_, do, dlse, **options)
    for (block_q, block_kv), order in zip(TILES, ORDERS * 3):
        got = gradients(*given_, do, dlse, order, block_q=block_q, block_kv=block_kv, **options)
        close(got, want)


@each_order
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("way", ["plain", "causal", "window"])
def test_packed(way, tile, order):
    given_ = qkv(8, 11, 3, 2, (4,), (2,))
    options = WAYS[way] | {
        "cu_seqlens_q": np.array([0, 3, 3, 4, 8]), "cu_seqlens_kv": np.array([0, 2, 5, 11, 11]),
        "bias": normal((4, 1, 11)), "sinks": normal(4),
    }  # fmt: skip
    do, dlse = incoming(*given_, **options)
    got = gradients(*given_, do, dlse, order, block_q=tile[0], block_kv=tile[1], **options)
    close(got, oracle_vjp(*given_, do, dlse, **options))


@each_order
def test_documents_are_the_calls_apart(order):
    q, k, v = qkv(8, 11, 3, 2, (2,))
    ends_q, ends_kv = [0, 3, 8], [0, 4, 11]
    options = {"causal": True, "align": "bottom_right"}
    packed = {"cu_seqlens_q": np.array(ends_q), "cu_seqlens_kv": np.array(ends_kv)}
    do, _ = incoming(q, k, v, **packed)
    got = gradients(q, k, v, do, order=order, **options, **packed)
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_kv, ends_kv[1:]):
        one = gradients(q[:, a:b], k[:, c:d], v[:, c:d], do[:, a:b], order=order, **options)
        same([got.q[:, a:b], got.k[:, c:d], got.v[:, c:d]], one[:3])


@st.composite
def calls(draw):
    """q, k, v and every option at once, some with NaN or inf in a query, key or value."""
    n, m, seed = draw(st.integers(0, 6)), draw(st.integers(0, 6)), draw(st.integers(0, 10**6))
    d, dv, leads = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.sampled_from(LEADS))
    given_ = qkv(n, m, d, dv, *leads, seed=seed)
    lead, bound = tiled(*given_).shape[:-2], st.none() | st.integers(0, 4)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.tuples(bound, bound)),
        "align": draw(st.sampled_from(["bottom_right", "top_left", -1, 2])),
        "softcap": draw(st.none() | st.sampled_from([0.5, 3.0, 50.0])),
        "scale": draw(st.none() | st.sampled_from([0.0, -0.7, 1.0, 3.0])),
    }
    shape = (*lead, n, m)
    over = [draw(st.sampled_from([1, x])) for x in shape[draw(st.integers(0, len(shape))) :]]
    if draw(st.booleans()):
        options["mask"] = np.asarray(normal(over, seed=seed) < draw(st.sampled_from([-1, 0, 1])))
    if draw(st.booleans()):
        options["bias"] = np.asarray(normal(over, seed=seed + 1))
        if draw(st.booleans()):
            options["bias"] = np.where(options["bias"] < 0, -np.inf, options["bias"])
    if draw(st.booleans()):
        options["sinks"] = normal((1, *lead)[-1:], seed=seed + 2)
    if draw(st.booleans()):
        options["kv_lengths"] = np.random.default_rng(seed).integers(0, m + 1, lead[:-1])
    elif len(lead) < 2 and draw(st.booleans()):
        cuts = [sorted(draw(st.lists(st.integers(0, x), min_size=2, max_size=2))) for x in (n, m)]
        options["cu_seqlens_q"], options["cu_seqlens_kv"] = (
            np.array([0, *cut, x]) for cut, x in zip(cuts, (n, m))
        )  # fmt: skip
    if draw(st.booleans()):
        x = draw(st.sampled_from(given_))
        if x.shape[-2]:
            x[..., draw(st.integers(0, x.shape[-2] - 1)), :] = draw(st.sampled_from([np.nan, np.inf]))
    return given_, options


@given(calls(), st.sampled_from(TILES), st.sampled_from(ORDERS), st.booleans())
def test_any_call_is_the_oracle(call, tile, order, through_lse):
    given_, options = call
    do, dlse = incoming(*given_, **options)
    dlse = dlse if through_lse else None
    got = gradients(*given_, do, dlse, order, block_q=tile[0], block_kv=tile[1], **options)
    close(got, oracle_vjp(*given_, do, dlse, **options))


# central differences


@each_order
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}, {"causal": True, "window": (3, None)}], ids=str)
def test_central_differences(options, order):
    x = dict(zip("qkv", qkv(5, 5, 3, 2, (2, 4), (1, 2))))
    x |= {"bias": normal((4, 1, 5), seed=1), "sinks": normal(4, seed=2)}
    do, dlse = incoming(**x, **options)

    def loss(**x):
        o, lse = tiled(**x, return_lse=True, **options)
        return (o * do).sum() + (lse * dlse).sum()

    got = vjp(**x, block_q=2, block_kv=3, **options)[1](do, dlse, order=order)
    step = 1e-5
    for name, grad in got._asdict().items():
        for at in np.ndindex(grad.shape):
            up, down = x[name].copy(), x[name].copy()
            up[at] += step
            down[at] -= step
            slope = (loss(**x | {name: up}) - loss(**x | {name: down})) / (2 * step)
            np.testing.assert_allclose(grad[at], slope, rtol=1e-7, atol=1e-8)


# PyTorch


def torch_vjp(
    torch, q, k, v, do, dlse, bias=None, sinks=None, mask=None, softcap=None, scale=None
):  # fmt: skip
    """Plain operations in float64, differentiated by autograd; every row sees a key."""
    x = {n: None if a is None else torch.tensor(a, requires_grad=True) for n, a in
         {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}.items()}  # fmt: skip
    group = q.shape[-3] // k.shape[-3]
    k, v = (x[n].repeat_interleave(group, -3) for n in "kv")
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (x["q"] @ k.transpose(-1, -2))
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + x["bias"]
    s = s if mask is None else s.masked_fill(~torch.tensor(mask), -torch.inf)
    y = s
    if sinks is not None:
        y = torch.cat([s, x["sinks"][:, None, None].expand(*s.shape[:-1], 1)], -1)
    o, lse = torch.softmax(y, -1)[..., : s.shape[-1]] @ v, torch.logsumexp(y, -1)
    ((o * torch.tensor(do)).sum() + (lse * torch.tensor(dlse)).sum()).backward()
    return {n: None if a is None else a.grad.numpy() for n, a in x.items()}


@pytest.mark.parametrize("n, m, d, heads, kv_heads", [
    (1, 3, 32, 1, 1), (64, 64, 40, 4, 2), (113, 203, 64, 3, 1), (128, 217, 59, 2, 2), (256, 130, 128, 2, 1),
])  # fmt: skip
def test_torch_autograd(n, m, d, heads, kv_heads):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, v = qkv(n, m, d, d, (2, heads), (2, kv_heads))
    ways = [
        {}, {"softcap": 5.0}, {"bias": normal((heads, n, m))}, {"sinks": normal(heads)}, {"scale": 0.3},
        {"causal": True, "align": 0}, {"window": (40, 10), "align": 0, "softcap": 3.0, "sinks": normal(heads)},
    ]  # fmt: skip
    for options in ways:
        do, dlse = incoming(q, k, v, **options)
        peer = {x: y for x, y in options.items() if x in ("softcap", "bias", "sinks", "scale")}
        own = np.arange(m) - np.arange(n)[:, None]
        if "causal" in options:
            peer["mask"] = own <= 0
        if "window" in options:
            peer["mask"] = (-40 <= own) & (own <= 10)
        if "mask" in peer and "sinks" not in peer and not peer["mask"].any(-1).all():
            continue  # a row without a key: PyTorch answers NaN
        want = torch_vjp(torch, q, k, v, do, dlse, **peer)
        close(gradients(q, k, v, do, dlse, block_q=48, block_kv=64, **options), want, 1e-12)
        close(gradients(q, k, v, do, dlse, "queries", **options), want, 1e-12)


# known answers, from faults reported in public against others


def test_softcap_has_a_derivative():
    """bwd-02"""
    q, k, v = np.array([[1.0]]), np.array([[3.0], [0.0]]), np.array([[1.0], [0.0]])
    got = gradients(q, k, v, np.array([[1.0]]), scale=1, softcap=2)
    np.testing.assert_allclose(got.q, [[0.0655061]], atol=5e-8)
    np.testing.assert_allclose(got.k, [[0.0218354], [-0.1208333]], atol=5e-8)


@pytest.mark.parametrize("m", [2, 3, 130])
def test_lse_alone(m):
    """bwd-05, and longer: the gradient of lse is softmax."""
    q, k, v = np.array([[1.0]]), np.zeros((m, 1)), np.ones((m, 2))
    k[0] = 2
    got = gradients(q, k, v, np.zeros((1, 2)), np.ones(1), scale=1)
    p = np.exp(k[:, 0]) / np.exp(k).sum()
    np.testing.assert_allclose(got.k[:, 0], p, rtol=1e-14)
    np.testing.assert_allclose(got.q, [[2 * p[0]]], rtol=1e-14)
    assert m > 2 or np.allclose(got.k[:, 0], [0.8807971, 0.1192029], atol=5e-8)


@each_order
def test_groups_are_summed(order):
    """bwd-06"""
    q, k, v = np.zeros((4, 1, 3)), np.zeros((2, 2, 3)), normal((2, 2, 5))
    got = gradients(q, k, v, np.ones((4, 1, 5)), order=order)
    assert np.array_equal(got.v, np.ones((2, 2, 5))) and got.k.shape == k.shape


def test_a_sink_by_hand():
    q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 1, 1)), np.ones((1, 1, 1))
    got = gradients(q, k, v, np.ones((1, 1, 1)), 2 * np.ones((1, 1)), sinks=np.zeros(1))
    assert np.allclose(got.sinks, [0.5 * (2 - 0.5)]) and np.allclose(got.v, 0.5)


# numbers that are hard on floating point


def test_a_small_scale_comes_before_the_product():
    q, k = np.full((1, 1), 2.0**64, np.float32), np.array([[2.0**64], [0]], np.float32)
    v, do = np.array([[1], [0]], np.float32), np.ones((1, 1), np.float32)
    got = gradients(q, k, v, do, scale=2.0**-128)
    p = 1 / (1 + np.exp(-1))
    ds = p * (1 - p)
    np.testing.assert_allclose(got.q, [[ds * 2.0**-64]], rtol=1e-6)
    np.testing.assert_allclose(got.k, [[ds * 2.0**-64], [-ds * 2.0**-64]], rtol=1e-6)


@pytest.mark.parametrize("power", [-120, 120])
def test_scales_that_are_no_float32(power):
    """scale 2**-240 with q and k of 2**120, and the other way round."""
    q, k = (np.float32([[x]]) * np.float32(2.0**power) for x in (1, 1))
    k = np.concatenate([k, 0 * k])
    v, do = np.float32([[1], [0]]), np.float32([[1]])
    got = gradients(q, k, v, do, scale=2.0 ** (-2 * power))
    p = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(got.q, [[p * (1 - p) * 2.0**-power]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("top", [100.0, -60000.0, 60000.0, -1e8, 3e37])
def test_large_logits(top, dtype):
    """Of two equal keys each has 1/2, however large the logit; lse alone could not say so."""
    if dtype == "float16" and abs(top) > 65000:
        return
    q, k = np.ones((1, 1), DTYPES[dtype]), np.full((2, 1), top).astype(DTYPES[dtype])
    v, do = np.array([[1], [0]]).astype(DTYPES[dtype]), np.ones((1, 1), DTYPES[dtype])
    got = gradients(q, k, v, do, scale=1)
    assert got.v.astype(float).ravel().tolist() == [0.5, 0.5]
    assert np.allclose(got.k.astype(float), [[0.25], [-0.25]], rtol=1e-6)


def test_logits_next_to_each_other_far_from_zero():
    """num-02's keys, in float32: 0.7310586 and 0.2689414, to float32's digits."""
    q, k, v = np.float32([[1]]), np.float32([[-60000], [-60001]]), np.float32([[1], [0]])
    got = gradients(q, k, v, np.float32([[1]]), scale=1)
    np.testing.assert_allclose(got.v, [[0.7310586], [0.2689414]], rtol=2e-7)


@each_order
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_where_one_key_takes_all_nothing_pulls(dtype, order):
    """P is one 1 in each row: dS is 0, and large keys make nothing of its rounding."""
    q, k, v = qkv(12, 15, 8, 8, dtype=dtype)
    q, k = q * q.dtype.type(100), k * k.dtype.type(100)
    do, dlse = incoming(q, k, v)
    p = tiled(q, k, np.eye(15).astype(q.dtype)).astype(float)
    assert np.sort(p)[:, -1].min() == 1 and largest(oracle_vjp(q, k, v, do)["q"]) < 1e-12
    got = gradients(q, k, v, do, order=order, block_q=5, block_kv=4)
    assert largest(got.q) < 1e-12 and largest(got.k) < 1e-12
    got = gradients(q, k, v, do, dlse, order=order, block_q=5, block_kv=4)
    want = dlse[:, None].astype(float) * (k[p.argmax(-1)].astype(float) / np.sqrt(8))
    np.testing.assert_allclose(got.q.astype(float), want, rtol={8: 1e-14, 4: 1e-6, 2: 1e-2}[q.itemsize])


# what is hidden, and what is NaN


@each_order
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("name", "qkvo")
def test_hidden_poison_changes_nothing(name, poison, order):
    """Key 3 is hidden from all, and query 2 sees nothing."""
    q, k, v = qkv(5, 6, 3, 2, (2,))
    mask = np.ones((5, 6), bool)
    mask[:, 3], mask[2] = False, False
    do, dlse = incoming(q, k, v)
    options = {"mask": mask, "softcap": 2.0, "bias": normal((5, 6))}
    options |= {"block_q": 2, "block_kv": 3, "order": order}
    want = gradients(q, k, v, do, dlse, **options)
    x, at = {"q": (q, 2), "k": (k, 3), "v": (v, 3), "o": (do, 2)}[name]
    x[:, at] = poison
    if name == "o":
        dlse[:, at] = poison
    same(gradients(q, k, v, do, dlse, **options)[:4], want[:4])
    assert not want.q[:, 2].any() and not want.k[:, 3].any() and not want.bias[:, 3].any()


def test_poison_in_a_row_that_sees_a_sink_alone():
    q, k, v = qkv(3, 3, 2, 2, (1,))
    do, _ = incoming(q, k, v)
    do[:, 0] = np.nan
    options = {"mask": np.array([[False], [True], [True]]), "sinks": np.zeros(1)}
    got = gradients(q, k, v, do, **options)
    do[:, 0] = 0
    same(got[:3] + (got.sinks,), [x for x in gradients(q, k, v, do, **options) if x is not None])


@each_order
@pytest.mark.parametrize("name", "qkv")
def test_a_visible_nan_spoils_what_it_touches(name, order):
    """Causal: row 2 sees keys 0 to 2. NaN in query 2 spoils its own gradient and those keys'."""
    q, k, v = qkv(4, 4, 3, 2)
    do, dlse = incoming(q, k, v)
    {"q": q, "k": k, "v": v}[name][2] = np.nan
    got = gradients(q, k, v, do, dlse, order, causal=True, block_q=2, block_kv=3)
    close(got, oracle_vjp(q, k, v, do, dlse, causal=True))
    if name == "q":
        assert np.isnan(got.q).all(-1).tolist() == [False, False, True, False]
        assert np.isnan(got.k).all(-1).tolist() == [True, True, True, False]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_single_visible_value(poison):
    """Its weight is 1, and still it spoils its row."""
    q, k, v = qkv(2, 2, 1, 1)
    v[1] = poison
    got = gradients(q, k, v, np.ones((2, 1)), mask=np.eye(2, dtype=bool))
    assert got.q[0] == 0 and np.isnan(got.q[1]) and got.k[0] == 0 and np.isnan(got.k[1])


@each_order
def test_sinks_that_are_off(order):
    q, k, v = qkv(4, 5, 3, 2, (2,))
    do, dlse = incoming(q, k, v)
    mask = np.array([[True], [True], [True], [False]])
    got = gradients(q, k, v, do, dlse, order, sinks=np.full(2, -np.inf), mask=mask)
    assert got.sinks.tolist() == [0, 0]
    same(got[:3], gradients(q, k, v, do, dlse, order, mask=mask)[:3])


# types


def plain_vjp(dtype, q, k, v, do):
    """The `low` of the measuring stick: whole matrices, every step rounded to dtype."""
    work = np.float64 if dtype == np.float64 else np.float32

    def r(x):
        return np.asarray(x).astype(dtype).astype(work)

    q, k, v, do = (np.asarray(x).astype(work) for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    s = r(r(q * work(scale)) @ k.swapaxes(-1, -2))
    p = r(np.exp(r(s - s.max(-1, keepdims=True))))
    p = r(p / r(p.sum(-1, keepdims=True)))
    dp = r(do @ v.swapaxes(-1, -2))
    ds = r(p * r(dp - r((p * dp).sum(-1, keepdims=True))))
    return [
        r(r(ds @ k) * work(scale)), r(r(ds.swapaxes(-1, -2) @ q) * work(scale)), r(p.swapaxes(-1, -2) @ do)
    ]  # fmt: skip


@each_order
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_measuring_stick(size, dtype, order):
    q, k, v = qkv(33, 40, 8, 8, (2,), dtype=dtype)
    q, k, v = (x * x.dtype.type(size) for x in (q, k, v))
    do, _ = incoming(q, k, v)
    got = gradients(q, k, v, do, order=order, block_q=7, block_kv=16)
    want, low = oracle_vjp(q, k, v, do), plain_vjp(DTYPES[dtype], q, k, v, do)
    for name, x, y in zip("qkv", got, low):
        assert x.dtype == q.dtype
        error = np.abs(x.astype(np.float64) - want[name]).max()
        assert error <= limit(x.dtype, want[name], y.astype(np.float64), largest(want[name])), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype):
    """Gradients have the types of their inputs; from float8 come float32."""
    q, k, v = qkv(4, 5, 3, 2, (2,), dtype=dtype)
    wide = "float32" if dtype.startswith("float8") else dtype
    (o, lse), pullback = vjp(q, k, v, bias=normal((4, 5), "float32"), sinks=normal(2, wide))
    got = pullback(np.ones(o.shape, o.dtype), np.ones(lse.shape, lse.dtype))
    assert [x.dtype.name for x in (o, *got)] == [wide, wide, wide, wide, "float32", wide]
    options = {"bias": normal((4, 5), "float32"), "sinks": normal(2, wide)}
    want = oracle_vjp(q, k, v, np.ones(o.shape), np.ones(lse.shape), **options)
    close([x.astype(float) for x in got], want, {"float64": 1e-7, "float32": 1e-5}.get(wide, 3e-2))


def test_any_byte_order():
    q, k, v = qkv(4, 5)
    do, _ = incoming(q, k, v)
    want = gradients(q, k, v, do)
    got = gradients(*(x.astype(">f8") for x in (q, k, v, do)))
    for x, y in zip(got[:3], want[:3]):
        assert x.dtype == np.dtype(">f8") and np.array_equal(x, y)


# shapes without entries

EMPTY = [
    (0, 3, 2, 2, (2,), (2,)), (3, 0, 2, 2, (2,), (2,)), (0, 0, 2, 2, (), ()), (3, 4, 2, 2, (0,), (0,)),
    (3, 4, 2, 2, (0, 2), (0, 2)), (3, 4, 2, 2, (0, 2), (1, 2)), (3, 4, 2, 2, (0, 2), (2,)), (3, 4, 2, 0, (2,), (1,)),
]  # fmt: skip


@each_order
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_nothing_to_do(shape, order):
    q, k, v = qkv(*shape)
    lead = tiled(q, k, v).shape[:-2]
    bias = normal((*lead, *(x.shape[-2] for x in (q, k))))
    for options in ({}, {"sinks": normal((1, *lead)[-1:])}, {"bias": bias}, {"bias": np.ones(())}):
        do, dlse = incoming(q, k, v, **options)
        close(gradients(q, k, v, do, dlse, order, **options), oracle_vjp(q, k, v, do, dlse, **options))


# the promises of a pullback


def every_option(n=6, m=7):
    q, k, v = qkv(n, m, 3, 2, (2, 4), (1, 2))
    options = {"bias": normal((4, n, m)), "sinks": normal(4), "mask": normal((n, m)) < 1, "softcap": 3.0}
    return (q, k, v), options | {"block_q": 4, "block_kv": 3, "causal": True, "align": "bottom_right"}


@each_order
def test_a_pullback_may_be_called_again(order):
    given_, options = every_option()
    (o, lse), pullback = vjp(*given_, **options)
    do, dlse = incoming(*given_, **options)
    first = pullback(do, dlse, order=order)
    other = pullback(2 * do, order=order)
    same(first, pullback(do, dlse, order=order))
    same(first, gradients(*given_, do, dlse, order, **options))
    for name in ("block_q", "block_kv"):
        del options[name]
    close(other, oracle_vjp(*given_, 2 * do, **options))


@pytest.mark.parametrize("own", [False, True])
def test_o_and_lse_belong_to_the_caller(own):
    given_, options = every_option()
    do, dlse = incoming(*given_, **options)
    want = gradients(*given_, do, dlse, **options)
    out = {"out": np.empty(do.shape)} if own else {}
    (o, lse), pullback = vjp(*given_, **options, **out)
    assert not own or o is out["out"]
    same((o, lse), quick(*given_, **options, return_lse=True))
    o[...], lse[...] = np.nan, np.nan
    same(pullback(do, dlse), want)


def frozen(x):
    """Read-only, with strides of its own."""
    y = np.empty((*x.shape, 2), x.dtype)[..., 0]
    y[...] = x
    y.flags.writeable = False
    return y


def test_nothing_is_written_to():
    given_, options = every_option()
    do, dlse = incoming(*given_, **options)
    want = gradients(*given_, do, dlse, **options)
    cold = {n: frozen(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    same(gradients(*map(frozen, given_), frozen(do), frozen(dlse), **cold), want)


@each_order
def test_an_entry_alone_has_the_same_bits(order):
    q, k, v = qkv(9, 11, 4, 3, (3, 4), (3, 2), "float32")
    do, dlse = incoming(q, k, v)
    options = {"block_q": 4, "block_kv": 3, "causal": True, "align": 1}
    whole = gradients(q, k, v, do, dlse, order, **options)
    for b in range(3):
        one = gradients(q[b], k[b], v[b], do[b], dlse[b], order, **options)
        same([x[b] for x in whole[:3]], one[:3])


def test_a_broadcast_bias_gets_the_sum():
    given_, _ = every_option()
    do, dlse = incoming(*given_)
    full = gradients(*given_, do, dlse, bias=np.zeros((2, 4, 6, 7))).bias
    for shape in [(7,), (6, 1), (4, 6, 7), (2, 1, 1, 1), (1, 4, 1, 7), ()]:
        got = gradients(*given_, do, dlse, bias=np.zeros(shape)).bias
        want = full.sum(tuple(range(4 - len(shape))))
        want = want.sum(tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True)
        assert got.shape == shape
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_no_square_of_the_length_in_memory():
    q, k, v = qkv(4096, 4096, 4, dtype="float32")
    (o, _), pullback = vjp(q, k, v, causal=True)
    pullback(o)  # warm up
    tracemalloc.start()
    pullback(o)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4096**2 * 4 / 8


# bad input


def test_gradients_that_do_not_fit():
    q, k, v = qkv(3, 4, 2, 5, (2,))
    (o, lse), pullback = vjp(q, k, v)
    with pytest.raises(ValueError, match=r"do has o's shape, \(2, 3, 5\), not \(3, 5\)"):
        pullback(o[0])
    with pytest.raises(ValueError, match=r"dlse has lse's shape, \(2, 3\), not \(2, 3, 5\)"):
        pullback(o, o)
    with pytest.raises(TypeError, match="do is of o's type, float64, not float32"):
        pullback(o.astype(np.float32))
    with pytest.raises(TypeError, match="dlse is of lse's type, float64, not int64"):
        pullback(o, np.ones((2, 3), int))
    with pytest.raises(TypeError, match="do is of o's type, float64, not metered float64"):
        pullback(HBM(o, Meter(), "dO"))
    with pytest.raises(TypeError, match="masked"):
        pullback(np.ma.masked_array(o))
    with pytest.raises(ValueError, match="order is 'keys' or 'queries', not 'rows'"):
        pullback(o, order="rows")
    with pytest.raises(ValueError, match="order"):
        backward_bytes(Problem(8), order="rows")


@pytest.mark.parametrize("bad, error", [
    ({"causal": True}, "align"), ({"window": (-1, 0), "align": 0}, "None"), ({"softcap": 0}, "softcap"),
    ({"scale": np.inf}, "scale"), ({"block_q": 0}, "block_q"), ({"kv_lengths": 9}, "kv_lengths"),
])  # fmt: skip
def test_bad_calls_fail_at_the_door(bad, error):
    with pytest.raises((ValueError, TypeError), match=error):
        vjp(*qkv(3, 4), **bad)


# what it costs


def metered_vjp(p, order, *, with_lse=False):
    """(forward, backward) bytes, the backward meter, and the gradients out of their memory."""
    meter = Meter()
    q, k, v = (HBM(x, meter, name) for x, name in zip(arrays(p), "QKV"))
    (o, lse), pullback = vjp(q, k, v, **band(p), **blocks(p))
    forward = meter.total
    meter.read.clear(), meter.written.clear()
    do = HBM(normal(o.shape, o.dtype), meter, "dO")
    dlse = HBM(normal(lse.shape, lse.dtype), meter, "dlse") if with_lse else None
    got = pullback(do, dlse, order=order)
    return forward, meter, [x._array for x in got[:3]], (do, dlse)


@each_order
@pytest.mark.parametrize("low, value, dtype", [
    (-18.0, 1e4, "float32"), (-17.0, 100.0, "float32"), (-20.7, 1e10, "float32"), (-40.0, 1e20, "float64"),
])  # fmt: skip
def test_a_weight_that_rounds_to_one_beside_a_large_value(low, value, dtype, order):
    """The other key has next to no weight, and its value makes up for that."""
    q, k = np.array([[1, 0]], dtype), np.array([[0, 3], [low, 5]], dtype)
    v, do = np.array([[0], [value]], dtype), np.ones((1, 1), dtype)
    want = oracle_vjp(q, k, v, do, scale=1.0)
    got = gradients(q, k, v, do, order=order, scale=1.0)
    for name in "qkv":
        ref = np.asarray(want[name], np.float64)
        np.testing.assert_allclose(getattr(got, name), ref, rtol=1e-5, atol=1e-5 * np.abs(ref).max())


@each_order
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_dominant_key_among_many(dtype, order):
    """A key whose weight rounds to 1, with a small value, and 63 others with large ones."""
    q, (k, v) = np.ones((1, 8)), normal((2, 64, 8), "float64", 3)
    k[1:], v[1:], v[0] = k[1:] / 8 - 7, 100 * v[1:], v[0] / 8
    k[0] = 0
    q, k, v, do = (x.astype(DTYPES[dtype]) for x in (q, k, v, normal((1, 8))))
    do = do.astype(np.float32 if "float8" in dtype else do.dtype)
    got = gradients(q, k, v, do, order=order)
    want = oracle_vjp(q, k, v, do)
    eps = {8: 1e-13, 4: 1e-5}.get(np.dtype(DTYPES[dtype]).itemsize, 0.02)
    for name in "qkv":
        ref = np.asarray(want[name], np.float64)
        error = np.abs(getattr(got, name).astype(float) - ref).max()
        assert error <= eps * max(1e-3, np.abs(ref).max()), name


def test_a_key_alone_gets_no_gradient():
    """Causal row 0, at values that do not add up the same in any order."""
    q, k, v = qkv(3, 3, 8, 37, dtype="float32")
    k *= np.float32(1e20)
    do = np.zeros((3, 37), np.float32)
    do[0] = normal(37, "float32", 9)
    got = gradients(q, k, v, do, causal=True)
    assert not got.q.any() and not got.k.any()


# heads on several threads

SHARED = {
    "bias": ((2, 4), (2, 2), {"bias": normal((2, 4, 60, 70))}),
    "sinks": ((2, 4), (2, 2), {"sinks": normal(4)}),
    "keys of one entry": ((2, 4), (2,), {}),
    "queries of one entry": ((4,), (2, 2), {}),
}


@pytest.fixture
def ran(monkeypatch):
    """How many threads each walk over heads was given, on a machine of three cores."""
    seen, run = [], backward.run
    monkeypatch.setattr(backward, "crew", lambda call: 3)
    monkeypatch.setattr(backward, "run", lambda work, tasks, threads: seen.append(threads) or run(work, tasks, threads))
    return seen


@each_order
@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom_right"}, {"kv_lengths": np.array([70, 9])}])
def test_heads_on_threads_give_the_same_bits(ran, monkeypatch, order, options):
    given_ = qkv(60, 70, 8, 5, (2, 4), (2, 2), "float32")
    do = normal((2, 4, 60, 5), "float32")
    got = gradients(*given_, do, order=order, block_q=16, block_kv=32, **options)
    assert ran == [3]
    monkeypatch.setattr(backward, "crew", lambda call: 1)
    same(got[:3], gradients(*given_, do, order=order, block_q=16, block_kv=32, **options)[:3])


@pytest.mark.parametrize("lead, kv_lead, options", SHARED.values(), ids=SHARED)
def test_heads_that_share_a_gradient_take_turns(ran, lead, kv_lead, options):
    given_ = qkv(60, 70, 8, 5, lead, kv_lead)
    gradients(*given_, normal((2, 4, 60, 5)), **options)
    assert ran == []


def test_fewer_heads_than_cores_leave_the_products_their_threads(ran):
    gradients(*qkv(60, 70, lead=(2,)), normal((2, 60, 4)))
    assert ran == []


def near(got, want):
    """Within some roundings: before a meter the forward pass is chapter 4's loop, else chapter 11's."""
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        eps, (x, y) = float(ml_dtypes.finfo(y.dtype).eps), (a.astype(np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=4 * eps, atol=32 * eps * max(1, np.abs(y).max(initial=0)))


@given(problems(["fp64", "fp32", "bf16", "fp8"]), st.sampled_from(ORDERS), st.booleans())
def test_meter_is_formula(p, order, with_lse):
    forward, meter, got, (do, dlse) = metered_vjp(p, order, with_lse=with_lse)
    rows, state = p.batch * p.heads * p.seq_q, 8 if p.dtype == "fp64" else 4
    if p.dtype != "fp8":
        assert forward == flash_bytes(p, lse=True) + rows * state
    assert meter.total - meter.read["dlse"] == backward_bytes(p, order)
    assert meter.read["dlse"] == with_lse * meter.read["lse"]
    assert not meter.written.keys() & {"Q", "K", "V", "dO", "lse", "rest"}
    do, dlse = (x if x is None else x._array for x in (do, dlse))
    near(got, gradients(*arrays(p), do, dlse, order, **band(p), **blocks(p))[:3])


def beyond(p, given_):
    """The keys that belong to no query, as problems without queries."""
    return replace(p, seq_q=0 * p.seq_q, seq_kv=given_[1].shape[-2] - p.seq_kv)


@given(several(["fp64", "fp32", "bf16"]), st.sampled_from(ORDERS))
def test_several_lengths(call, order):
    """Batch entries of several lengths and packed sequences add up, to the byte."""
    p, given_, lengths = call
    meter = Meter()
    q, k, v = (HBM(x, meter, name) for x, name in zip(given_, "QKV"))
    (o, lse), pullback = vjp(q, k, v, **lengths, **band(p), **blocks(p))
    state = 8 if p.dtype == "fp64" else 4
    assert meter.total == flash_bytes(p, lse=True).sum() + lse._array.size * state
    meter.read.clear(), meter.written.clear()
    pullback(HBM(normal(o.shape, o.dtype), meter, "dO"), order=order)
    want = backward_bytes(p, order).sum()
    if "kv_lengths" in lengths:
        want += backward_bytes(beyond(p, given_), order).sum()
    assert meter.total == want


@given(several(["fp64", "fp32", "bf16"]), st.sampled_from(ORDERS), st.booleans())
def test_options_of_several_lengths(call, order, per_head):
    """Mask, bias and sinks are read as in the forward pass; their gradients grow; sinks ask for L and r once more."""
    p, given_, lengths = call
    over = (*given_[0].shape[-3:-1], given_[1].shape[-2])[0 if per_head else 1 :]
    arrays_ = {"mask": np.ones(over, bool), "bias": np.zeros(over, np.float32), "sinks": np.zeros(p.heads, np.float32)}
    meter = Meter()
    far = {name: HBM(x, meter, name) for name, x in arrays_.items()}
    q, k, v = (HBM(x, meter, name) for x, name in zip(given_, "QKV"))
    (o, lse), pullback = vjp(q, k, v, **far, **lengths, **band(p), **blocks(p))
    once = option_bytes(p, per_head)
    assert {name: meter.read[name] for name in far} == once
    meter.read.clear(), meter.written.clear()
    pullback(HBM(normal(o.shape, o.dtype), meter, "dO"), order=order)
    assert {name: meter.read[name] for name in far} == once
    state = 8 if p.dtype == "fp64" else 4
    both = meter.read + meter.written
    for name in ("bias", "sinks"):
        assert both["d" + name] == _grown(1, once[name] // 4, arrays_[name].size, state, 4)
    more = sum(once.values()) + both["dbias"] + both["dsinks"] + 2 * state * lse._array.size
    want = backward_bytes(p, order).sum()
    if "kv_lengths" in lengths:
        want += backward_bytes(beyond(p, given_), order).sum()
    assert meter.total == want + more


@each_order
def test_meter_by_hand(order):
    """Two query tiles of 2, three key tiles of 2, no mask; d = 1, d_v = 2; float32."""
    p = Problem(seq_q=4, seq_kv=6, head_dim=1, value_dim=2, dtype="fp32", block_q=2, block_kv=2)
    _, meter, _, _ = metered_vjp(p, order)
    if order == "keys":
        read = {"Q": 12, "dO": 8 + 24, "O": 8, "lse": 12, "rest": 12, "D": 12}
        read |= {"K": 6, "V": 12, "dQ": 12}
        written = {"dQ": 4 + 3 * 4, "dK": 6, "dV": 12, "D": 4}
    else:
        read = {"Q": 4, "dO": 8 + 8, "O": 8, "lse": 4, "rest": 4, "D": 4}
        read |= {"K": 12, "V": 24, "dK": 12, "dV": 24}
        written = {"dQ": 4, "dK": 6 + 12, "dV": 12 + 24, "D": 4}
    assert meter.read == {n: 4 * x for n, x in read.items()}
    assert meter.written == {n: 4 * x for n, x in written.items()}
    assert meter.total == backward_bytes(p, order)


@each_order
def test_every_option_behind_the_meter(order):
    """Broadcast inputs, lengths, masks, bias and sinks: the same gradients as on plain arrays."""
    given_ = qkv(7, 9, 4, 3, (2, 1, 4), (3, 2))
    arrays_ = {"bias": normal((4, 1, 9)), "sinks": normal(4), "mask": normal((7, 9)) < 1}
    options = {"kv_lengths": np.array([9, 0, 5]), "softcap": 3.0, "block_q": 3, "block_kv": 2}
    do, dlse = incoming(*given_, **arrays_)
    want = gradients(*given_, do, dlse, order, **arrays_, **options)
    meter = Meter()
    far = {name: HBM(x, meter, name) for name, x in arrays_.items()}
    q, k, v, do, dlse = (HBM(x, meter, "x") for x in (*given_, do, dlse))
    got = gradients(q, k, v, do, dlse, order, **far, **options)
    near([x._array for x in got], want)
    assert {"dQ", "dK", "dV", "dbias", "dsinks"} <= meter.written.keys()


@each_order
def test_bytes_of_arrays_equal_those_of_scalars(order):
    p = Problem(1, heads=6, kv_heads=2, head_dim=3, value_dim=5, block_q=4, block_kv=6, causal=True)
    got = backward_bytes(p.at(np.arange(40)), order)
    assert got.tolist() == [backward_bytes(p.at(n), order) for n in range(40)]
    exact = backward_bytes(p.at(10**9), order)
    assert isinstance(exact, int)
    np.testing.assert_allclose(backward_bytes(p.at([10**9]), order), [float(exact)], rtol=1e-15)


@each_order
def test_grouped_heads_share_keys(order):
    """K and V once per kv head; so are dK and dV."""
    p = Problem(8, heads=4, kv_heads=2, head_dim=2, dtype="fp32", block_q=4, block_kv=4)
    _, meter, _, _ = metered_vjp(p, order)
    if order == "keys":
        assert meter.read["K"] == meter.written["dK"] == 2 * 8 * 2 * 4
    assert meter.total == backward_bytes(p, order)


@given(problems(), st.sampled_from(["exact", "dense"]))
def test_flops(p, causal):
    d, dv = p.head_dim, p.value_dim
    assert backward_flops(p, causal) * (d + dv) == flops(p, causal) * (3 * d + 2 * dv)


def test_flops_are_two_and_a_half_times_forward():
    for p in (Problem(9, causal=True), Problem(seq_q=3, seq_kv=8), Problem(7, window=(2, 1), heads=3)):
        assert 2 * backward_flops(p) == 5 * flops(p)
    p = Problem(3, causal=True, head_dim=1)
    assert backward_flops(p, "half") == 4.5 * 2 * 5 and isinstance(backward_flops(p, "half"), int)


def test_key_lengths_that_change_after_the_call_change_nothing():
    q, k, v = qkv(3, 5, lead=(2, 1))
    lengths = np.array([2, 5])
    (o, _), pullback = backward.flash_attention_vjp(q, k, v, kv_lengths=lengths)
    before = pullback(o)
    lengths[:] = 0
    assert all(np.array_equal(a, b) for a, b in zip(before[:3], pullback(o)[:3]))


def test_the_gradient_of_a_large_sink_keeps_its_digits():
    """Logits of 10,000 twice and a sink of 10,000: exp(sink - lse) needs what rounding takes from lse."""
    q, k = np.full((1, 1, 1), 100, np.float32), np.full((1, 2, 1), 100, np.float32)
    v = np.float32([[[1], [3]]])
    (o, _), pullback = backward.flash_attention_vjp(q, k, v, scale=1.0, sinks=np.float32([1e4]))
    np.testing.assert_allclose(pullback(np.ones_like(o)).sinks, [-4 / 9], rtol=1e-6)
