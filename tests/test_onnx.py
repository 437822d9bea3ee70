"""The standard's own cases: operators Attention and FlexAttention of ONNX, through every path."""
import warnings
from functools import partial
from itertools import product

import numpy as np
import pytest

from flashlit.naive import softmax
from flashlit.scores import Band, scores
from helpers import naive, quick, split, tiled, uncompiled

WHY = "the cases of the ONNX standard come with the package onnx, 1.23 or later"
onnx = pytest.importorskip("onnx", minversion="1.23", reason=WHY)
from onnx.backend.test.case.node import collect_testcases  # noqa: E402

SIZES = (1, 2, 3, 5, 1000)  # of tiles, or splits; the last is larger than any input
PATHS = {"naive": naive} | {
    f"tiles {q} x {kv}": partial(tiled, block_q=q, block_kv=kv) for q, kv in product(SIZES, SIZES)
} | {
    f"{name} {q} x {kv}": partial(path, block_q=q, block_kv=kv)
    for q, kv in zip(SIZES, (3, 1, 1000, 2, 5))
    for name, path in (("fast", quick), ("NumPy's step", uncompiled))
} | {f"splits {n}": partial(split, splits=n) for n in SIZES}


def operators(*names):
    """For each operator: its cases by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases()  # all of them: a second call in one process gives none
    single = [case for case in cases if len(case.model.graph.node) == 1]
    return [{x.name: x for x in single if x.model.graph.node[0].op_type == name} for name in names]


ATTENTION, FLEX = operators("Attention", "FlexAttention")


def parts(case):
    """Attributes, inputs and outputs by name."""
    node, (given, expected) = case.model.graph.node[0], case.data_sets[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    names = ([name for name in names if name] for names in (node.input, node.output))
    return attributes, *(dict(zip(*pair, strict=True)) for pair in zip(names, (given, expected)))


def heads_apart(x, heads):
    """(batch, seq, heads * dim) as (batch, heads, seq, dim)."""
    return np.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def padded(mask, seq_kv):
    """A mask or bias that covers all keys; those it does not reach are hidden."""
    hidden = False if mask.dtype == bool else -np.inf
    if mask.shape[-1] in (1, seq_kv):
        return mask
    missing = [(0, 0)] * (mask.ndim - 1) + [(0, seq_kv - mask.shape[-1])]
    return np.pad(mask, missing, constant_values=hidden)


def call_of(attributes, given):
    """(q, k, v) and the options, in the terms of this package."""
    q, k, v = (given[name] for name in "QKV")
    if q.ndim == 3:
        q_heads, kv_heads = attributes["q_num_heads"], attributes["kv_num_heads"]
        q, k, v = (heads_apart(x, n) for x, n in zip((q, k, v), (q_heads, kv_heads, kv_heads)))
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[-2]
        k, v = (np.concatenate([given[x], y], -2) for x, y in (("past_key", k), ("past_value", v)))
    bounds = [attributes.get(f"{side}_window_size", -1) for side in ("left", "right")]
    options = {
        "causal": bool(attributes.get("is_causal", 0)),
        "window": tuple(None if x == -1 else x for x in bounds),
        "align": past,
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap") or None,
    }
    if "nonpad_kv_seqlen" in given:
        options |= {"kv_lengths": given["nonpad_kv_seqlen"], "align": "bottom_right"}
    if "attn_mask" in given:
        mask = padded(given["attn_mask"], k.shape[-2])
        options["mask" if mask.dtype == bool else "bias"] = mask
    return (q, k, v), options


def near(got, expected, case):
    """Within the tolerance of ONNX's own runner, which is wider for bfloat16."""
    rtol = max(case.rtol, 2.0**-6 if expected.dtype.name == "bfloat16" else 0)
    got, expected = (x.astype(np.float64) for x in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=case.atol)


def check(case, expected, q, k, v, **options):
    """The first output, by every path."""
    for path in PATHS.values():
        o = path(q, k, v, **options)
        assert o.dtype == expected.dtype
        if expected.ndim == 3:
            o = np.swapaxes(o, 1, 2).reshape(expected.shape)
        near(o, expected, case)


def scores_of(mode, q, k, *, causal, window, align, scale, softcap, mask=None, bias=None):
    """What the fourth output holds: 0 scaled scores, 1 capped, 2 with bias, 3 probabilities."""
    n, m, dtype = q.shape[-2], k.shape[-2], q.dtype
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    options = {"scale": scale}
    if mode > 0:
        options["softcap"] = softcap
    if mode > 1:
        visible = Band(causal, window, align).diagonals(n, m).visible(slice(0, n), slice(0, m))
        options |= {"bias": bias, "visible": visible if mask is None else visible & mask}
    s = scores(*(x.astype(np.float32) for x in (q, k)), **options)
    return (softmax(s) if mode == 3 else s).astype(dtype)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    case = ATTENTION[name]
    attributes, given, expected = parts(case)
    (q, k, v), options = call_of(attributes, given)
    check(case, expected["Y"], q, k, v, **options)
    for x, kept in (("present_key", k), ("present_value", v)):
        if x in expected:
            near(kept, expected[x], case)
    if "qk_matmul_output" in expected:
        mode = attributes.get("qk_matmul_output_mode", 0)
        near(scores_of(mode, q, k, **options), expected["qk_matmul_output"], case)


OFF = np.arange(4)[:, None] - np.arange(4)
SCORE_MODS = {  # what the graph score_mod of a case computes
    "test_flexattention_score_mod": {"bias": np.float32(0.5)},
    "test_flexattention_causal_mask": {"causal": True},
    "test_flexattention_soft_cap": {"softcap": 20.0},
    "test_flexattention_relative_positional": {"bias": OFF.astype(np.float32)},
}


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name):
    case = FLEX[name]
    attributes, given, expected = parts(case)
    if "prob_mod" in attributes:
        pytest.skip("prob_mod changes probabilities after the softmax: it has no counterpart here")
    assert ("score_mod" in attributes) == (name in SCORE_MODS)
    options = {"scale": attributes.get("scale")} | SCORE_MODS.get(name, {})
    check(case, expected["Y"], *(given[x] for x in "QKV"), **options)


def test_all_of_them_are_here():
    assert (len(ATTENTION), len(FLEX)) == (93, 11)
    assert sum("prob_mod" in parts(case)[0] for case in FLEX.values()) == 1
    assert SCORE_MODS.keys() <= FLEX.keys()
