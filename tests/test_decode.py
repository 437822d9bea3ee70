"""Split keys, paged keys: the same attention, and every byte of it counted."""
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlit.decode import decode_attention, decode_bytes, intensity, runs
from flashlit.hbm import HBM, Meter
from flashlit.tiled import BLOCK_Q
from flashlit.traffic import Problem, compulsory_bytes, flops
from helpers import DTYPES, agree, check, judged, naive, normal, qkv, same, strict, tiled
from oracle import oracle, within
from test_cases import CASES
from test_meter import arrays, band, metered, problems
from test_properties import calls

decode = strict(decode_attention)
SPLITS = [None, 1, 2, 3, 7, 40]
splits_of = pytest.mark.parametrize("splits", SPLITS)


def size(o, lse):
    """What 1e-14 is relative to: the largest number that came."""
    return max(np.abs(x[np.isfinite(x)]).max(initial=1) for x in (o, lse))


def close(got, want):
    agree(got, want, size(*want))


# any number of splits, the same answer


@given(calls(), st.integers(1, 13))
def test_splits_are_the_oracle(call, splits):
    given_, options = call
    check(decode(*given_, splits=splits, return_lse=True, **options), *given_, **options)


@given(calls(dtypes=[*DTYPES], spoil=False), st.integers(1, 13))
def test_splits_are_naive_in_every_type(call, splits):
    given_, options = call
    o, lse = naive(*given_, return_lse=True, **options)
    x, y = decode(*given_, splits=splits, return_lse=True, **options)
    eps = {8: 1e-14, 4: 1e-6, 2: 1e-2 if o.dtype != np.float16 else 1e-3}[o.dtype.itemsize]
    assert x.dtype == o.dtype and y.dtype == lse.dtype
    np.testing.assert_allclose(x.astype(float), o.astype(float), rtol=eps, atol=4 * eps)
    np.testing.assert_allclose(y, lse, rtol=1e-6, atol=4e-6)


@given(calls(), st.integers(1, 13))
def test_splits_are_the_other_paths(call, splits):
    given_, options = call
    got = decode(*given_, splits=splits, return_lse=True, **options)
    for path in (tiled, naive):
        close(got, path(*given_, return_lse=True, **options))


@pytest.mark.parametrize("n, m", [(3, 37), (1, 1000), (600, 700), (257, 1)])
def test_one_to_forty_splits(n, m):
    """lse-09; lengths beyond a tile of queries and of keys are among them."""
    q, k, v = qkv(n, m, d=8, lead=(2,), kv_lead=(1,))
    want = tiled(q, k, v, causal=True, align="bottom_right", return_lse=True)
    for splits in range(1, 41) if n == 3 else SPLITS:
        got = decode(q, k, v, causal=True, align="bottom_right", splits=splits, return_lse=True)
        close(got, want)


@pytest.mark.parametrize("splits", [2, 3, 40])
def test_large_logits_lose_nothing(splits):
    """Logits near 10,000 that float32 holds exactly: parts with an lse in float32 would be off by 1e-5."""
    steps = np.random.default_rng(3).integers(0, 9, (1000, 1))
    q, k = np.full((1, 1), 1e4, np.float32), (1 + steps * 2.0**-13).astype(np.float32)
    v = np.arange(1000, dtype=np.float32)[:, None]
    exact = naive(*(x.astype(np.float64) for x in (q, k, v)))
    assert abs(decode(q, k, v, splits=splits) / exact - 1).item() < 2e-6


@pytest.mark.parametrize("heads, kv_heads", [(6, 1), (6, 2), (12, 2), (5, 5), (7, 1)])
def test_groups(heads, kv_heads):
    """gqa-04."""
    for n in (1, 9):
        q, k, v = qkv(n, 9, lead=(heads,), kv_lead=(kv_heads,))
        want = oracle(q, k, v)
        for splits in SPLITS:
            for x, ref in zip(decode(q, k, v, splits=splits, return_lse=True), want, strict=True):
                np.testing.assert_allclose(x, ref.astype(float), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"shape-05"}))  # that one asks for exact numbers
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_case(name, splits):
    """The cases of attention, decoded."""
    for got, expected, *scale in CASES[name](partial(decode, splits=splits)) or ():
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14 * max([1, *scale]))


@splits_of
def test_shape_10(splits):
    """One entry of the batch has no keys; and no queries, batch, heads or keys at all."""
    q, k, v = qkv(1, 3, lead=(2, 2))
    o, lse = decode(q, k, v, kv_lengths=np.array([0, 3]), splits=splits, return_lse=True)
    assert not o[0].any() and (lse[0] == -np.inf).all()
    close((o[1], lse[1]), tiled(q[1], k[1], v[1], return_lse=True))
    for shape, m in (((2, 2, 0, 4), 3), ((0, 2, 1, 4), 3), ((2, 0, 1, 4), 3), ((2, 2, 1, 4), 0)):
        q, (k, v) = np.zeros(shape), np.ones((2, *shape[:-2], m, 4))
        o, lse = decode(q, k, v, splits=splits, return_lse=True)
        assert o.shape == shape and lse.shape == shape[:-1]
        assert not o.any() and (lse == -np.inf).all()


@given(calls(dtypes=[*DTYPES], spoil=False), st.integers(1, 13))
def test_same_call_same_bits(call, splits):
    given_, options = call
    before = [x.copy() for x in given_]
    got = [decode(*given_, splits=splits, return_lse=True, **options) for _ in range(2)]
    same(*got)
    same([decode(*given_, splits=splits, **options)], got[0][:1])
    same(before, given_)


@splits_of
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_alone_has_the_bits_it_has_in_a_batch(dtype, splits):
    q, k, v = qkv(2, 70, lead=(3, 4), kv_lead=(3, 2), dtype=dtype)
    together = decode(q, k, v, splits=splits)
    same(together, [decode(*x, splits=splits) for x in zip(q, k, v)])


@pytest.mark.parametrize("splits", [2, 5, 40])
def test_a_key_no_part_may_see(splits):
    """NaN and inf behind lengths, windows and masks; visible ones in their rows alone."""
    q, k, v = qkv(3, 20, lead=(2,))
    mask = np.arange(20) != 11
    options = {"causal": True, "align": 16, "mask": mask, "return_lse": True, "splits": splits}
    want = decode(q, k, v, **options)
    k[:, [11, 19]], v[:, [11, 19]] = np.nan, np.inf
    close(decode(q, k, v, **options), want)
    k[:, 18] = np.nan  # the last row's own key
    o, lse = decode(q, k, v, **options)
    assert np.isnan(o[:, 2]).all() and np.isnan(lse[:, 2]).all()
    close((o[:, :2], lse[:, :2]), (want[0][:, :2], want[1][:, :2]))


@splits_of
def test_a_sink_counts_once(splits):
    q, k, v = np.zeros((2, 1, 4)), np.zeros((2, 4, 4)), np.ones((2, 4, 1))
    sinks = np.log([4.0, 12.0])  # as heavy as four keys, as twelve
    o, lse = decode(q, k, v, sinks=sinks, splits=splits, return_lse=True)
    agree((o[..., 0], lse), ([[0.5], [0.25]], np.log([[8], [16]])), 4)
    o, lse = decode(q, k[:, :0], v[:, :0], sinks=sinks, splits=splits, return_lse=True)
    assert not o.any()
    agree([lse], [sinks[:, None]], 4)


# the runs


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60))
def test_runs(start, n, splits):
    found = runs(slice(start, start + n), splits)
    sizes = [x.stop - x.start for x in found]
    assert len(found) == splits and max(sizes) - min(sizes) <= 1
    assert [j for x in found for j in range(x.start, x.stop)] == list(range(start, start + n))


def test_a_window_is_split_where_it_lies():
    """Ten keys in sight of 1,000 are two for each of five splits; no other is loaded."""
    q, k, v = qkv(1, 1000)
    log = []

    class Noted(HBM):
        def __getitem__(self, key):
            log.append((self.name, key[-2].start, key[-2].stop))
            return super().__getitem__(key)

    q, k, v = (Noted(x, Meter(), name) for x, name in zip((q, k, v), "QKV"))
    decode(q, k, v, window=(9, 0), align="bottom_right", splits=5)
    assert [x[1:] for x in log if x[0] == "K"] == [(j, j + 2) for j in range(990, 1000, 2)]


# pages


def paged(k, v, page, seed=0, lengths=None, spare=3):
    """k and v of (batch, heads, m, d) cut into pages in random order; what no key needs is NaN."""
    rng = np.random.default_rng(seed)
    (batch, heads, m, _), count = k.shape, -(-k.shape[-2] // page)
    order = rng.permutation(batch * count + spare)
    table = order[: batch * count].reshape(batch, count)
    pools = []
    for x in (k, v):
        pool = np.full((len(order), heads, page, x.shape[-1]), np.nan).astype(x.dtype)
        for b, n in np.ndindex(batch, count):
            end = m if lengths is None else lengths[b]
            tile = x[b, :, n * page : min((n + 1) * page, end)]
            pool[table[b, n], :, : tile.shape[1]] = tile
        pools.append(pool)
    if lengths is not None:
        used = np.arange(count) * page < np.asarray(lengths)[:, None]
        table = np.where(used, table, rng.choice([-(2**40), -1, 10**9], table.shape))
    return *pools, table


@given(
    st.integers(0, 5), st.integers(1, 24), st.integers(0, 3), st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 2, 5]), st.sampled_from([*DTYPES]), st.integers(0, 10**6), st.data(),
)  # fmt: skip
def test_pages_are_their_keys_in_one_piece(n, m, dv, page, splits, dtype, seed, data):
    lengths = np.array([data.draw(st.integers(0, m)) for _ in range(3)])
    q, k, v = qkv(n, m, 4, dv, (3, 4), (3, 2), dtype, seed)
    options = {"causal": data.draw(st.booleans()), "align": "bottom_right", "kv_lengths": lengths}
    if data.draw(st.booleans()):
        options["window"] = (data.draw(st.integers(0, 6)), data.draw(st.none() | st.integers(0, 3)))
    if data.draw(st.booleans()):
        options["sinks"] = normal(4, "float32", seed)
    want = decode(q, k, v, splits=splits, return_lse=True, **options)
    *pages, table = paged(k, v, page, seed, lengths)
    options |= {"block_table": table, "splits": splits, "return_lse": True}
    same(decode(q, *pages, **options), want)  # of the same tiles, so of the same bits
    # over the scores of all pages there may be a mask and a bias
    shape = (4, n, table.shape[-1] * page)
    over = {"mask": normal(shape, seed=seed) < 1, "bias": normal(shape, "float32", seed)}
    cut = {name: x[..., :m] for name, x in over.items()}
    kept = {name: x for name, x in options.items() if name != "block_table"}
    same(decode(q, *pages, **options, **over), decode(q, k, v, **kept, **cut))


@pytest.mark.parametrize("page", [1, 3, 16])
def test_whole_pages_need_no_lengths(page):
    q, k, v = qkv(2, 48, lead=(2, 4), kv_lead=(2, 2))
    *pages, table = paged(k, v, page)
    for dtype in (np.int32, np.uint8, np.int64):
        same([decode(q, *pages, block_table=table.astype(dtype), splits=3)], [decode(q, k, v, splits=3)])


def test_pages_are_shared_and_tables_broadcast():
    """A prompt that two entries share lies in memory once; one table serves a whole batch."""
    q, k, v = qkv(1, 8, lead=(2, 4), kv_lead=(2, 2))
    k[1, :, :4], v[1, :, :4] = k[0, :, :4], v[0, :, :4]
    pools = [np.stack([x[0, :, :4], x[0, :, 4:], x[1, :, 4:]]) for x in (k, v)]
    want = decode(q, k, v)
    same([decode(q, *pools, block_table=np.array([[0, 1], [0, 2]]))], [want])
    for table in ([0, 1], [[0, 1]]):
        got = decode(q, *pools, block_table=np.array(table), kv_lengths=np.array([8, 5]))
        same([got], [decode(q, k[:1], v[:1], kv_lengths=np.array([8, 5]))])
    o = decode(q[0], *pools, block_table=np.array([0, 2]), splits=2)
    same([o], [decode(q[0], k[1], v[1], splits=2)])


def test_pages_of_a_matrix():
    """Without heads q is a matrix; the pages say that there is one."""
    q, k, v = qkv(2, 6)
    pools = [x.reshape(3, 1, 2, 4) for x in (k, v)]
    same(decode(q, *pools, block_table=np.arange(3)), decode(q, k, v)[None])


@splits_of
def test_only_real_keys_of_a_page_are_read(splits):
    lengths = np.array([0, 1, 7, 12])
    q, k, v = qkv(1, 12, 4, 3, (4, 6), (4, 2), "float32")
    *pages, table = paged(k, v, 5, lengths=lengths)
    options = {"kv_lengths": lengths, "splits": splits, "return_lse": True}
    meter, _ = metered(decode, q, *pages, block_table=table, **options)
    assert meter.read["K"] == lengths.sum() * 2 * 4 * 4 and meter.read["V"] == lengths.sum() * 2 * 3 * 4
    plain, _ = metered(decode, q, k, v, **options)
    assert meter.read == plain.read and meter.written == plain.written
    rule = {"heads": 6, "kv_heads": 2, "head_dim": 4, "value_dim": 3, "dtype": "fp32"}
    parts = [Problem(seq_q=1, seq_kv=n, **rule) for n in lengths.tolist()]
    assert meter.total == sum(decode_bytes(p, splits, lse=True) for p in parts)


# what crosses the memory


@given(problems(), st.integers(1, 7), st.booleans())
def test_meter_is_the_formula(p, splits, lse):
    meter, _ = metered(decode, *arrays(p), splits=splits, return_lse=lse, **band(p))
    assert meter.total == decode_bytes(p, splits, lse=lse)
    assert all(meter.read[x] == meter.written[x] for x in ("parts", "lse parts"))


@given(problems(dtypes=["fp8"]), st.integers(1, 7))
def test_8_bit_caches(p, splits):
    """The formula charges O in the type of the inputs; it is written in float32."""
    meter, _ = metered(decode, *arrays(p), splits=splits, **band(p))
    o = p.batch * p.heads * p.seq_q * p.value_dim
    assert meter.total == decode_bytes(p, splits) + 3 * o


@pytest.mark.parametrize("n", [BLOCK_Q, BLOCK_Q + 1, 2 * BLOCK_Q + 50])
@pytest.mark.parametrize("splits", [1, 3])
def test_more_rows_than_a_tile(n, splits):
    p = Problem(
        seq_q=n, seq_kv=600, heads=2, kv_heads=1, head_dim=2, value_dim=1, dtype="fp32",
        causal=True, align="bottom_right", window=(70, None),
    )  # fmt: skip
    meter, _ = metered(decode, *arrays(p), splits=splits, **band(p))
    assert meter.total == decode_bytes(p, splits)


@splits_of
def test_packed_sequences_sum(splits):
    q, k, v = qkv(6, 11, lead=(4,), kv_lead=(2,), dtype="float32")
    cu = {"cu_seqlens_q": np.array([0, 1, 1, 4, 6]), "cu_seqlens_kv": np.array([0, 5, 7, 7, 11])}
    rule = {"causal": True, "align": "bottom_right"}
    meter, _ = metered(decode, q, k, v, splits=splits, **cu, **rule)
    sizes = zip(*(np.diff(x).tolist() for x in cu.values()))
    alone = [Problem(seq_q=n, seq_kv=m, heads=4, kv_heads=2, head_dim=4, dtype="fp32", **rule) for n, m in sizes]
    assert meter.total == sum(decode_bytes(p, splits) for p in alone)


def test_bytes_tensor_by_tensor():
    q, k, v = qkv(1, 10, d=4, dv=3, lead=(6,), kv_lead=(2,), dtype="float16")
    meter, _ = metered(decode, q, k, v, splits=4, return_lse=True)
    assert meter.read == {
        "Q": 4 * 6 * 4 * 2, "K": 2 * 10 * 4 * 2, "V": 2 * 10 * 3 * 2, "parts": 4 * 6 * 3 * 4, "lse parts": 4 * 6 * 8,
    }  # fmt: skip
    parts = {"parts": 4 * 6 * 3 * 4, "lse parts": 4 * 6 * 8}
    assert meter.written == {"O": 6 * 3 * 2, "lse": 6 * 4, **parts}


def test_one_split_is_every_tensor_once():
    p = Problem(seq_q=1, seq_kv=131_072, batch=3, heads=16, kv_heads=2, dtype="fp16")
    assert decode_bytes(p) == decode_bytes(p, 1) == compulsory_bytes(p)
    long = Problem(seq_q=1, seq_kv=np.array([10, 1000]), heads=16, kv_heads=2)
    assert decode_bytes(long, 7).tolist() == [
        decode_bytes(Problem(seq_q=1, seq_kv=n, heads=16, kv_heads=2), 7) for n in (10, 1000)
    ]
    assert type(decode_bytes(Problem(seq_q=1, seq_kv=10**15), 9)) is int


@pytest.mark.parametrize("dtype, item", [("fp32", 4), ("bf16", 2), ("fp8", 1)])
@pytest.mark.parametrize("group, rows", [(1, 1), (8, 1), (8, 4), (2, 1000)])
@pytest.mark.parametrize("d, dv", [(128, 128), (192, 64)])
def test_intensity(group, rows, dtype, item, d, dv):
    for n in (1, 100, 10**6):
        p = Problem(
            seq_q=rows, seq_kv=n, batch=5, heads=2 * group, kv_heads=2, head_dim=d, value_dim=dv, dtype=dtype
        )  # fmt: skip
        queries = group * rows
        assert intensity(p) == pytest.approx(2 / item * queries * n / (queries + n))
    assert intensity(p) == pytest.approx(2 * queries / item, rel=queries / 10**6)


COSTS = {
    "flops-11": lambda: (
        flops(Problem(seq_q=1, seq_kv=101, heads=64)) - flops(Problem(seq_q=1, seq_kv=100, heads=64)) == 32768
    ),
    "bytes-01": lambda: (
        decode_bytes(Problem(seq_q=1, seq_kv=10, heads=8, kv_heads=2, head_dim=4))
        - decode_bytes(Problem(seq_q=1, seq_kv=0, heads=8, kv_heads=2, head_dim=4))
        == 320
    ),
    "bytes-04": lambda: (
        [32 * compulsory_bytes(Problem(seq_q=0, seq_kv=1, heads=32, kv_heads=h)) for h in (32, 8)]
        == [524288, 131072]
    ),
    "bytes-07": lambda: compulsory_bytes(Problem(seq_q=0, seq_kv=1, heads=16, head_dim=256)) == 16384,
    "bytes-08": lambda: compulsory_bytes(Problem(seq_q=0, seq_kv=1, head_dim=192, value_dim=128)) == 640,
}


@pytest.mark.parametrize("name", COSTS)
def test_cost(name):
    assert COSTS[name]()


# at the door


BAD = [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), ("4", TypeError)]


@pytest.mark.parametrize("bad, error", BAD)
def test_splits_are_a_number(bad, error):
    for call in (lambda: decode(*qkv(1, 3), splits=bad), lambda: decode_bytes(Problem(8), bad)):
        with pytest.raises(error, match="splits is an integer >= 1 or None, not"):
            call()


POOL = np.zeros((4, 2, 5, 4))
TABLES = [
    (np.array([[0.0, 1.0]]), {}, TypeError, "block_table holds integers, not float64"),
    (np.array([True, False]), {}, TypeError, "block_table holds integers, not bool"),
    (np.array(3), {}, ValueError, r"with a block_table \(..., pages\)"),
    (np.array([0, 4]), {}, ValueError, "block_table names pages 0 to 3, not 4"),
    (np.array([[0, -1]]), {}, ValueError, "block_table names pages 0 to 3, not -1"),
    (np.array([[0, 1], [9, 3]]), {"kv_lengths": np.array([10, 1])}, ValueError, "pages 0 to 3, not 9"),
    (np.array([[0, 1], [3, 9]]), {"kv_lengths": np.array([10, 6])}, ValueError, "pages 0 to 3, not 9"),
    (np.array([0, 1]), {"kv_lengths": np.array([11])}, ValueError, "kv_lengths are 0 to seq_kv=10, not 11"),
    (np.zeros((3, 2), int), {}, ValueError, "the leading axes do not broadcast"),
    (np.array([0, 1]), {"causal": True}, ValueError, "needs align"),
    (np.array([0, 1]), {"mask": np.ones(9, bool)}, ValueError, "mask .* does not broadcast"),
    (np.array([0, 1]), {"cu_seqlens_q": np.array([0, 2])}, ValueError, "given together"),
]


@pytest.mark.parametrize("table, options, error, words", TABLES)
def test_tables_that_do_not_fit(table, options, error, words):
    with pytest.raises(error, match=words):
        decode(np.zeros((2, 4, 3, 4)), POOL, POOL, block_table=table, **options)


@pytest.mark.parametrize("k, v", [(POOL[0], POOL[0]), (POOL, POOL[:3]), (POOL, POOL[..., :4, :]), (POOL[:, :1], POOL)])
def test_pages_that_do_not_fit(k, v):
    with pytest.raises(ValueError, match=r"k and v are \(all pages, kv_heads, page size, dim\); got"):
        decode(np.zeros((4, 1, 4)), k, v, block_table=np.array([0, 1]))


def test_no_page_is_needed_for_no_keys():
    """An empty pool, an empty table, pages of no tokens: 0 and -inf."""
    q = np.ones((2, 4, 1, 4))
    for pool, table in ((POOL[:0], [[7, 7]]), (POOL, np.zeros((2, 0), int)), (POOL[:, :, :0], [[9]])):
        empty = {"kv_lengths": np.array([0, 0]), "block_table": np.array(table)}
        o, lse = decode(q, pool, pool, splits=2, return_lse=True, **empty)
        assert o.shape == q.shape and not o.any() and (lse == -np.inf).all()


@splits_of
def test_out(splits):
    q, k, v = qkv(2, 9, lead=(2,))
    out = np.full((2, 2, 4), 9.0)
    assert decode(q, k, v, out=out, splits=splits) is out
    same([out], [decode(q, k, v, splits=splits)])
    with pytest.raises(ValueError, match="shares memory"):
        decode(q, k, v, out=q, splits=splits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@splits_of
def test_the_measuring_stick(dtype, splits):
    q, k, v = qkv(2, 300, 16, lead=(4,), kv_lead=(2,), dtype=dtype)
    got = decode(q, k, v, splits=splits, return_lse=True)
    for x, ref, low, top in judged(got, q, k, v):
        assert within(x, ref, low, top)
    assert got[0].dtype == DTYPES[dtype] and got[1].dtype == np.float32
