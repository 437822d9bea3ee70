"""What crosses the memory, metered, against the formulas; and the formulas by themselves."""
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlit.hbm import HBM, Meter
from flashlit.model import estimate, profile, verdict
from flashlit.roofline import DEVICES, Device, peak, ridge, si
from flashlit.scores import Diagonals, pairs
from flashlit.tiled import flash_attention_1
from flashlit.traffic import (
    Problem, compulsory_bytes, flash_bytes, flops, largest_block, lower_bound, paper_blocks, score_count,
    standard_bytes, tile_bytes,
)  # fmt: skip
from flashlit.variants import TileCounts, tile_counts
from helpers import DTYPES, agree, naive, qkv, same, strict, tiled
from oracle import oracle, visible
from test_properties import BANDS

NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
FP8 = {"fp8": "float8_e4m3fn"}


def metered(path, q, k, v, **options):
    """The meter after one call, and the call's results out of their memory."""
    meter = Meter()
    q, k, v = (HBM(x, meter, name) for x, name in zip((q, k, v), "QKV"))
    got = path(q, k, v, **options)
    got = got if isinstance(got, tuple) else (got,)
    return meter, [x._array for x in got]


@st.composite
def problems(draw, dtypes=tuple(NAMES)):
    """A Problem small enough to run."""
    size, tile = st.integers(0, 12), st.integers(1, 15)
    kv_heads = draw(st.integers(1, 2))
    return Problem(
        seq_q=draw(size), seq_kv=draw(size), batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)), kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 4)), value_dim=draw(st.integers(0, 4)),
        dtype=draw(st.sampled_from(dtypes)), block_q=draw(tile), block_kv=draw(tile), **draw(BANDS),
    )  # fmt: skip


def arrays(p):
    """q, k and v of a problem."""
    lead, kv_lead = (p.batch, p.heads), (p.batch, p.kv_heads)
    return qkv(p.seq_q, p.seq_kv, p.head_dim, p.value_dim, lead, kv_lead, (NAMES | FP8)[p.dtype])


def band(p):
    return {"causal": p.causal, "window": p.window, "align": p.align}


def blocks(p):
    return {"block_q": p.block_q, "block_kv": p.block_kv}


# the meter and the formula


@given(problems(), st.booleans())
def test_tiled(p, lse):
    meter, got = metered(tiled, *arrays(p), return_lse=lse, **band(p), **blocks(p))
    assert meter.total == flash_bytes(p, lse=lse)
    assert not meter.read.keys() & {"O", "lse"} and not meter.written.keys() & {"Q", "K", "V"}
    want = tiled(*arrays(p), return_lse=lse, **band(p), **blocks(p))
    same(got, want if lse else [want])


@given(problems(), st.booleans())
def test_naive(p, lse):
    meter, got = metered(naive, *arrays(p), return_lse=lse, **band(p))
    score_item = 8 if p.dtype == "fp64" else 4  # S and P are kept in the working type
    assert meter.total == standard_bytes(p, score_item=score_item, lse=lse)
    scores = score_item * p.batch * p.heads * int(visible(p.seq_q, p.seq_kv, **band(p)).sum())
    for name in "SP":
        assert meter.read[name] == meter.written[name] == scores
    want = naive(*arrays(p), return_lse=lse, **band(p))
    same(got, want if lse else [want])


def walk_keys_outside(p):
    """Bytes of FlashAttention-1's loop, tile by tile, for one kv head."""
    shown, state = visible(p.seq_q, p.seq_kv, **band(p)), 8 if p.dtype == "fp64" else 4
    d, dv, met, total = p.head_dim, p.value_dim, set(), 0
    group = p.heads // p.kv_heads
    for j in range(0, p.seq_kv, p.block_kv):
        total += min(p.block_kv, p.seq_kv - j) * (d + dv) * p.item  # K and V
        for i in range(0, p.seq_q, p.block_q):
            if shown[i : i + p.block_q, j : j + p.block_kv].any():
                rows, again = min(p.block_q, p.seq_q - i), i in met
                total += group * rows * (d * p.item + (1 + again) * (dv * p.item + state))
                met.add(i)
    unseen = sum(min(p.block_q, p.seq_q - i) for i in range(0, p.seq_q, p.block_q) if i not in met)
    return total + group * unseen * (dv * p.item + state)


@given(problems(dtypes=["fp64", "fp32", "bf16", "fp8"]))
def test_keys_outside(p):
    assert flash_bytes(p, order="keys") == p.batch * p.kv_heads * walk_keys_outside(p)


@given(problems())
def test_keys_outside_metered(p):
    meter, got = metered(strict(flash_attention_1), *arrays(p), **band(p), **blocks(p))
    assert meter.total == flash_bytes(p, order="keys")
    if p.dtype == "fp64":
        agree(got, oracle(*arrays(p), **band(p)))


@given(problems(dtypes=["fp8"]), st.booleans())
def test_8_bit_inputs(p, lse):
    """Q, K and V are read byte by byte; O is written in float32."""
    q, k, v = arrays(p)
    meter, _ = metered(tiled, q, k, v, return_lse=lse, **band(p), **blocks(p))
    o = p.batch * p.heads * p.seq_q * p.value_dim
    assert meter.total - meter.written["O"] == flash_bytes(p, lse=lse) - o and meter.written["O"] == 4 * o


# key lengths, packed sequences, and the tiles of scores


@st.composite
def several(draw, dtypes=("fp64", "bf16")):
    """A Problem of several lengths, and the arrays and the options of the one call it stands for."""
    p = draw(problems(dtypes))
    if draw(st.booleans()):
        real = np.array([draw(st.integers(0, p.seq_kv)) for _ in range(p.batch)])
        return replace(p, batch=1, seq_kv=real, seq_q=np.full(p.batch, p.seq_q)), arrays(p), {"kv_lengths": real}
    sizes = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=4))
    n, m = np.array(sizes).T
    cu = [[0, *np.cumsum(x)] for x in (n, m)]
    whole = [x[0] for x in arrays(replace(p, batch=1, seq_q=cu[0][-1], seq_kv=cu[1][-1]))]
    return replace(p, batch=1, seq_q=n, seq_kv=m), whole, dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), cu))


def singly(p):
    """The problems of single lengths."""
    return [replace(p, seq_q=int(n), seq_kv=int(m)) for n, m in zip(p.seq_q, p.seq_kv)]


@given(several(), st.booleans())
def test_several_lengths(call, lse):
    """Lengths of batch entries and packed sequences: everything adds up, to the byte."""
    p, given_, lengths = call
    meter, _ = metered(tiled, *given_, return_lse=lse, **lengths, **band(p), **blocks(p))
    assert meter.total == flash_bytes(p, lse=lse).sum() == sum(flash_bytes(x, lse=lse) for x in singly(p))
    item = 8 if p.dtype == "fp64" else 4
    meter, _ = metered(naive, *given_, return_lse=lse, **lengths, **band(p))
    assert meter.total == standard_bytes(p, score_item=item, lse=lse).sum()
    shown = p.heads * sum(int(visible(x.seq_q, x.seq_kv, **band(x)).sum()) for x in singly(p))
    assert score_count(p).sum() == shown and flops(p).sum() == 2 * p.width * shown
    tiles = sum(p.heads * walk(x) for x in singly(p))
    assert [x.sum() for x in tile_counts(p)] == tiles.tolist()


@given(several(), st.booleans())
def test_options_of_several_lengths(call, per_head):
    """A mask and a bias are read once for every score of a tile, sinks once for every tile of queries."""
    p, given_, lengths = call
    scores = (*given_[0].shape[:-1], given_[1].shape[-2])
    over = scores[-3:] if per_head else scores[-2:]
    meter = Meter()
    options = {name: HBM(x, meter, name) for name, x in {
        "mask": np.ones(over, bool), "bias": np.zeros(over, np.float32), "sinks": np.zeros(p.heads, np.float32),
    }.items()}  # fmt: skip
    tiled(*(HBM(x, meter, "x") for x in given_), **options, **lengths, **band(p), **blocks(p))
    assert {x: meter.read[x] for x in options} == option_bytes(p, per_head)
    assert meter.read["x"] + meter.written["O"] == flash_bytes(p).sum()
    if 1 in over[-2:]:
        return  # an axis of length 1 is read as one that is broadcast
    meter.read.clear()
    naive(*(HBM(x, meter, "x") for x in given_), **options, **lengths, **band(p))
    every = (p.heads if per_head else p.kv_heads) * int(p.seq_q @ p.seq_kv)  # hidden or not
    sinks = 4 * p.heads * len(p.seq_q)
    assert {x: meter.read[x] for x in options} == {"mask": every, "bias": 4 * every, "sinks": sinks}


def option_bytes(p, per_head):
    """What a mask, a float32 bias and float32 sinks add to a forward pass."""
    heads = p.heads if per_head else p.kv_heads
    scores = int(np.sum(tile_counts(p).scores)) // p.heads * heads
    rows = int(np.sum(-(-p.seq_q // p.block_q))) * p.batch
    return {"mask": scores, "bias": 4 * scores, "sinks": 4 * rows * p.heads}


def walk(p):
    """full, partial, empty and the scores of tiles that are not empty, for one head."""
    shown, found = visible(p.seq_q, p.seq_kv, **band(p)), np.zeros(4, int)
    for i in range(0, p.seq_q, p.block_q):
        for j in range(0, p.seq_kv, p.block_kv):
            tile = shown[i : i + p.block_q, j : j + p.block_kv]
            found[0 if tile.all() else 1 if tile.any() else 2] += 1
            found[3] += tile.size * tile.any()
    return found


@given(problems())
def test_tile_counts(p):
    assert tile_counts(p) == tuple(p.batch * p.heads * walk(p))
    assert all(type(x) is int for x in tile_counts(p))


def test_tile_counts_of_any_length():
    """Rows of tiles by hand: one tile on the diagonal is cut; with a window of 4,096 keys also one 32 before it."""
    for n in (10**12, 10**18):
        t = n // 128
        counts = tile_counts(Problem(n, causal=True))
        assert counts == (t * (t - 1) // 2, t, t * (t - 1) // 2, 128**2 * t * (t + 1) // 2)
        counts = tile_counts(Problem(n, causal=True, window=(4095, None)))
        assert counts[:2] == (sum(min(i, 31) for i in range(64)) + (t - 64) * 31, t + t - 32)
        assert sum(counts[:3]) == t * t


def test_tiles_have_whole_lengths():
    with pytest.raises(ValueError, match="seq_q is a finite whole number"):
        tile_counts(Problem(7.5))


@given(problems(["fp32"]))
def test_full_tiles_carry_no_masking_work(p):
    """Positions are looked at in partial tiles alone, empty ones are not even loaded."""
    asked, visible_ = [], Diagonals.visible
    with patch.object(Diagonals, "visible", lambda *args: asked.append(args) or visible_(*args)):
        meter, _ = metered(tiled, *arrays(p), **band(p), **blocks(p))
    full, partial, _, _ = walk(p)
    assert len(asked) == p.batch * p.kv_heads * partial
    with patch.object(HBM, "__getitem__", counted := Counted(HBM.__getitem__)):
        metered(tiled, *arrays(p), **band(p), **blocks(p))
    assert counted.names["K"] == counted.names["V"] == p.batch * p.kv_heads * (full + partial)


class Counted:
    """Loads of each tensor."""

    def __init__(self, load):
        self.load, self.names = load, Counter()

    def __get__(self, array, kind):
        return partial(self, array)

    def __call__(self, array, key):
        self.names[array.name] += 1
        return self.load(array, key)


@given(problems(["fp64"]), st.booleans())
def test_mask_and_bias(p, per_head):
    """Read once for every score of a tile that is touched, and for every head that has its own."""
    heads = p.heads if per_head else 1
    shape = (heads, p.seq_q, p.seq_kv)
    meter = Meter()
    over = {
        "mask": HBM(np.ones(shape, bool), meter, "mask"),
        "bias": HBM(np.zeros(shape, np.float32), meter, "bias"),
    }
    tiled(*(HBM(x, meter) for x in arrays(p)), **over, **band(p), **blocks(p))
    scores = tile_counts(p).scores // p.heads * (p.heads if per_head else p.kv_heads)
    assert (meter.read["mask"], meter.read["bias"]) == (scores, 4 * scores)


def test_sinks_are_read_once_for_every_tile_of_queries():
    q, k, v = qkv(8, 8, d=2, lead=(4,), kv_lead=(2,))
    meter = Meter()
    sinks = HBM(np.zeros(4), meter, "sinks")
    tiled(*(HBM(x, meter) for x in (q, k, v)), sinks=sinks, block_q=3)
    assert meter.read["sinks"] == 3 * 4 * 8


# tensor by tensor


def test_every_tensor_under_its_name():
    q, k, v = qkv(8, 8, d=2, dtype="float32")
    meter, mask, bias = Meter(), np.ones((8, 8), bool), np.zeros((1, 8), np.float32)
    q, k, v = (HBM(x, meter, name) for x, name in zip((q, k, v), "QKV"))
    over = {"mask": HBM(mask, meter, "mask"), "bias": HBM(bias, meter, "bias")}
    tiled(q, k, v, return_lse=True, block_q=2, block_kv=4, **over)
    assert meter.read == {"Q": 64, "K": 4 * 64, "V": 4 * 64, "mask": 64, "bias": 4 * 8 * 4}
    assert meter.written == {"O": 64, "lse": 32}
    assert meter.total == sum(meter.read.values()) + sum(meter.written.values())


def test_naive_tensor_by_tensor():
    meter, _ = metered(naive, *qkv(8, 8, d=2, dtype="float32"), causal=True, return_lse=True)
    assert meter.read == {"Q": 64, "K": 64, "V": 64, "S": 144, "P": 144}
    assert meter.written == {"S": 144, "P": 144, "O": 64, "lse": 32}


def test_tiles_that_see_nothing_are_not_loaded():
    meter, _ = metered(tiled, *qkv(6, 6, d=1), window=(0, 0), align=6, block_q=2, block_kv=2)
    assert set(+meter.read) <= {"Q"} and meter.written == {"O": 48}


def test_causal_tiles_of_the_running_example():
    """64 tokens in tiles of 16 x 16: 10 of 16 tiles are visited, each loads a K and a V tile."""
    meter, _ = metered(tiled, *qkv(64, 64, d=16), causal=True, block_q=16, block_kv=16)
    assert meter.read["K"] == meter.read["V"] == 10 * 16 * 16 * 8
    assert not meter.read.keys() & {"S", "P"} and not meter.written.keys() & {"S", "P"}


@pytest.mark.parametrize("align, keys", [("top_left", 4 + 4), ("bottom_right", 10 + 10)])
def test_ragged_tiles_by_hand(align, keys):
    """Row tiles 0-2 and 3; key tiles 0-3, 4-7 and 8-9."""
    p = Problem(
        seq_q=4, seq_kv=10, head_dim=1, dtype="fp32", causal=True, align=align, block_q=3, block_kv=4
    )  # fmt: skip
    assert flash_bytes(p) == 4 * (4 + 2 * keys + 4)
    assert metered(tiled, *arrays(p), **band(p), **blocks(p))[0].total == flash_bytes(p)


@pytest.mark.parametrize("path", [naive, tiled])
def test_out_may_be_metered(path):
    q, k, v = qkv(5, 7)
    meter = Meter()
    out = HBM(np.full((5, 4), 9.0), meter, "result")
    assert path(q, k, v, out=out) is out
    assert meter.written == {"result": 5 * 4 * 8} and not meter.read
    same([out._array], [path(q, k, v)])


# the memory itself


def test_slices_are_counted():
    meter = Meter()
    x = HBM(np.arange(12.0).reshape(3, 4), meter, "x")
    assert np.array_equal(x[1:, :2], [[4, 5], [8, 9]]) and meter.read == {"x": 32}
    x[0] = 7.0
    assert meter.written == {"x": 32} and meter.total == 64
    assert (x.shape, x.dtype, x.ndim) == ((3, 4), np.float64, 2)


def test_a_loaded_tile_cannot_be_written_to():
    x = HBM(np.zeros((3, 4)), Meter(), "x")
    with pytest.raises(ValueError):
        x[0][0] = 1


USES = [np.asarray, np.array, np.copy, np.sum, len, iter, list, float, lambda x: x @ np.ones(4), lambda x: 1 in x]


@pytest.mark.parametrize("use", USES)
def test_nothing_is_copied_unseen(use):
    meter = Meter()
    x = HBM(np.zeros((3, 4)), meter, "x")
    with pytest.raises(TypeError):
        use(x)
    assert meter.total == 0


def test_empty_like_makes_metered_memory():
    meter = Meter()
    y = np.empty_like(HBM(np.zeros((3, 4)), meter, "x"), shape=(2, 2), dtype=np.float32)
    assert isinstance(y, HBM) and (y.shape, y.dtype) == ((2, 2), np.float32)
    y.name = "y"
    y[...] = 1
    assert meter.written == {"y": 16}


# arrays of lengths, and long lengths

TILES = {f"{kind} tiles": lambda p, kind=kind: getattr(tile_counts(p), kind) for kind in TileCounts._fields}
COUNTS = TILES | {
    "pairs": lambda p: pairs(p.seq_q, p.seq_kv, **band(p)),
    "score_count": score_count,
    "flops": flops,
    "flops dense": lambda p: flops(p, "dense"),
    "compulsory_bytes": compulsory_bytes,
    "compulsory_bytes lse": lambda p: compulsory_bytes(p, lse=True),
    "standard_bytes": standard_bytes,
    "standard_bytes fused": lambda p: standard_bytes(p, fused=True),
    "flash_bytes": flash_bytes,
    "flash_bytes lse": lambda p: flash_bytes(p, lse=True),
    "flash_bytes keys": lambda p: flash_bytes(p, order="keys"),
    "lower_bound": lambda p: lower_bound(p, 2**17),
    "tile_bytes": tile_bytes,
}
COUNTED = pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
WINDOWS = [{}, {"causal": True}, {"window": (5, 3)}, {"causal": True, "window": (7, None)}]


@pytest.mark.parametrize("options", WINDOWS)
@COUNTED
def test_arrays_equal_scalars(count, options):
    p = Problem(1, heads=6, kv_heads=2, head_dim=3, value_dim=5, block_q=4, block_kv=6, **options)
    lengths = np.arange(40)
    got = count(p.at(lengths))
    assert got.dtype == np.float64
    assert got.tolist() == [count(p.at(n)) for n in lengths.tolist()]


@pytest.mark.parametrize("align", ["top_left", "bottom_right", -2, 3])
@COUNTED
def test_arrays_of_two_lengths(count, align):
    n, m = (x.ravel() for x in np.meshgrid(range(12), range(12)))

    def ask(n, m):
        sizes = {"heads": 2, "head_dim": 3, "block_q": 3, "block_kv": 4}
        return count(Problem(seq_q=n, seq_kv=m, causal=True, align=align, **sizes))

    assert ask(n, m).tolist() == [ask(*x) for x in zip(n.tolist(), m.tolist())]


BILLION = 10**9


@pytest.mark.parametrize("options", WINDOWS)
@COUNTED
def test_a_billion_tokens(count, options):
    p = Problem(BILLION, batch=8, heads=32, **options)
    exact = count(p)
    assert isinstance(exact, float if count is COUNTS["lower_bound"] else int)
    assert exact >= (count not in TILES.values())  # a kind of tiles may be missing
    same_size = [count(p.at(kind(BILLION))) for kind in (np.int64, np.uint32, float)]
    assert same_size == [exact] * 3


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 3)}])
@pytest.mark.parametrize("name", ["pairs", "flops", "standard_bytes"])
def test_a_billion_tokens_in_an_array(name, options):
    p, count = Problem(BILLION, **options), COUNTS[name]
    np.testing.assert_allclose(count(p.at(np.array([BILLION]))), [float(count(p))], rtol=1e-15)


@pytest.mark.parametrize("options", WINDOWS)
@pytest.mark.parametrize("order", ["queries", "keys"])
def test_a_billion_tokens_in_tiles(order, options):
    p = Problem(BILLION, **options)
    got = flash_bytes(p.at(np.array([BILLION])), order)
    np.testing.assert_allclose(got, [float(flash_bytes(p, order))], rtol=1e-15)


def test_a_billion_tokens_to_the_last_digit():
    n = BILLION
    assert pairs(n, causal=True) == n * (n + 1) // 2
    assert flops(Problem(n, head_dim=64, heads=3)) == 4 * 64 * 3 * n * n
    assert flops(Problem(n, head_dim=64, causal=True), "half") == 2 * 64 * n * n
    assert standard_bytes(Problem(n, head_dim=1, dtype="fp32")) == 4 * (4 * n + 4 * n * n)
    t = n // 128  # tiles, the last of them whole
    assert flash_bytes(Problem(n, head_dim=1, causal=True)) == 2 * 2 * (n + 128 * t * (t + 1) // 2)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_estimate_of_arrays(options):
    p, device = Problem(1, heads=4, **options), DEVICES["seed"]
    lengths = np.array([1, 512, 1000, 8192, 131072])
    whole, singly = estimate(p.at(lengths), device), [estimate(p.at(n), device) for n in lengths.tolist()]
    fields = "flops score_bytes naive_bytes tiled_bytes compute_time naive_time tiled_time"
    for name in [*fields.split(), "speedup", "reduction", "naive_bound", "tiled_bound"]:
        assert np.array_equal(getattr(whole, name), [getattr(one, name) for one in singly]), name


# Faults reported in public against other packages, by short names.


CASES = {
    "mask-08": lambda: (
        pairs(3, 128, causal=True, align="bottom_right") == 381
    ),
    "flops-02": lambda: (
        flops(Problem(seq_q=4, seq_kv=10, head_dim=8, value_dim=16, causal=True, align="bottom_right"))
        == 34 * 2 * (8 + 16) == 1632
    ),
    "flops-03": lambda: (
        [pairs(5, 2, causal=True, align=a) for a in ("top_left", "bottom_right")] == [9, 3]
    ),
    "flops-06": lambda: flops(Problem(2, head_dim=8, value_dim=4)) == 96,
    "flops-10": lambda: (
        flops(Problem(14)) == 4 * flops(Problem(7))
        and flops(Problem(14, causal=True)) * 7 * 8 == flops(Problem(7, causal=True)) * 14 * 15
    ),
    "flops-11": lambda: (
        flops(Problem(seq_q=1, seq_kv=101, heads=64)) - flops(Problem(seq_q=1, seq_kv=100, heads=64))
        == 4 * 64 * 128 == 32768
    ),
    "flops-12": lambda: flops(Problem(3, heads=2, head_dim=4, value_dim=1)) == 180,
    "flops-13": lambda: pairs(8, causal=True, window=(2, None)) == 21,
    "bytes-01": lambda: (
        compulsory_bytes(Problem(seq_q=0, seq_kv=10, heads=8, kv_heads=2, head_dim=4)) == 320
    ),
    "bytes-08": lambda: (
        compulsory_bytes(Problem(seq_q=0, seq_kv=1, head_dim=192, value_dim=128)) == 640
    ),
    "bytes-13": lambda: (
        flash_bytes(Problem(8, head_dim=4, block_q=2, dtype="fp32"), lse=True) == 4 * 328
        and standard_bytes(Problem(8, head_dim=4, dtype="fp32")) == 4 * 384
    ),
    "bytes-14": lambda: paper_blocks(Problem(8), 48 * 1024) == (48, 48),
    "hw-02": lambda: {peak(d) for name, d in DEVICES.items() if name.startswith("a100")} == {312e12},
    "hw-05": lambda: 1e12 / Device("two", peak=None, bandwidth=2000e9).bandwidth == 0.5
    and DEVICES["seed"].bandwidth == 3350e9,
    "hw-08": lambda: (
        si(989.4e12, "FLOP/s") == "989.4 TFLOP/s"
        and si(3.35e12, "B/s") == "3.35 TB/s"
        and round(ridge(Device("h100", peak=989.4e12, bandwidth=3.35e12)), 1) == 295.3
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    assert CASES[name]()


@pytest.mark.parametrize("sram", [1, 100, 512, 2**17, 196608])
@pytest.mark.parametrize("d, dv", [(1, 1), (64, 64), (128, 128), (192, 128)])
def test_largest_block(d, dv, sram):
    """The tile fits, one row more does not: counted tile by tile."""
    p = Problem(8, head_dim=d, value_dim=dv)
    b = largest_block(p, sram)
    q, k, v, o = b * d, b * d, b * dv, b * dv
    assert 2 * (q + k + v + o) <= sram < 2 * (b + 1) * 2 * (d + dv)


def test_ridge_of_every_device_whose_figures_are_known():
    known = [d for d in DEVICES.values() if d.peak and d.bandwidth]
    assert len(known) > 5
    for d in known:
        assert ridge(d) == d.peak / d.bandwidth
        assert 10 < ridge(d) < 3000 and 1e11 < d.bandwidth < 1e14 and 1e13 < d.peak < 1e17


def test_look_ups_ignore_case():
    assert DEVICES["H100-SXM"] is DEVICES["h100-sxm"]
    assert set(DEVICES) == {d.name.lower() for d in DEVICES.values()}


# what a meter must not miss


def test_a_load_is_a_copy():
    x = HBM(np.arange(4.0), Meter(), "X")
    before = x[:]
    x[:] = before * 2
    assert before.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("metered_ones", ["q", "kv"])
def test_metered_and_plain_do_not_mix(metered_ones):
    arrays = {n: HBM(x, Meter(), n) if n in metered_ones else x for n, x in zip("qkv", qkv(3, 4))}
    for path in (naive, tiled):
        with pytest.raises(TypeError, match="all metered arrays or all plain"):
            path(*arrays.values())


def test_out_is_no_input_behind_a_meter_either():
    q, k, v = (HBM(x, Meter(), n) for n, x in zip("qkv", qkv(3, 3)))
    for out in (v, q._array):
        with pytest.raises(ValueError, match="shares memory"):
            tiled(q, k, v, out=out)


def test_shared_heads_are_no_gain_from_tiling():
    step = Problem(seq_q=1, seq_kv=131_072, heads=32, kv_heads=8)
    best = estimate(step, DEVICES["h100-sxm"])
    assert best.naive_bytes == best.tiled_bytes + 2 * best.score_bytes
    assert best.speedup < 1.04


def test_a_profile_varies_the_keys_of_a_step():
    step = Problem(seq_q=1, seq_kv=4096, heads=8, kv_heads=2, causal=True, align="bottom_right")
    curve = profile(step, DEVICES["seed"])
    assert np.ptp(curve.problem.seq_kv) > 1e5 and curve.problem.seq_q == 1
    for i in (0, 20, 47):
        alone = estimate(replace(step, seq_kv=curve.problem.seq_kv[i]), DEVICES["seed"])
        assert (curve.tiled_bytes[i], curve.speedup[i]) == (alone.tiled_bytes, alone.speedup)


def test_a_tile_is_no_longer_than_its_axis():
    """One query of four heads is four rows on chip; 128 would not fit."""
    step = Problem(seq_q=1, seq_kv=8192, heads=32, kv_heads=8)
    assert tile_bytes(step) == (4 + 128) * 256 * 2
    room = Device("small", peak=1e12, bandwidth=1e12, sram=68_000)
    e = estimate(step, room)
    assert (e.fits, e.block) == (True, 1) and "A tile of 1 x 128 takes 66 KiB" in verdict(e)
    assert not estimate(replace(step, seq_q=128), room).fits
    short = estimate(Problem(seq_q=128, seq_kv=3, heads=1), room)
    assert short.fits and tile_bytes(short.problem) == 131 * 256 * 2
    lengths = np.array([1, 2, 128, 300])
    many = estimate(Problem(seq_q=lengths, seq_kv=8192, heads=32, kv_heads=8), room)
    ones = [estimate(Problem(seq_q=n, seq_kv=8192, heads=32, kv_heads=8), room) for n in lengths.tolist()]
    assert many.fits.tolist() == [e.fits for e in ones] and many.block.tolist() == [e.block for e in ones]


@pytest.mark.parametrize("elements, per_score", [(6 * 128**2, 128 / 768), (128**2, 1.0), (64**2, 2.0)])
def test_lower_bound_by_hand(elements, per_score):
    """d * d / M per score while M is at least d * d, and d / sqrt(M) below."""
    p = Problem(1024, head_dim=128, dtype="fp32")
    np.testing.assert_allclose(lower_bound(p, 4 * elements), 1024**2 * per_score * 4)


@given(problems(["fp32"]))
def test_keys_that_no_query_sees_are_not_compulsory(p):
    """By a walk over all pairs; and no loop moves less."""
    p = replace(p, seq_q=p.seq_q + 1)
    seen = int(visible(p.seq_q, p.seq_kv, **band(p)).any(0).sum())
    rows = p.heads * p.seq_q + p.kv_heads * seen
    assert compulsory_bytes(p) == p.batch * rows * p.width * p.item <= flash_bytes(p)
