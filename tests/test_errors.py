"""What a call may not look like: one exception that says what came and what is allowed."""
import re

import numpy as np
import pytest

from flashlit.model import estimate
from flashlit.roofline import DEVICES, Device, attainable, peak, ridge
from flashlit.scores import Band, pairs
from flashlit.traffic import Problem, flash_bytes, flops, standard_bytes
from flashlit.variants import alibi_bias, alibi_slopes
from helpers import DTYPES, FEW, merge, naive, normal, qkv, same, strict, tiled

every_path = pytest.mark.parametrize("path", FEW.values(), ids=FEW)
N, M = 3, 5


def refuses(error, words, call, *args, **options):
    """The call raises error (or one of them), and says all the words on one line."""
    errors = error if isinstance(error, tuple) else (error,)
    with pytest.raises(errors) as caught:
        strict(call)(*args, **options)
    message = str(caught.value)
    assert caught.type in errors
    assert "\n" not in message
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}", message), f"{word!r} is not in {message!r}"


def each(table):
    """The names of a table as cases."""
    return pytest.mark.parametrize("name", table)


class Torchlike:
    """Has a shape and a type, and is no array."""

    shape, dtype, ndim = (M, 4), np.dtype(np.float64), 2


# name: (exception, words of the message, what is changed)
ROWS, KEYS = np.zeros((N, 4)), np.zeros((M, 4))
BAD = {
    # shapes (clauses 1 and 7)
    "no axes": (ValueError, ["q", "()", "seq"], {"q": np.float64(1)}),
    "one axis": (ValueError, ["k", "(4,)", "seq"], {"k": np.zeros(4)}),
    "head_dim differs": (ValueError, ["head_dim", "(3, 6)", "(5, 4)"], {"q": np.zeros((N, 6))}),
    "head_dim 0": (ValueError, ["head_dim", "(3, 0)"], {"q": ROWS[:, :0], "k": KEYS[:, :0]}),
    "k and v differ in length": (ValueError, ["length", "(6, 4)"], {"v": np.zeros((6, 4))}),
    "k and v differ in heads": (
        ValueError, ["heads", "(2, 5, 4)", "(3, 5, 4)"],
        {"q": np.zeros((6, N, 4)), "k": np.zeros((2, M, 4)), "v": np.zeros((3, M, 4))},
    ),
    "heads do not divide": (
        ValueError, ["divides", "(5, 3, 4)", "(2, 5, 4)"],
        {"q": np.zeros((5, N, 4)), "k": np.zeros((2, M, 4)), "v": np.zeros((2, M, 4))},
    ),
    "more kv_heads than heads": (
        ValueError, ["divides", "(2, 5, 4)"], {"k": np.zeros((2, M, 4)), "v": np.zeros((2, M, 4))},
    ),
    "batches do not broadcast": (
        ValueError, ["broadcast", "(2, 1, 3, 4)", "(3, 1, 5, 4)"],
        {"q": np.zeros((2, 1, N, 4)), "k": np.zeros((3, 1, M, 4))},
    ),
    # types (clause 11)
    "None": (TypeError, ["q", "object"], {"q": None}),
    "v is None": (TypeError, ["v", "object"], {"v": None}),
    "integers": (TypeError, ["float32", "int64"], {x: np.zeros((4, 4), int) for x in "qkv"}),
    "lists of integers": (TypeError, ["float32", "int64"], {x: [[1, 2], [3, 4]] for x in "qkv"}),
    "booleans": (TypeError, ["float32", "bool"], {x: np.zeros((4, 4), bool) for x in "qkv"}),
    "complex": (TypeError, ["float32", "complex128"], {x: np.zeros((4, 4), complex) for x in "qkv"}),
    "objects": (TypeError, ["float32", "object"], {x: np.zeros((4, 4), object) for x in "qkv"}),
    "long doubles": (TypeError, ["float64"], {x: np.zeros((4, 4), np.longdouble) for x in "qkv"}),
    "words": (TypeError, ["float32", "str"], {x: np.array([["a"]]) for x in "qkv"}),
    "dates": (TypeError, ["float32", "datetime64"], {x: np.zeros((4, 4), "M8[s]") for x in "qkv"}),
    "torch-like": (TypeError, ["k", "object"], {"k": Torchlike()}),
    "ragged lists": (ValueError, ["q"], {"q": [[1.0, 2.0], [3.0]]}),
    "mixed": (TypeError, ["type", "float32", "float64"], {"q": ROWS.astype(np.float32)}),
    "mixed small": (TypeError, ["type", "float16"], {"v": KEYS.astype(np.float16)}),
    "masked array q": (TypeError, ["q", "mask"], {"q": np.ma.zeros((N, 4))}),
    "masked array v": (TypeError, ["v", "mask"], {"v": np.ma.zeros((M, 4))}),
    # scale and softcap (clause 2 and the doors)
    "scale nan": (ValueError, ["scale", "finite", "nan"], {"scale": np.nan}),
    "scale inf": (ValueError, ["scale", "finite", "inf"], {"scale": -np.inf}),
    "scale word": (TypeError, ["scale", "number", "'half'"], {"scale": "half"}),
    "scale digits": (TypeError, ["scale", "number", "'2'"], {"scale": "2"}),
    "scale array": (TypeError, ["scale", "number"], {"scale": np.ones(2)}),
    "scale list": (TypeError, ["scale", "number"], {"scale": [1.0]}),
    "scale bool": (TypeError, ["scale", "True"], {"scale": True}),
    "scale complex": (TypeError, ["scale", "number"], {"scale": 1j}),
    "scale beyond floats": (ValueError, ["scale", "finite"], {"scale": 10**400}),
    "softcap 0": (ValueError, ["softcap", "0", "None", "FlashAttention", "ONNX"], {"softcap": 0}),
    "softcap -1": (ValueError, ["softcap", "> 0", "-1"], {"softcap": -1}),
    "softcap inf": (ValueError, ["softcap", "finite", "inf"], {"softcap": np.inf}),
    "softcap nan": (ValueError, ["softcap", "finite", "nan"], {"softcap": np.nan}),
    "softcap word": (TypeError, ["softcap", "'off'"], {"softcap": "off"}),
    "softcap bool": (TypeError, ["softcap", "True"], {"softcap": True}),
    # mask and bias (clause 4)
    "integer mask": (TypeError, ["mask", "bool", "bias", "int64"], {"mask": np.ones((N, M), int)}),
    "floating mask": (TypeError, ["mask", "bool", "bias", "float64"], {"mask": np.zeros((N, M))}),
    "list of integers as mask": (TypeError, ["mask", "bool", "int64"], {"mask": [1, 0, 1, 1, 0]}),
    "masked array mask": (TypeError, ["mask", "masked"], {"mask": np.ma.ones((N, M), bool)}),
    "mask too long": (ValueError, ["mask", "(6,)", "(3, 5)"], {"mask": np.ones(M + 1, bool)}),
    "mask enlarges": (ValueError, ["mask", "(2, 3, 5)", "(3, 5)"], {"mask": np.ones((2, N, M), bool)}),
    "boolean bias": (TypeError, ["bias", "bool"], {"bias": np.ones((N, M), bool)}),
    "integer bias": (TypeError, ["bias", "int64"], {"bias": np.ones((N, M), int)}),
    "half bias": (TypeError, ["bias", "float16", "float64"], {"bias": np.ones((N, M), np.float16)}),
    "complex bias": (TypeError, ["bias", "complex128"], {"bias": np.ones((N, M), complex)}),
    "bias too long": (ValueError, ["bias", "(4, 5)", "(3, 5)"], {"bias": np.ones((4, M))}),
    "bias enlarges": (ValueError, ["bias", "(1, 3, 5)", "(3, 5)"], {"bias": np.ones((1, N, M))}),
    # causal and align (clause 5)
    "causal unsaid": (
        ValueError,
        ["align", "bottom_right", "top_left", "FlashAttention", "PyTorch", "JAX", "ONNX", "seq_q=3", "seq_kv=5"],
        {"causal": True},
    ),
    "window unsaid": (ValueError, ["align", "bottom_right", "top_left"], {"window": (1, 1)}),
    "align word": (ValueError, ["align", "top_left", "'left'"], {"causal": True, "align": "left"}),
    "align fraction": (ValueError, ["align", "integer", "1.5"], {"causal": True, "align": 1.5}),
    "align array": (ValueError, ["align", "integer"], {"causal": True, "align": np.array([1, 2])}),
    "align bool": (ValueError, ["align", "True"], {"causal": True, "align": True}),
    "causal is a number": (TypeError, ["causal", "True or False", "1"], {"causal": 1}),
    "causal is a word": (TypeError, ["causal", "'yes'"], {"causal": "yes"}),
    "causal is None": (TypeError, ["causal", "None"], {"causal": None}),
    # window (clause 6)
    "window -1": (ValueError, ["window", "-1", "unbounded", "None"], {"window": (-1, 0), "align": 0}),
    "window right -2": (ValueError, ["window", "-2", "None"], {"window": (None, -2), "align": 0}),
    "window a number": (ValueError, ["window", "(left, right)", "3"], {"window": 3, "align": 0}),
    "window of three": (ValueError, ["window", "(left, right)"], {"window": (1, 2, 3), "align": 0}),
    "window fraction": (TypeError, ["window", "integers", "1.5"], {"window": (1.5, 0), "align": 0}),
    "window bool": (TypeError, ["window", "True"], {"window": (True, 0), "align": 0}),
    "window word": (ValueError, ["window", "'ab'"], {"window": "ab", "align": 0}),
    # key lengths (clauses 5 and 6)
    "lengths of fractions": (TypeError, ["kv_lengths", "integers", "float64"], {"kv_lengths": 2.5}),
    "lengths of booleans": (TypeError, ["kv_lengths", "integers", "bool"], {"kv_lengths": True}),
    "lengths too long": (ValueError, ["kv_lengths", "seq_kv=5", "6"], {"kv_lengths": 6}),
    "lengths below 0": (ValueError, ["kv_lengths", "0 to seq_kv=5", "-1"], {"kv_lengths": -1}),
    "lengths of a batch": (ValueError, ["kv_lengths", "batch entry", "(2,)", "()"], {"kv_lengths": [2, 3]}),
    "lengths and causal, unsaid": (
        ValueError, ["align", "kv_lengths", "bottom_right", "FlashAttention", "JAX", "ONNX"],
        {"q": np.zeros((M, 4)), "kv_lengths": M, "causal": True},
    ),
    "lengths and window, unsaid": (ValueError, ["align", "kv_lengths"], {"kv_lengths": 2, "window": (1, 1)}),
    # sinks (clause 17)
    "sinks of two heads": (ValueError, ["sinks", "(1,)", "(2,)"], {"sinks": np.zeros(2)}),
    "one sink for all": (ValueError, ["sinks", "(1,)", "()"], {"sinks": 0.5}),
    "integer sinks": (TypeError, ["sinks", "float64", "int64"], {"sinks": [1]}),
    "half sinks": (TypeError, ["sinks", "float16"], {"sinks": np.zeros(1, np.float16)}),
    "masked array sinks": (TypeError, ["sinks", "masked"], {"sinks": np.ma.zeros(1)}),
    # packed sequences (clause 18)
    "one offset": (ValueError, ["cu_seqlens_q", "cu_seqlens_kv", "together"], {"cu_seqlens_q": [0, N]}),
    "offsets and lengths": (
        ValueError, ["kv_lengths", "cu_seqlens", "exclude"],
        {"cu_seqlens_q": [0, N], "cu_seqlens_kv": [0, M], "kv_lengths": M},
    ),
    "offsets of fractions": (
        TypeError, ["cu_seqlens_q", "integers", "float64"], {"cu_seqlens_q": [0.0, N], "cu_seqlens_kv": [0, M]},
    ),
    "offsets from 1": (ValueError, ["cu_seqlens_q", "0 to 3", "[1, 3]"], {"cu_seqlens_q": [1, N], "cu_seqlens_kv": [0, M]}),
    "offsets too short": (ValueError, ["cu_seqlens_kv", "0 to 5", "[0, 4]"], {"cu_seqlens_q": [0, N], "cu_seqlens_kv": [0, 4]}),
    "offsets that fall": (
        ValueError, ["cu_seqlens_kv", "rise", "[0, 4, 2, 5]"],
        {"cu_seqlens_q": [0, 1, 2, N], "cu_seqlens_kv": [0, 4, 2, M]},
    ),
    "offsets of two axes": (ValueError, ["cu_seqlens_q", "offsets"], {"cu_seqlens_q": [[0, N]], "cu_seqlens_kv": [0, M]}),
    "no offsets": (TypeError, ["cu_seqlens_q", "integers"], {"cu_seqlens_q": [], "cu_seqlens_kv": [0, M]}),
    "offsets of more texts": (ValueError, ["2", "1"], {"cu_seqlens_q": [0, 1, N], "cu_seqlens_kv": [0, M]}),
    "packed in a batch": (
        ValueError, ["batch", "(2, 1)"],
        {"q": np.zeros((2, 1, N, 4)), "cu_seqlens_q": [0, N], "cu_seqlens_kv": [0, M]},
    ),
    "packed, causal, unsaid": (
        ValueError, ["align", "seq_q=1", "seq_kv=2"],
        {"cu_seqlens_q": [0, 1, N], "cu_seqlens_kv": [0, 2, M], "causal": True},
    ),
}  # fmt: skip


@each(BAD)
@every_path
def test_bad_call(path, name):
    error, words, changed = BAD[name]
    q, k, v = qkv(N, M)
    out = np.full((N, 4), 9.0)
    refuses(error, words, path, **({"q": q, "k": k, "v": v, "out": out} | changed))
    assert (out == 9).all()


BAD_OUT = {
    "shape": (ValueError, ["out", "(3, 4)", "(4, 3)"], lambda q, k, v: np.full((4, 3), 9.0)),
    "more axes": (ValueError, ["out", "(3, 4)", "(1, 3, 4)"], lambda q, k, v: np.full((1, 3, 4), 9.0)),
    "type": (ValueError, ["out", "float64", "float32"], lambda q, k, v: np.full((3, 4), 9, np.float32)),
    "integers": (ValueError, ["out", "float64", "int64"], lambda q, k, v: np.full((3, 4), 9)),
    "q itself": (ValueError, ["out", "memory"], lambda q, k, v: q),
    "part of k": (ValueError, ["out", "memory"], lambda q, k, v: k[2:]),
    "v backwards": (ValueError, ["out", "memory"], lambda q, k, v: v[::-2]),
    "a list": (TypeError, ["out", "list"], lambda q, k, v: [[9.0] * 4] * 3),
    "a number": (TypeError, ["out", "float"], lambda q, k, v: 9.0),
}


@each(BAD_OUT)
@every_path
def test_bad_out(path, name):
    error, words, make = BAD_OUT[name]
    q, k, v = qkv(N, M)
    out = make(q, k, v)
    before = np.array(out).tobytes()
    refuses(error, words, path, q, k, v, out=out)
    assert np.array(out).tobytes() == before


@every_path
def test_read_only_out(path):
    out = np.full((N, 4), 9.0)
    out.flags.writeable = False
    refuses(ValueError, ["out", "read-only"], path, *qkv(N, M), out=out)
    assert (out == 9).all()


@every_path
def test_out_over_mask_or_bias(path):
    q, k, v = qkv(4, 4)
    bias = normal((4, 4))
    refuses(ValueError, ["out", "memory"], path, q, k, v, bias=bias, out=bias)


@pytest.mark.parametrize("name", ["block_q", "block_kv"])
@pytest.mark.parametrize("size", [0, -1, 1.5, 2.0, True, "16", (2,)])
def test_bad_block(name, size):
    refuses(ValueError if type(size) is int else TypeError, [name, ">= 1", repr(size)], tiled, *qkv(N, M), **{name: size})


@pytest.mark.parametrize("number", [np.int8(2), np.int64(2), np.uint16(2), 10**30])
def test_integers_of_any_kind_are_welcome(number):
    q, k, v = qkv(N, M)
    tiled(q, k, v, causal=True, align=number, window=(number, number), block_q=number, block_kv=number)


@pytest.mark.parametrize("half", [np.float16(0.5), np.float32(0.5), np.array(0.5), np.longdouble(0.5)])
@every_path
def test_numbers_of_any_kind_are_welcome(path, half):
    q, k, v = qkv(N, M)
    same([path(q, k, v, scale=half, softcap=half)], [path(q, k, v, scale=0.5, softcap=0.5)])


def test_nothing_beyond_q_k_v_is_positional():
    for path in (naive, tiled):
        with pytest.raises(TypeError):
            path(*qkv(N, M), None)


# merge

PART = np.zeros((2, 3)), np.zeros(2)
BAD_MERGE = {
    "nothing": (ValueError, ["at least one"], []),
    "o, lse": (TypeError, ["pairs", "ndarray"], PART),
    "a triple": (TypeError, ["pairs"], [(*PART, 1)]),
    "None": (TypeError, ["pairs", "NoneType"], [None]),
    "lse with a last axis": (ValueError, ["lse", "(2, 3)", "(2, 1)"], [(PART[0], np.zeros((2, 1)))]),
    "two shapes": (ValueError, ["shape", "(2, 3)", "(2, 4)"], [PART, (np.zeros((2, 4)), PART[1])]),
    "shapes that broadcast": (ValueError, ["shape", "(1, 3)"], [PART, (np.zeros((1, 3)), np.zeros(1))]),
    "two types": (ValueError, ["type", "float32"], [PART, (np.zeros((2, 3), np.float32), PART[1])]),
    "half lse": (TypeError, ["lse", "float16"], [(PART[0], np.zeros(2, np.float16))]),
    "integer lse": (TypeError, ["lse", "int64"], [(PART[0], np.zeros(2, int))]),
    "integer o": (TypeError, ["o", "int64"], [(np.zeros((2, 3), int), PART[1])]),
    "complex o": (TypeError, ["o", "complex128"], [(np.zeros((2, 3), complex), PART[1])]),
    "object o": (TypeError, ["o", "object"], [(np.zeros((2, 3), object), PART[1])]),
    "masked o": (TypeError, ["o", "masked"], [(np.ma.zeros((2, 3)), PART[1])]),
}


@each(BAD_MERGE)
def test_bad_merge(name):
    error, words, parts = BAD_MERGE[name]
    refuses(error, words, merge, *parts)


# the cost model

BAD_PROBLEM = {
    "no length": (TypeError, ["seq_len", "seq_q", "seq_kv"], {}),
    "half a length": (TypeError, ["seq_q", "seq_kv"], {"seq_q": 4}),
    "two lengths": (TypeError, ["seq_len"], {"seq_len": 4, "seq_q": 5}),
    "negative length": (ValueError, ["seq_len", ">= 0", "-1"], {"seq_len": -1}),
    "a length is nan": (ValueError, ["seq_len", "finite", "nan"], {"seq_len": np.nan}),
    "a length is inf": (ValueError, ["seq_len", "finite", "inf"], {"seq_len": np.inf}),
    "one of many": (ValueError, ["seq_len", ">= 0"], {"seq_len": np.array([4, -1])}),
    "two of very many": (ValueError, ["seq_len", ">= 0"], {"seq_len": np.arange(-2, 5000) / 3}),
    "a word": (TypeError, ["seq_len", "number", "'8k'"], {"seq_len": "8k"}),
    "a bool": (TypeError, ["seq_len", "True"], {"seq_len": True}),
    "complex": (TypeError, ["seq_len", "number"], {"seq_len": 1j}),
    "batch 0": (ValueError, ["batch", ">= 1", "0"], {"seq_len": 4, "batch": 0}),
    "heads 0": (ValueError, ["heads", ">= 1", "0"], {"seq_len": 4, "heads": 0}),
    "kv_heads 0": (ValueError, ["kv_heads", ">= 1", "0"], {"seq_len": 4, "kv_heads": 0}),
    "kv_heads do not divide": (
        ValueError, ["kv_heads", "3", "heads", "4"], {"seq_len": 4, "heads": 4, "kv_heads": 3},
    ),
    "head_dim 0": (ValueError, ["head_dim", ">= 1", "0"], {"seq_len": 4, "head_dim": 0}),
    "head_dim half": (ValueError, ["head_dim", "whole", "1.5"], {"seq_len": 4, "head_dim": 1.5}),
    "head_dim None": (TypeError, ["head_dim", "None"], {"seq_len": 4, "head_dim": None}),
    "value_dim -1": (ValueError, ["value_dim", ">= 0", "-1"], {"seq_len": 4, "value_dim": -1}),
    "block_q 0": (ValueError, ["block_q", ">= 1", "0"], {"seq_len": 4, "block_q": 0}),
    "block_kv -2": (ValueError, ["block_kv", ">= 1", "-2"], {"seq_len": 4, "block_kv": -2}),
    "dtype": (ValueError, ["dtype", "bf16", "'int8'"], {"seq_len": 4, "dtype": "int8"}),
    "dtype None": (ValueError, ["dtype", "bf16", "None"], {"seq_len": 4, "dtype": None}),
    "dtype a list": ((TypeError, ValueError), ["dtype"], {"seq_len": 4, "dtype": ["bf16"]}),
    "no align": (
        ValueError, ["align", "bottom_right", "top_left"], {"seq_q": 4, "seq_kv": 5, "causal": True},
    ),
    "window -1": (ValueError, ["window", "-1", "None"], {"seq_len": 4, "window": (-1, 0)}),
    "causal 1": (TypeError, ["causal", "True or False"], {"seq_len": 4, "causal": 1}),
}  # fmt: skip


@each(BAD_PROBLEM)
def test_bad_problem(name):
    error, words, options = BAD_PROBLEM[name]
    refuses(error, words, Problem, **options)


BAND_WORDS = [
    (ValueError, ["align", "seq_q=3", "seq_kv=5"], {"causal": True}),
    (ValueError, ["align", "'left'"], {"causal": True, "align": "left"}),
    (ValueError, ["window", "-1"], {"window": (-1, 0), "align": 0}),
    (ValueError, ["window", "(left, right)"], {"window": 3, "align": 0}),
    (TypeError, ["window", "1.5"], {"window": (1.5, 0), "align": 0}),
    (TypeError, ["causal", "1"], {"causal": 1}),
]


@pytest.mark.parametrize("error, words, options", BAND_WORDS)
def test_bad_band(error, words, options):
    refuses(error, words, Band(**options).diagonals, N, M)
    refuses(error, words, pairs, N, M, **options)


@pytest.mark.parametrize("n", [-1, np.nan, np.inf, None, "4", True])
def test_bad_pairs(n):
    error = TypeError if n is None or isinstance(n, (str, bool)) else ValueError
    refuses(error, ["seq_q", ">= 0"], pairs, n, 4)
    if n is not None:
        refuses(error, ["seq_kv", ">= 0"], pairs, 4, n)


def test_bad_conventions():
    p = Problem(8, causal=True)
    refuses(ValueError, ["causal", "exact", "half", "dense", "'all'"], flops, p, "all")
    refuses(ValueError, ["causal", "exact", "'all'"], standard_bytes, p, causal="all")
    refuses(ValueError, ["order", "queries", "keys", "'rows'"], flash_bytes, p, "rows")
    refuses(ValueError, ["half", "window", "exact"], flops, Problem(8, causal=True, window=(1, 0)), "half")


@pytest.mark.parametrize("name", ["h1000", "", None, 3, ("h100-sxm",)])
def test_unknown_device(name):
    refuses(KeyError, ["device", "h100-sxm", "seed", repr(name)], DEVICES.__getitem__, name)


def test_figures_that_are_not_known():
    p, bare = Problem(8), Device(name="bare", peak=None, bandwidth=1e9)
    refuses(ValueError, ["peak", "bare", "not known"], ridge, bare)
    refuses(ValueError, ["sram", "bare"], estimate, p, bare)
    slow = Device(name="slow", peak=1e12, bandwidth=None)
    refuses(ValueError, ["bandwidth", "slow"], attainable, 3.0, slow)
    refuses(ValueError, ["fp64", "bf16"], peak, DEVICES["h100-sxm"], "fp64")


@pytest.mark.parametrize("n", [0, np.array([4, 0])])
def test_estimate_needs_tokens(n):
    refuses(ValueError, ["length", "1"], estimate, Problem(n), DEVICES["seed"])


@pytest.mark.parametrize("dtype", DTYPES)
@every_path
def test_no_type_is_refused_by_name_only(path, dtype):
    path(*qkv(N, M, dtype=dtype), bias=normal((N, M), dtype))


def test_out_that_cannot_be_written_as_meant():
    q, k, v = qkv(2, 2, d=1)
    once = np.lib.stride_tricks.as_strided(np.zeros(1), (2, 1), (0, 8))
    masked = np.ma.array(np.zeros((2, 1)), mask=True, hard_mask=True)
    for out, word in ((once, "share memory"), (masked, "masked")):
        refuses(ValueError, ["out"], tiled, q, k, v, out=out)
        with pytest.raises(ValueError, match=word):
            tiled(q, k, v, out=out)


@pytest.mark.parametrize("given", ["no", 1, None])
def test_return_lse_is_true_or_false(given):
    refuses(TypeError, ["return_lse"], naive, *qkv(2, 2), return_lse=given)


@every_path
def test_out_whose_rows_overlap(path):
    q, k, v = qkv(4, 4)
    room = np.zeros(64)
    out = np.lib.stride_tricks.as_strided(room, (4, 4), (16, 8))
    refuses(ValueError, ["out", "share memory"], path, q, k, v, out=out)
    assert not room.any()


@every_path
@pytest.mark.parametrize("lead, n", [((1, 1), 0), ((3, 1), 0), ((0, 2), 4)])
def test_out_that_is_empty(path, lead, n):
    """It has no entries, so none of them share memory."""
    q, k, v = (normal((*lead, m, d)) for m, d in ((n, 1), (3, 1), (3, 2)))
    out = np.empty((*lead, n, 2))
    assert path(q, k, v, out=out) is out


BAD_ALIBI = {
    "heads": (TypeError, ["heads", "[4]"], lambda: alibi_slopes([4])),
    "no heads": (TypeError, ["heads", "0"], lambda: alibi_slopes(0)),
    "slopes of one number": (ValueError, ["slopes", "(heads,)"], lambda: alibi_bias(0.5, 3, 3)),
    "slope nan": (ValueError, ["slopes", "finite"], lambda: alibi_bias([np.nan], 3, 3)),
    "shift word": (TypeError, ["shift", "'top_left'"], lambda: alibi_bias([0.5], 3, 3, "top_left")),
    "part of a row": (ValueError, ["seq_q", "3.5"], lambda: alibi_bias([0.5], 3.5, 3)),
    "fewer than no rows": (ValueError, ["seq_q", "-1"], lambda: alibi_bias([0.5], -1, 3)),
}


@each(BAD_ALIBI)
def test_bad_alibi(name):
    error, words, call = BAD_ALIBI[name]
    refuses(error, words, call)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "sinks"])
@every_path
def test_out_over_any_input(path, name):
    given = dict(zip("qkv", (x.copy() for x in qkv(4, 4, lead=(4,)))))
    given |= {"mask": np.ones((4, 4), bool), "bias": np.zeros((4, 4)), "sinks": np.zeros(4)}
    room = np.ones((4, 4, 4))
    shape = given[name].shape
    view = room.view(bool)[0, 0, :16].reshape(4, 4) if name == "mask" else room[(0,) * (3 - len(shape))]
    refuses(ValueError, ["out", "shares memory"], path, **(given | {name: view}), out=room)
