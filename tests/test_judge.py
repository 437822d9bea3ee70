"""The judge: it passes what is right, names what is wrong, and says so in every form."""
import inspect
import json
import subprocess
import sys
import time
import warnings
from functools import partial, wraps
from types import SimpleNamespace

import numpy as np
import pytest

import flashlit
from flashlit import cases, testing, tiled
from flashlit.backward import flash_attention_vjp
from flashlit.cli import main
from flashlit.decode import decode_attention
from flashlit.testing import (
    CLAUSES,
    FEATURES,
    OPTIONS,
    adversarial_inputs,
    assert_attention_close,
    check,
    from_torch,
    pytest_clauses,
    reference,
    reference_gradients,
)
from flashlit.bench import numpy_step
from helpers import DTYPES, normal, qkv
from oracle import oracle, within

INF, NAN = np.inf, np.nan
LOW = {"grouped", "value_dim", "any_dim", "empty", "broadcast", "refusals", "float16", "bfloat16", "float8"}
SMALL = partial(flashlit.flash_attention, block_q=16, block_kv=32)
ONE_WIDE = partial(flashlit.flash_attention, block_q=1000, block_kv=1)
RIGHT = {
    "naive": (flashlit.attention, "attention"),
    "tiled": (tiled.flash_attention, "attention"),
    "fast": (flashlit.flash_attention, "attention"),
    "NumPy's step, small tiles": (numpy_step()(SMALL), "attention"),
    "small tiles": (SMALL, "attention"),
    "tiles of one key": (ONE_WIDE, "attention"),
    "decode": (decode_attention, "attention"),
    "decode, splits": (partial(decode_attention, splits=3), "attention"),
    "vjp": (flash_attention_vjp, "vjp"),
    "vjp, small tiles": (partial(flash_attention_vjp, block_q=16, block_kv=32), "vjp"),
    "merge": (flashlit.merge, "merge"),
    "pairs": (flashlit.pairs, "pairs"),
}


def wrong(name, **options):
    """The smallest failure of a clause, for a callable that must break it."""
    report = check(**options)
    number = next(n for n, words in CLAUSES.items() if words == name)
    assert number in report.broken, str(report)
    return report.clause(number)


# The measuring stick.


@pytest.mark.parametrize(
    "actual, expected",
    [([1.0], [NAN]), ([NAN], [1.0]), ([INF], [-INF]), ([[1.0, 2.0]], [1.0, 2.0]), ([1.0], [INF]), ([INF], [1.0])],
)
def test_public_case_test_01(actual, expected):
    with pytest.raises(AssertionError):
        assert_attention_close(np.array(actual), np.array(expected))


def test_the_stick_says_where_and_by_how_much():
    x = np.array([[1.0, 2.0], [3.0, 4.5]])
    with pytest.raises(AssertionError, match=r"4.5 at \(1, 1\), the reference has 4; off by 0.5, allowed 1e-14"):
        assert_attention_close(x, np.array([[1.0, 2.0], [3.0, 4.0]]))
    with pytest.raises(AssertionError, match=r"shape \(2,\), the reference has \(1, 2\)"):
        assert_attention_close(np.ones(2), np.ones((1, 2)))


def test_what_agrees_passes():
    x = np.array([NAN, INF, -INF, 0.5])
    assert_attention_close(x, x)
    assert_attention_close(np.zeros((0, 3)), np.zeros((0, 3)))
    assert_attention_close(np.float32([1 / 3]), np.array([1 / 3]))
    assert_attention_close(np.array([1.0 + 5e-15]), np.array([1.0]))
    assert_attention_close(np.array([1.0 + 5e-13]), np.array([1.0]), size=100)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("times, passes", [(2.9, True), (40, False)])
def test_three_times_the_error_of_plain_attention(dtype, times, passes):
    ref = np.random.default_rng(0).standard_normal(100)
    low = ref.astype(DTYPES[dtype])
    low = low + low * low.dtype.type(2.0**-5 if dtype != "float64" else 1e-10)
    reach = float(np.abs(low.astype(float) - ref).max())
    x = ref.copy()
    x[7] += times * reach
    x = x.astype(DTYPES[dtype])
    if passes:
        assert_attention_close(x, ref, low)
    else:
        with pytest.raises(AssertionError):
            assert_attention_close(x, ref, low)


# The reference.

VARIANTS = [
    {},
    dict(causal=True),
    dict(causal=True, align="bottom_right"),
    dict(window=(2, 1), align=1),
    dict(softcap=1.5, scale=-0.4),
    dict(mask=np.random.default_rng(1).random((2, 1, 5, 5)) < 0.6),
    dict(bias=np.where(np.random.default_rng(2).random((4, 5, 5)) < 0.3, -INF, 0.7)),
]


@pytest.mark.parametrize("options", VARIANTS)
def test_the_reference_is_the_oracle(options):
    q, k, v = qkv(5, 5, d=3, dv=2, lead=(2, 4), kv_lead=(2, 2))
    for x, y in zip(reference(q, k, v, **options), oracle(q, k, v, **options)):
        assert x.shape == y.shape and within(x.astype(float), y)


def test_the_reference_is_the_package_on_every_case():
    for case in adversarial_inputs():
        if not case.refused:
            o, lse = case.truth
            ours = decode_attention(case.q, case.k, case.v, **case.options | {"return_lse": True})
            assert o.shape == ours[0].shape and lse.shape == ours[1].shape
            assert np.array_equal(np.isnan(o), np.isnan(ours[0].astype(float)))


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "sinks"])
def test_the_reference_gradients_are_slopes(which):
    q, k, v = qkv(4, 6, d=3, dv=2, lead=(2, 4), kv_lead=(1, 2))
    x = dict(q=q, k=k, v=v, bias=normal((4, 1, 6)), sinks=normal(4))
    options = dict(causal=True, align=1, window=(3, 0), softcap=1.2, scale=0.6)
    o, lse = reference(**x, **options)
    do, dlse = normal(o.shape, seed=8), normal(lse.shape, seed=9)
    found = dict(zip(x, reference_gradients(q, k, v, do, dlse, bias=x["bias"], sinks=x["sinks"], **options)))

    def loss(step):
        o, lse = reference(**x | {which: x[which] + step}, **options)
        return (o * do).sum() + (lse * dlse).sum()

    direction = normal(x[which].shape, seed=10)
    slope = (loss(1e-5 * direction) - loss(-1e-5 * direction)) / 2e-5
    np.testing.assert_allclose(float(slope), float((found[which] * direction).sum()), rtol=1e-8)
    assert found[which].shape == x[which].shape


def test_the_judge_shares_no_code_with_what_it_judges():
    for module in (cases, testing):
        source = inspect.getsource(module).replace("from .cases import", "")
        assert "import flashlit" not in source and "from ." not in source and "from flashlit" not in source


@pytest.mark.parametrize("name", [
    "CLAUSES", "OPTIONS", "Case", "adversarial_inputs", "assert_attention_close", "reference", "reference_gradients",
])
def test_what_the_judge_hands_on(name):
    assert getattr(testing, name) is getattr(cases, name) and name in testing.__all__


# The inputs.


def test_inputs_come_by_name_and_seed():
    (a,), (b,), (c,) = (list(adversarial_inputs("some rows of a mask", seed=s)) for s in (0, 0, 1))
    assert a.q.tobytes() == b.q.tobytes() != c.q.tobytes()
    assert (a.name, a.clause) == ("some rows of a mask", 8)


def test_a_name_is_one_case():
    rows = [row[0][0] for row in cases.rows_for(None)]
    assert len(rows) == len({*rows}) == len([*adversarial_inputs()])
    assert len(testing._MERGES) == len(testing._cases("merge", None, "float64"))
    assert len([*testing._pairs_table()]) == len(testing._cases("pairs", None, "float64"))


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_the_number_of_heads_can_be_fixed(heads):
    cases = list(adversarial_inputs(heads=heads))
    assert {c.q.shape[-3] for c in cases if c.q.ndim > 2} == {0, heads}
    assert check(flashlit.flash_attention, heads=heads).ok


def test_every_clause_but_merging_is_asked():
    assert {case.clause for case in adversarial_inputs()} == {*CLAUSES} - {15}


# Right ones pass, wrong ones fail with the clause.


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    fn, kind = RIGHT[name]
    report = check(fn, kind=kind)
    assert report.ok and not report.failures and report.broken == [], str(report)
    paged = fn is decode_attention or getattr(fn, "func", None) is decode_attention or kind != "attention"
    why = {x.why for x in report.findings if x.verdict == "not asked"}
    assert why == (set() if paged else {"lacks block_table"})


@pytest.mark.parametrize("name", ["tiled", "vjp", "merge", "pairs"])
def test_a_check_is_short(name):
    fn, kind = RIGHT[name]
    check(fn, kind=kind)  # the truth is kept
    start = time.perf_counter()
    check(fn, kind=kind)
    assert time.perf_counter() - start < 5


def changed(before=lambda x: {}, after=lambda o, lse: (o, lse)):
    """attention with other inputs or outputs."""

    @wraps(flashlit.attention)
    def fn(q, k, v, **options):
        x = dict(q=q, k=k, v=v) | options
        x |= before(SimpleNamespace(**dict.fromkeys(OPTIONS) | x))
        result = flashlit.attention(**x)
        return after(*result) if isinstance(result, tuple) else result

    return fn


def tiled_heads(x):
    heads, kv_heads = ((1, *a.shape)[-3] for a in (x.q, x.k))
    group = heads // (kv_heads or 1)
    return {} if group < 2 else {key: np.concatenate([getattr(x, key)] * group, -3) for key in "kv"}


def writes(x):
    if x.mask is not None and x.mask.dtype == bool:
        x.mask[:] = ~x.mask
        return dict(mask=~x.mask)
    return {}


FAULTS = {
    "heads": ("grouped heads", dict(before=tiled_heads)),
    "zero": ("scale", dict(before=lambda x: dict(scale=x.scale or None))),
    "align": ("causal alignment", dict(before=lambda x: dict(align="top_left") if x.align else {})),
    "buffer": ("window and lengths", dict(before=lambda x: dict(kv_lengths=None))),
    "integer mask": (
        "mask and bias",
        dict(before=lambda x: {} if x.mask is None else dict(mask=x.mask.astype(bool))),
    ),
    "sense": (
        "mask and bias",
        dict(before=lambda x: dict(mask=~x.mask) if x.mask is not None and x.mask.dtype == bool else {}),
    ),
    "cap": ("order of the steps", dict(before=lambda x: dict(softcap=x.softcap or None))),
    "base": ("log-sum-exp", dict(after=lambda o, lse: (o, lse / np.log(2).astype(lse.dtype)))),
    "half lse": ("log-sum-exp", dict(after=lambda o, lse: (o, lse.astype(o.dtype).astype(lse.dtype)))),
    "empty": (
        "rows that see nothing",
        dict(after=lambda o, lse: (o, np.where(lse == -INF, lse.dtype.type(0), lse))),
    ),
    "type": ("types", dict(after=lambda o, lse: (o.astype(np.float64), lse))),
    "sinks": ("sinks", dict(before=lambda x: {} if x.sinks is None else dict(sinks=x.sinks / 2))),
    "documents": ("packed sequences", dict(before=lambda x: dict(cu_seqlens_q=None, cu_seqlens_kv=None))),
    "writes": ("memory and empty axes", dict(before=writes)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong(name):
    words, change = FAULTS[name]
    found = wrong(words, fn=changed(**change))
    assert found.case and found.input and found.expected and found.got and found.size


def test_not_the_same_bits():
    state = np.random.default_rng(0)

    def noise(o, lse):
        return np.where(state.random(o.shape) < 0.5, o, np.nextafter(o, 2 * o)) if o.dtype == np.float32 else o, lse

    found = wrong("same bits", fn=changed(after=noise))
    assert "numbers differ" in found.got


def test_the_batch_must_not_matter():
    def fn(q, k, v, *, causal=False, scale=None):
        o = flashlit.attention(q, k, v, causal=causal, scale=scale)
        return np.nextafter(o, o * 2) if o.dtype == np.float32 and o.shape[0] > 2 else o

    assert "in its batch" in wrong("same bits", fn=fn, causal_align="top_left").expected


def test_a_warning_is_a_fault():
    def fn(q, k, v):
        if q.shape[-2] == 9:
            np.log(np.zeros(1))
        return flashlit.attention(q, k, v)

    found = wrong("axes", fn=fn)
    assert found.expected == "no NumPy warning" and found.got.startswith("RuntimeWarning: divide by zero")


def test_other_warnings_are_none():
    def fn(q, k, v):
        warnings.warn("slow", UserWarning, stacklevel=2)
        return flashlit.attention(q, k, v)

    assert check(fn).ok


def test_an_exception_is_a_fault():
    def fn(q, k, v):
        raise KeyError("no kernel")

    found = wrong("axes", fn=fn)
    assert (found.expected, found.got) == ("an answer", "KeyError: 'no kernel'")
    report = check(fn)  # nor is it the refusal that is asked for
    assert wrong("types", fn=fn).got and not any(x.verdict == "pass" for x in report.findings)


@pytest.mark.parametrize("made, expected, got", [
    (lambda o: None, "o as an array", "NoneType"),
    (lambda o: o[..., :-1, :], "o of shape (1, 1, 1, 1)", "shape (1, 1, 0, 1)"),
    (lambda o: (o, o, o), "(o, lse)", "tuple"),
    (lambda o: o.tolist(), "(o, lse)", "list"),
])
def test_what_is_no_output(made, expected, got):
    def fn(q, k, v, *, scale=None):
        return made(flashlit.attention(q, k, v, scale=scale))

    failures = check(fn).failures
    assert any((x.expected, x.got) == (expected, got) for x in failures), failures[0]


def test_the_smallest_failure_comes_first():
    report = check(changed(before=lambda x: dict(scale=x.scale or None)))
    assert [x.size for x in report.failures] == sorted(x.size for x in report.failures)
    assert report.clause(2) == next(x for x in report.failures if x.clause == 2)


def test_where_it_is_wrong():
    def first_length(q, k, v, *, kv_lengths=None):
        kv_lengths = None if kv_lengths is None else np.ravel(kv_lengths)[:1]
        return flashlit.attention(q, k, v, kv_lengths=kv_lengths)

    found = check(first_length).failures
    assert found[0].got.endswith("1 of 2 are off, in [1, 0, 0, 0]")
    assert "320 of 640 are off, in [1, :, :, :]" in {x.got.split("; ")[-1] for x in found}


def test_tiles_that_are_not_square():
    """Keys are masked in the tiles at the corner only, right for 32 tokens and for 64 x 64 tiles."""
    def fn(q, k, v, *, causal=False, scale=None):
        corner = np.tri(q.shape[-2], k.shape[-2], dtype=bool)
        for i in range(0, q.shape[-2], 64):
            corner[i : i + 64, i // 2 + 32 : i + 64] = corner[i : i + 64, :i // 2] = True
        return flashlit.attention(q, k, v, scale=scale, causal=causal and q.shape[-2] < 33, mask=corner)

    report = check(fn, causal_align="top_left", lacks={"refusals"})
    assert "many square tiles, causal" in {x.case for x in report.failures if x.clause == 5}


def test_a_hidden_value_widens_no_tolerance():
    case, = adversarial_inputs("1e30 behind kv_lengths")
    assert case.v.max() == 1e30 and case.reach < 10
    o = case.truth[0].astype(float) + 1e-3
    with pytest.raises(testing._Fault):
        testing._hold(testing._Kernel(None), o, case)


# Alignment that nobody asked for.


@pytest.mark.parametrize("rule", ["top_left", "bottom_right"])
def test_a_silent_alignment_is_named(rule):
    def fn(q, k, v, *, causal=False, window=None):
        return flashlit.attention(q, k, v, causal=causal, window=window, align=rule)

    found = wrong("causal alignment", fn=fn)
    assert found.expected == "a ValueError or TypeError" and found.got == f"an answer, as with align={rule!r}"
    assert wrong("window and lengths", fn=fn).got.endswith(f"{rule!r}")
    assert check(fn, causal_align=rule).ok
    other = {"top_left": "bottom_right", "bottom_right": "top_left"}[rule]
    assert {5, 6} <= set(check(fn, causal_align=other).broken)


def test_refusing_is_right_without_an_alignment():
    def fn(q, k, v, *, causal=False):
        if causal and q.shape[-2] != k.shape[-2]:
            raise ValueError("which alignment?")
        return flashlit.attention(q, k, v, causal=causal)

    assert check(fn).ok


# What is not asked.


def test_only_what_is_supported_is_asked():
    seen = set()

    def fn(q, k, v, **options):
        seen.update(options)
        assert q.shape[-3] == k.shape[-3] and q.dtype == np.float32 and q.shape[-1] == v.shape[-1]
        assert q.ndim == 4 and 0 not in (*q.shape, *k.shape) and q.shape[-1] % 8 == 0
        return flashlit.attention(q, k, v, **options)

    report = check(fn, supports={"causal", "scale", "return_lse"}, lacks=LOW | {"float64"})
    assert report.ok and seen == {"causal", "scale", "return_lse"}
    assert (report.clause(17).verdict, report.clause(17).why) == ("not asked", "lacks any_dim, sinks")
    assert report.clause(15).verdict == "not asked" and "kind" in report.clause(15).why


def test_the_signature_says_what_is_supported():
    def bare(q, k, v):
        return flashlit.attention(q, k, v)

    def vague(q, k, v, **options):
        return flashlit.attention(q, k, v, **options)

    assert check(bare).ok and check(bare).clause(3).verdict == "pass"
    assert check(vague, supports={*OPTIONS} - {"block_table"}).ok
    with pytest.raises(TypeError, match="vague does not name its options; say supports"):
        check(vague)


def test_without_lse_its_clause_is_not_asked():
    found = check(lambda q, k, v: flashlit.attention(q, k, v)).clause(10)
    assert (found.verdict, found.why) in [("not asked", "returns no lse"), ("not asked", "lacks bias, softcap")]


def test_a_pair_may_come_unasked():
    assert check(lambda q, k, v: flashlit.attention(q, k, v, return_lse=True)).clause(10).verdict == "pass"


def test_without_ml_dtypes_types_are_not_asked():
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "import flashlit; from flashlit.testing import check\n"
        "report = check(flashlit.flash_attention)\n"
        "print(report.ok)\n"
        "assert 'ml_dtypes is missing' in {x.why for x in report.findings if x.verdict == 'not asked'}\n"
        "print(check(flashlit.merge, kind='merge').ok)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout == "True\nTrue\n", out.stderr


@pytest.mark.parametrize("options, message", [
    (dict(kind="forward"), "kind is of attention, vjp, merge, pairs; not 'forward'"),
    (dict(layout="bsdh"), "layout is of bhsd, bshd, sbhd, bs.hd.; not 'bsdh'"),
    (dict(supports={"casual"}), "supports is of mask, .*; not 'casual'"),
    (dict(lacks={"gqa"}), "lacks is of mask, .*; not 'gqa'"),
    (dict(causal_align="middle"), "causal_align is of None, top_left, bottom_right; not 'middle'"),
    (dict(layout="bs(hd)"), "needs heads"),
])
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        check(flashlit.attention, **options)


def test_features_are_what_cases_need():
    needed = set().union(*(case.needs for case in adversarial_inputs()))
    assert set(FEATURES) <= needed <= {*FEATURES, *OPTIONS, "int64"}


# Layouts.


def in_layout(there, back, fn=flashlit.attention):
    @wraps(fn)
    def call(q, k, v, *, out=None, **options):
        result = fn(there(q), there(k), there(v), out=None if out is None else there(out), **options)
        return (back(result[0]), result[1]) if isinstance(result, tuple) else back(result)

    return call


def swap(x):
    return np.swapaxes(x, -2, -3)


def unfolded(heads):
    """Attention of (batch, seq, heads * dim); heads are told, head_dim follows."""

    @wraps(flashlit.attention)
    def call(q, k, v, **options):
        d = q.shape[-1] // heads
        kv_heads = k.shape[-1] // d if d else heads

        def split(x, n):
            return swap(x.reshape(*x.shape[:-1], n, x.shape[-1] // n))

        result = flashlit.attention(split(q, heads), split(k, kv_heads), split(v, kv_heads), **options)
        o = swap(result[0] if isinstance(result, tuple) else result)
        o = o.reshape(*o.shape[:-2], o.shape[-2] * o.shape[-1])
        return (o, result[1]) if isinstance(result, tuple) else o

    return call


LAID = {
    "bshd": (in_layout(swap, swap), None),
    "sbhd": (in_layout(lambda x: np.moveaxis(x, 0, -2), lambda x: np.moveaxis(x, -2, 0)), None),
    "bs(hd)": (unfolded(4), 4),
}


@pytest.mark.parametrize("layout", LAID)
def test_layouts(layout):
    fn, heads = LAID[layout]
    lacks = {"refusals", "out"} if layout == "bs(hd)" else set()
    report = check(fn, layout=layout, heads=heads, lacks=lacks)
    assert report.ok, str(report)
    asked = [x for x in report.findings if x.verdict == "pass"]
    assert len(asked) > 180 and {x.clause for x in asked} == {*CLAUSES} - {15, 16}
    assert not check(flashlit.attention, layout=layout, heads=heads or 4, lacks={"refusals"}).ok


def test_layout_of_gradients():
    @wraps(flash_attention_vjp)
    def fn(q, k, v, **options):
        (o, lse), pullback = flash_attention_vjp(swap(q), swap(k), swap(v), **options)

        def pull(do, dlse=None):
            grads = pullback(swap(do), dlse)
            return (*map(swap, grads[:3]), *grads[3:])

        return (swap(o), lse), pull

    report = check(fn, kind="vjp", layout="bshd")
    assert report.ok, str(report)
    assert not check(flash_attention_vjp, kind="vjp", layout="bshd", lacks={"refusals"}).ok


# Gradients, merging, counting.


def pulled(change):
    """The right gradients, changed."""

    @wraps(flash_attention_vjp)
    def fn(q, k, v, **options):
        pair, pullback = flash_attention_vjp(q, k, v, **options)
        return pair, lambda do, dlse=None: change(pullback, do, dlse, q, k)

    return fn


def plain_tuple(pullback, do, dlse, q, k):
    grads = pullback(do, dlse)
    return grads.q, grads.k, grads.v, grads.bias, grads.sinks


WRONG_GRADIENTS = {
    "dlse ignored": lambda pull, do, dlse, q, k: pull(do),
    "dk of one head": lambda pull, do, dlse, q, k: pull(do, dlse)._replace(
        k=pull(do, dlse).k / max(1, (1, *q.shape)[-3] // max(1, (1, *k.shape)[-3]))),
    "dq scaled": lambda pull, do, dlse, q, k: pull(do, dlse)._replace(q=2 * pull(do, dlse).q),
    "no dbias": lambda pull, do, dlse, q, k: pull(do, dlse)._replace(bias=None),
    "float64": lambda pull, do, dlse, q, k: pull(do, dlse)._replace(q=pull(do, dlse).q.astype(float)),
}


def test_gradients_may_be_a_plain_tuple():
    assert check(pulled(plain_tuple), kind="vjp").ok


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_wrong_gradients(name):
    report = check(pulled(WRONG_GRADIENTS[name]), kind="vjp")
    assert {16, 11} & set(report.broken), str(report)


def test_a_merge_of_a_list():
    def listed(parts):
        return flashlit.merge(*parts)

    assert check(listed, kind="merge").ok and check(lambda parts: flashlit.merge(*parts), kind="merge").ok


@pytest.mark.parametrize("wrong_merge", [
    lambda parts: (sum(o for o, _ in parts) / len(parts), flashlit.merge(*parts)[1]),
    lambda parts: (flashlit.merge(*parts)[0], sum(lse for _, lse in parts)),
    lambda parts: flashlit.merge(*parts[:2]),
    lambda parts: flashlit.merge(*[(np.nan_to_num(o), lse) for o, lse in parts])[::-1],
])
def test_wrong_merges(wrong_merge):
    with np.errstate(all="ignore"):
        assert 15 in check(wrong_merge, kind="merge").broken


@pytest.mark.parametrize("wrong_count, clause", [
    (lambda n, m, **x: float(flashlit.pairs(n, m, **x)), 5),
    (lambda n, m, **x: int(np.int64(flashlit.pairs(n, m, **x) & 0xFFFFFFFF).astype(np.int32)), 5),
    (lambda n, m, **x: flashlit.pairs(n, m, **x) + (x.get("window") == (0, 1)), 6),
    (lambda n, m, **x: flashlit.pairs(n, m, **x) if n else 1, 13),
    (lambda n, m, **x: flashlit.pairs(n, m, **{"align": "top_left"} | x), 5),
])
def test_wrong_counts(wrong_count, clause):
    report = check(wrong_count, kind="pairs", supports={"causal", "window", "align"})
    assert clause in report.broken


# The report.


@pytest.fixture(scope="module")
def report():
    return check(changed(before=lambda x: dict(scale=x.scale or None)), lacks={"sinks"})


def test_report_as_text(report):
    lines = str(report).splitlines()
    assert lines[0] == "attention as attention breaks 1 clause"
    assert lines[2].split() == ["clause", "pass", "fail", "not", "asked"]
    assert [line for line in lines if line.startswith("17 sinks")][0].split()[2:4] == ["-", "-"]
    assert "2 scale: scale=0.0" in lines and any(line.startswith("expected  o = 0") for line in lines)
    assert lines[-1] == "again     check(attention, only='scale=0.0', lacks=['sinks'])"
    assert max(map(len, lines)) < 80


def test_report_as_json(report):
    def refuse(word):
        raise AssertionError(word)

    data = json.loads(report.json(), parse_constant=refuse)
    assert data == report.as_dict() and data["ok"] is False
    assert testing.Report.of(data) == report
    scale = next(x for x in data["clauses"] if x["clause"] == 2)
    assert (scale["name"], scale["verdict"], scale["case"], scale["fail"]) == ("scale", "fail", "scale=0.0", 1)
    assert {x["verdict"] for x in data["findings"]} == {"pass", "fail", "not asked"}
    assert len(data["findings"]) == len(report.findings) > 250


def top_left(q, k, v, *, causal=False):
    return flashlit.attention(q, k, v, causal=causal, align="top_left")


def vague(q, k, v, **options):
    return flashlit.attention(q, k, v, **options | {"softcap": None})


def adds_lse(parts):
    return flashlit.merge(*parts)[0], sum(lse for _, lse in parts)


def no_lse_gradient(q, k, v, *, causal=False, align=None, softcap=None):
    pair, pullback = flash_attention_vjp(q, k, v, causal=causal, align=align, softcap=softcap)
    return pair, lambda do, dlse=None: pullback(do)


AGAIN = {  # what is judged, and how it is asked
    "a layout": (flashlit.attention, dict(layout="bshd", lacks={"refusals", "grouped"})),
    "heads": (flashlit.attention, dict(layout="bs(hd)", heads=4, lacks={"refusals"})),
    "an alignment": (top_left, dict(causal_align="bottom_right")),
    "options by name": (vague, dict(supports={"softcap", "causal", "mask"}, lacks={"mask"})),
    "another type": (top_left, dict(lacks={"float64", "float8"})),
    "no name": (partial(flashlit.attention, scale=0.3), {}),
    "gradients": (no_lse_gradient, dict(kind="vjp", lacks={"float16"})),
    "merging": (adds_lse, dict(kind="merge")),
    "counting": (lambda n, m, *, causal=False: n * m, dict(kind="pairs")),
}


@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.filterwarnings("error")
def test_the_line_that_asks_again(name):
    """Pasted, it asks that case alone and finds the same."""
    fn, options = AGAIN[name]
    report = check(fn, **options)
    assert not report.ok and not any(x.again for x in report.findings if x.verdict != "fail")
    for x in {report.clause(n) for n in report.broken}:
        found = eval(x.again, {getattr(fn, "__name__", ""): fn, "fn": fn, "check": check}).findings
        assert x in found and {y.case for y in found} == {x.case}
        assert x.again in str(report) and x.again in [y["again"] for y in report.as_dict()["clauses"]]


def test_one_case_by_name():
    assert [x.case for x in check(flashlit.attention, only="sinks").findings] == ["sinks"]
    with pytest.raises(ValueError, match="only is the name of a case, not 'sink'"):
        check(flashlit.attention, only="sink")
    with pytest.raises(ValueError, match="only"):
        check(flashlit.merge, kind="merge", only="sinks")


def test_a_nan_in_the_report_is_still_json():
    json.loads(check(lambda q, k, v: q * NAN).json(), parse_constant=pytest.fail)


# An array for the output, and keys in pages.


def other_array(q, k, v, *, out=None):
    return flashlit.attention(q, k, v)


def copied(q, k, v, *, out=None):
    return flashlit.attention(q, k, v, out=out).copy()


def any_out(q, k, v, *, out=None):
    o = flashlit.attention(q, k, v)
    if out is not None and out.shape == o.shape:
        out[:] = o
        return out
    return o


@pytest.mark.parametrize("fn, case, expected", [
    (other_array, "out", "o in out, and out returned"),
    (copied, "out", "o in out, and out returned"),
    (any_out, "out of another type", "a ValueError or TypeError"),
    (any_out, "out too wide", "a ValueError or TypeError"),
])
def test_out(fn, case, expected):
    report = check(fn)
    assert report.broken == [13] and {x.case: x.expected for x in report.failures}[case] == expected


@wraps(decode_attention)
def paged(q, k, v, *, block_table=None, kv_lengths=None, how, **options):
    """decode_attention, with a fault where keys lie in pages."""
    if block_table is not None:
        block_table, kv_lengths, k, v = how(block_table, kv_lengths, k, v)
    return decode_attention(q, k, v, block_table=block_table, kv_lengths=kv_lengths, **options)


PAGED = {
    "right": lambda table, n, k, v: (table, n, k, v),
    "in the order of the pool": lambda table, n, k, v: (np.arange(6).reshape(2, 3), n, k, v),
    "pages sorted": lambda table, n, k, v: (np.sort(table), n, k, v),
    "whole pages": lambda table, n, k, v: (table, -(-n // 4) * 4, k, v),
    "lengths left out": lambda table, n, k, v: (table, None, k, v),
    "clipped": lambda table, n, k, v: (np.minimum(table, 7), n, k, v),
    "a nan spreads": lambda table, n, k, v: (table, n, k, v + 0 * v.sum()),
}


@pytest.mark.parametrize("name", PAGED)
def test_pages(name):
    with np.errstate(all="ignore"):
        report = check(wraps(decode_attention)(partial(paged, how=PAGED[name])))
    assert report.broken == ([] if name == "right" else [13])
    assert not any("lacks" in x.why for x in report.findings)


# Adapters.


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def test_torch(torch):
    def plain(q, k, v, *, mask=None, scale=None):
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        s = scale * (q.to(work) @ k.to(work).transpose(-1, -2))
        if mask is not None:
            s = s.masked_fill(~mask, -torch.inf)
        o, lse = torch.softmax(s, -1).to(v.dtype).to(work) @ v.to(work), torch.logsumexp(s, -1)
        return torch.where((lse == -torch.inf)[..., None], 0, o).to(q.dtype), lse

    report = check(from_torch(plain), lacks={"grouped", "refusals", "float8"})
    assert set(report.broken) <= {3, 8, 9}, str(report)
    verdicts = {x.case: x.verdict for x in report.findings}
    assert verdicts["bfloat16 in and out"] == verdicts["one row of a mask"] == "pass"
    assert verdicts["nan in a hidden v alone"] == "fail"


def test_torch_gradients(torch):
    def fn(q, k, v, *, scale=None):
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        leaves = [x.detach().to(work).requires_grad_() for x in (q, k, v)]
        s = (q.shape[-1] ** -0.5 if scale is None else scale) * (leaves[0] @ leaves[1].transpose(-1, -2))
        o, lse = torch.softmax(s, -1) @ leaves[2], torch.logsumexp(s, -1)

        def pullback(do, dlse=None):
            loss = (o * do.to(work)).sum() + (0 if dlse is None else (lse * dlse).sum())
            return tuple(x.to(q.dtype) for x in torch.autograd.grad(loss, leaves, retain_graph=True))

        return (o.detach().to(q.dtype), lse.detach()), pullback

    lacks = {"grouped", "refusals", "empty", "float8"}
    report = check(from_torch(fn), kind="vjp", lacks=lacks)
    assert report.ok, str(report)
    assert report.clause(16).verdict == "pass"


def test_torch_keeps_types(torch):
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        x = normal((3, 4), "float32").astype(DTYPES[name])
        y = from_torch(lambda t: (t, [t]))(x)
        assert y[0].dtype == x.dtype and y[0].tobytes() == y[1][0].tobytes() == x.tobytes()
    assert from_torch(lambda t, *, window: window)(x, window=(1, None)) == (1, None)


def test_torch_writes_where_the_judge_looks(torch):
    def fn(q, k, v, *, out=None):
        o = torch.from_numpy(flashlit.attention(q.numpy(), k.numpy(), v.numpy()))
        return o if out is None else out.copy_(o)

    def in_place(q, k, v):
        return fn(q.mul_(1), k.mul_(2).div_(2).add_(1).sub_(1), v)

    lacks = {"bfloat16", "float8", "refusals"}
    report = check(from_torch(fn), lacks=lacks)
    assert report.ok and report.name == "from_torch(fn)", str(report)
    assert {x.verdict for x in report.findings if x.case == "out"} == {"pass"}
    report = check(from_torch(in_place), lacks=lacks)
    assert any(x.got == "an input was written to" for x in report.failures)
    found = report.clause(13)
    assert found in eval(found.again, {"check": check, "from_torch": from_torch, "in_place": in_place}).findings


def test_torch_refuses_with_a_value_error(torch):
    with pytest.raises(ValueError):
        from_torch(torch.matmul)(np.ones((2, 3)), np.ones((2, 3)))


def test_jax_is_called_as_its_documentation_says(monkeypatch):
    """JAX is no test requirement: a stand-in with the two functions the adapter uses."""
    class Array:
        def __init__(self, x):
            self.x = x

        def __array__(self, dtype=None, copy=None):
            return self.x

    fake = SimpleNamespace(asarray=Array)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(numpy=fake))
    monkeypatch.setitem(sys.modules, "jax.numpy", fake)

    def fn(q, k, v):
        assert all(isinstance(x, Array) for x in (q, k, v))
        return Array(flashlit.attention(q.x, k.x, v.x))

    assert check(testing.from_jax(fn)).ok


# From a shell.

MODULE = """
from flashlit import attention, merge

def right(q, k, v, *, scale=None):
    return attention(q, k, v, scale=scale)

def wrong(q, k, v, *, scale=None):
    return attention(q, k, v, scale=scale or None)

def vague(q, k, v, **options):
    return attention(q, k, v, **options)

class Box:
    merge = staticmethod(merge)
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """A command line in a folder with a module of the user's: status, output, errors."""
    (tmp_path / "judged.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("raise RuntimeError('on import')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "judged", raising=False)

    def shell(line):
        status = main(line.split())
        return status, *capsys.readouterr()

    return shell


@pytest.mark.parametrize("line, status", [
    ("check judged:right", 0),
    ("check judged:wrong", 1),
    ("check judged:wrong --lacks scale", 0),
    ("check judged:vague --supports scale,causal,align", 0),
    ("check judged:vague --supports causal", 0),
    ("check judged:vague --supports causal --causal-align top_left --lacks refusals", 1),
    ("check judged:Box.merge --kind merge", 0),
    ("check judged:right --heads 2 --layout bhsd", 0),
    ("check judged:right --layout bshd --lacks refusals", 1),
])
def test_exit_status(shell, line, status):
    found, out, err = shell(line)
    assert (found, err) == (status, "") and out.splitlines()[0].endswith(("clauses", "clause"))


def test_json_from_a_shell(shell):
    status, out, err = shell("check judged:wrong --json")
    assert (status, err) == (1, "")
    data = json.loads(out)
    assert [x["clause"] for x in data["clauses"] if x["verdict"] == "fail"] == [2]
    assert shell("check judged:wrong --out report.txt")[:2] == (1, "")


def test_one_case_from_a_shell(shell):
    assert main(["check", "judged:wrong", "--only", "scale=0.0"]) == 1
    assert shell("check judged:wrong --only scale=0.3")[0] == 0


@pytest.mark.parametrize("line, words", [
    ("check", "module:function"),
    ("check judged:right --only scale=7", "name of a case"),
    ("check judged", "a colon"),
    ("check judged:nothing", "nothing"),
    ("check no_such_module:fn", "no_such_module"),
    ("check broken:fn", "on import"),
    ("check judged:vague", "say supports"),
    ("check judged:right --kind forward", "--kind"),
    ("check judged:right --layout hd", "--layout"),
    ("check judged:right --layout bs(hd)", "heads"),
    ("check judged:right --lacks gqa", "--lacks"),
    ("check judged:right --supports casual", "--supports"),
    ("check judged:right --causal-align middle", "--causal-align"),
    ("check judged:right --heads 0", "--heads"),
])
def test_usage_errors(shell, line, words):
    status, out, err = shell(line)
    assert (status, out) == (2, "") and words in err and len(err.splitlines()) == 1


# In a test suite.


def test_pytest(tmp_path):
    (tmp_path / "judged.py").write_text(MODULE)
    (tmp_path / "test_mine.py").write_text(
        "from flashlit.testing import pytest_clauses\n"
        "from judged import right, wrong\n"
        "test_right, test_wrong = pytest_clauses(right), pytest_clauses(wrong)\n"
        "class TestMine:\n"
        "    test_right, test_wrong = pytest_clauses(right), pytest_clauses(wrong, lacks={'float8'})\n"
    )
    words = "-m pytest -rA --color=no -p no:cacheprovider".split()
    out = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 1, out.stdout
    for where in ("", "::TestMine"):
        assert f"FAILED test_mine.py{where}::test_wrong[scale]" in out.stdout
        for name in ("test_right[scale]", "test_right[running maximum]", "test_wrong[running maximum]"):
            assert f"PASSED test_mine.py{where}::{name}" in out.stdout
    assert "again     check(wrong, only='scale=0.0')" in out.stdout
    assert "2 scale: scale=0.0" in out.stdout and "expected  o = 0" in out.stdout
    assert out.stdout.count("\nFAILED") == 2 and "lacks sinks" in out.stdout


def test_pytest_needs_no_more_than_a_name():
    fn = pytest_clauses(flashlit.merge, kind="merge")
    fn(15)
    with pytest.raises(pytest.skip.Exception, match="not a question of kind merge"):
        fn(1)


# what a judge must not let through


def test_a_kernel_that_leaves_the_process_is_at_fault():
    def leaves(q, k, v):
        sys.exit(0)

    report = testing.check(leaves)
    assert not report.ok and "SystemExit" in report.failures[0].got


def test_a_kernel_that_hands_out_one_buffer_is_at_fault():
    rooms = {}

    def one_buffer(q, k, v):
        o = flashlit.attention(q, k, v)
        room = rooms.setdefault((o.shape, o.dtype), o)
        room[...] = o
        return room

    assert testing.check(one_buffer).broken == [14]


@pytest.mark.parametrize("heads", [2.5, 0, -2, "4", True])
def test_heads_are_an_integer(heads):
    with pytest.raises(ValueError, match="heads is an integer >= 1"):
        testing.check(flashlit.attention, heads=heads)


def test_some_type_must_be_left():
    with pytest.raises(ValueError, match="lacks leaves no type"):
        testing.check(flashlit.attention, lacks={"float64", "float32", "float16", "bfloat16"})


def test_a_misspelt_case_is_an_error():
    with pytest.raises(ValueError, match="'nope'"):
        list(testing.adversarial_inputs("nope"))


WRONG_AT = {  # a fault that shows under one condition alone
    "head_dim above 64": lambda q, x: q.shape[-1] > 64,
    "more than 512 rows": lambda q, x: q.shape[-2] > 512,
    "softcap and key lengths": lambda q, x: "softcap" in x and "kv_lengths" in x,
    "sinks in packed sequences": lambda q, x: "sinks" in x and "cu_seqlens_q" in x,
    "scale and causal": lambda q, x: "scale" in x and x.get("causal"),
    "sinks in float16": lambda q, x: "sinks" in x and q.dtype == np.float16,
    "window in bfloat16": lambda q, x: "window" in x and q.dtype.name == "bfloat16",
    "bias and key lengths": lambda q, x: "bias" in x and "kv_lengths" in x,
}


@pytest.mark.parametrize("when", WRONG_AT)
def test_a_fault_in_one_combination_is_found(when):
    @wraps(flashlit.flash_attention)
    def wrong(q, k, v, **options):
        got = flashlit.flash_attention(q, k, v, **options)
        o = got[0] if isinstance(got, tuple) else got
        if WRONG_AT[when](q, options):
            o += o.dtype.type(1)
        return got

    assert not testing.check(wrong).ok


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_how_much_one_number_may_be_off(dtype):
    """Two units in the last place of the largest pass even where plain attention is exact; ten do not."""
    truth = np.full((1, 1, 1, 4), 1.0, np.longdouble)
    low, step = truth.astype(DTYPES[dtype]), cases.EPS[dtype]
    testing._compare("o", (truth + 2 * step).astype(low.dtype), truth, low, dtype)
    off = (truth + max(10 * step, 3e-14)).astype(low.dtype)
    with pytest.raises(testing._Fault):
        testing._compare("o", off, truth, low, dtype)
