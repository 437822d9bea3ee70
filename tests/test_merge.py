"""Attention over all keys from attention over parts of them."""
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import DTYPES, agree, merge, naive, normal, qkv, same, tiled

INF = np.inf


def cut(q, k, v, ends, path=naive, **options):
    """One part for every two neighbours of ends, whose keys may be none."""
    return [path(q, k[i:j], v[i:j], return_lse=True, **options) for i, j in pairwise(ends)]


@st.composite
def splits(draw, m=37):
    """Ends of 1 to 40 parts of m keys, some of them empty, and an order of the parts."""
    inner = draw(st.lists(st.integers(0, m), max_size=39))
    order = draw(st.permutations(range(len(inner) + 1)))
    return [0, *sorted(inner), m], order


@given(splits(), st.sampled_from([naive, tiled]))
def test_any_split_in_any_order(split, path):
    q, k, v = qkv(3, 37)
    ends, order = split
    parts = cut(q, k, v, ends, path)
    agree(merge(*(parts[i] for i in order)), path(q, k, v, return_lse=True))


@given(splits(), st.integers(0, 10**6), st.sampled_from([1.0, 30.0, 1e3]))
def test_any_split_of_large_logits(split, seed, tau):
    q, k, v = qkv(2, 37, d=1, seed=seed)
    parts = cut(q, k, v, split[0], scale=tau)
    agree(merge(*parts), naive(q, k, v, scale=tau, return_lse=True), size=10 * tau)


@given(splits(), st.integers(0, 10**6))
def test_any_split_of_masked_keys(split, seed):
    q, k, v = qkv(4, 37, seed=seed)
    mask = normal((4, 37), seed=seed) < -0.8
    parts = [
        naive(q, k[i:j], v[i:j], mask=mask[:, i:j], return_lse=True) for i, j in pairwise(split[0])
    ]
    agree(merge(*parts), naive(q, k, v, mask=mask, return_lse=True))


@given(splits(m=20))
def test_nested_merges(split):
    """Merging merged parts is merging them all, wherever the brackets stand."""
    ends, order = split
    parts = cut(*qkv(3, 20), ends)
    parts = [parts[i] for i in order]
    left = right = merge(parts[0])
    for part in parts[1:]:
        left = merge(left, part)
    right = parts[-1]
    for part in parts[-2::-1]:
        right = merge(part, right)
    agree(left, merge(*parts))
    agree(right, merge(*parts))


@given(st.integers(0, 37))
def test_commutative(at):
    a, b = cut(*qkv(3, 37), [0, at, 37])
    agree(merge(a, b), merge(b, a))


def nothing(like, held=0.0):
    """A part that saw nothing; what its output holds must not matter."""
    o, lse = like
    return np.full_like(o, held), np.full_like(lse, -INF)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [0.0, 7.0, np.nan, INF])
def test_neutral_element_is_exact(held, dtype):
    part = tiled(*qkv(5, 9, dtype=dtype), return_lse=True)
    empty = nothing(part, held)
    same(merge(part, empty), part)
    same(merge(empty, part), part)
    same(merge(empty, part, empty, empty), part)


@pytest.mark.parametrize("held", [0.0, 7.0, np.nan, INF, -INF])
def test_both_empty(held):
    empty = nothing((np.zeros((2, 3)), np.zeros(2)), held)
    same(merge(empty, empty), nothing(empty))
    same(merge(empty), nothing(empty))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_is_itself(dtype):
    part = tiled(*qkv(5, 9, dtype=dtype), return_lse=True)
    same(merge(part), part)


def test_rows_are_merged_one_by_one():
    """A row may be empty in one part and not in the other."""
    a = np.array([[1.0], [np.nan], [3.0]]), np.array([0.0, -INF, -INF])
    b = np.array([[5.0], [6.0], [np.nan]]), np.array([0.0, 2.0, -INF])
    b[1][2], a[1][2] = -INF, 1.0
    agree(merge(a, b), (np.array([[3.0], [6.0], [3.0]]), np.array([np.log(2), 2.0, 1.0])))


@pytest.mark.parametrize("lse", [-3e38, -1e4, 0.0, 1e4, 3e38])
def test_equal_weights_give_the_average(lse):
    o, total = merge(*((np.array([[float(x)]]), np.array([lse])) for x in (1, 2, 6)))
    agree([o], [np.array([[3.0]])])
    np.testing.assert_allclose(total, lse + np.log(3), rtol=1e-15)


def test_far_below_is_nothing():
    part = np.array([[2.0]]), np.array([1e4])
    same(merge(part, (np.array([[9.0]]), np.array([-1e4]))), part)


def test_huge_outputs_do_not_overflow():
    parts = [(np.full((1, 1), 3e38, np.float32), np.zeros(1, np.float32))] * 9
    np.testing.assert_allclose(merge(*parts)[0], 3e38, rtol=1e-6)


def test_a_bad_row_spoils_no_other():
    good = np.array([[1.0], [2.0]]), np.array([0.5, 0.5])
    bad = np.array([[np.nan], [2.0]]), np.array([np.nan, 0.5])
    o, lse = merge(good, bad)
    assert np.isnan(o[0]).all() and np.isnan(lse[0])
    agree([o[1], lse[1]], [np.array([2.0]), np.array(0.5 + np.log(2))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype):
    parts = cut(*qkv(3, 8, dtype=dtype), [0, 3, 8])
    o, lse = merge(*parts)
    assert (o.dtype, lse.dtype) == (parts[0][0].dtype, parts[0][1].dtype)
    assert (o.shape, lse.shape) == ((3, 4), (3,))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 0, 3), (1,)])
def test_shapes(shape):
    part = np.zeros(shape), np.zeros(shape[:-1])
    o, lse = merge(part, part)
    assert (o.shape, lse.shape) == (shape, shape[:-1])


def test_inputs_are_not_written_to():
    parts = cut(*qkv(3, 8), [0, 3, 3, 8])
    before = [x.tobytes() for part in parts for x in part]
    for part in parts:
        for x in part:
            x.flags.writeable = False
    o, _ = merge(*parts)
    o[...] = 9
    assert [x.tobytes() for part in parts for x in part] == before


def test_one_part_is_copied():
    part = naive(*qkv(3, 8), return_lse=True)
    o, lse = merge(part)
    assert not np.shares_memory(o, part[0]) and not np.shares_memory(lse, part[1])


@pytest.mark.parametrize("dtype, huge", [("float64", 1.7e308), ("float32", 3.4e38), ("float16", 65504)])
def test_no_sum_of_parts_overflows(dtype, huge):
    part = np.full((2, 3), huge, DTYPES[dtype]), np.zeros(2)
    for parts in (2, 3, 40):
        o, lse = merge(*[part] * parts)
        np.testing.assert_allclose(o, part[0], rtol=1e-7)
        np.testing.assert_allclose(lse, np.log(parts), rtol=1e-14)
