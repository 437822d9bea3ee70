"""FlashAttention's grid of lengths and head sizes, forward and backward, with PyTorch as the peer.

`make test` runs a cover, in which every pair of values of two axes meets at least once
(a length above 600 meets a few head sizes). `make test-all` runs every length with every
head size, kind of heads, type and each option by itself, none, and all at once: it sets
FLASHLIT_GRID to 1, the share of these to run; 0.005 is a sample.
"""
import os
from itertools import combinations, cycle, groupby, product
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pytest

from flashlit.variants import alibi_bias, alibi_slopes
from helpers import DTYPES, normal, quick, same, tiled, uncompiled, vjp
from oracle import largest, within

WHY = "the peer is PyTorch; `make setup` installs its CPU build where there is one"
torch = pytest.importorskip("torch", minversion="2.5", reason=WHY)
AllPairs = pytest.importorskip("allpairspy").AllPairs

LENGTHS = [
    (1, 1), (1, 3), (2, 1), (3, 3), (64, 1), (239, 1), (799, 3), (511, 1), (3, 513), (1, 147),
    (1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256),
    (256, 512), (512, 256), (307, 256), (640, 128), (1023, 1024), (1024, 1023), (2048, 2048),
]  # fmt: skip
HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
HEADS = {"plain": (2, 2), "grouped": (4, 2), "single": (2, 1)}  # of queries, of keys
TILES = [(None, None), (64, 128), (33, 50)]
OFF_ON = [False, True]


class Combination(NamedTuple):
    """One call of the grid: a value of every axis."""

    lengths: tuple  # of queries and keys
    head_dim: int
    heads: str
    causal: str | None  # how it is aligned
    window: bool
    softcap: bool
    alibi: bool
    mask: bool
    dtype: str


OTHERS = [
    list(HEADS), [None, "top_left", "bottom_right"], *[OFF_ON] * 4,
    ["float64", "float32", "float16", "bfloat16"],
]  # fmt: skip


ALONE = [  # causal, window, softcap, alibi, mask
    (None, False, False, False, False), ("top_left", False, False, False, False),
    ("bottom_right", False, False, False, False), (None, True, False, False, False),
    (None, False, True, False, False), (None, False, False, True, False),
    (None, False, False, False, True), ("bottom_right", True, True, True, True),
]  # fmt: skip


def cover():
    """Combinations in which all pairs of values meet."""
    short, long = ([x for x in LENGTHS if (max(x) > 600) == far] for far in (False, True))
    yield from (Combination(*x) for x in AllPairs([short, HEAD_DIMS, *OTHERS]))
    for head_dim, (lengths, *others) in zip(cycle(HEAD_DIMS), AllPairs([long, *OTHERS])):
        yield Combination(lengths, head_dim, *others)


def chosen():
    """(lengths, head_dim) -> the combinations to run."""
    grid, share = cover(), os.environ.get("FLASHLIT_GRID")
    if share:
        heads, types = OTHERS[0], OTHERS[-1]
        whole = (
            Combination(n, d, h, *option, t)
            for n, d, h, option, t in product(LENGTHS, HEAD_DIMS, heads, ALONE, types)
        )
        grid = (c for c in whole if crc32(repr(c).encode()) < float(share) * 2**32)
    grid = sorted(grid, key=lambda c: (c.lengths[0] * c.lengths[1], repr(c)))  # the short first
    return {x: [*some] for x, some in groupby(grid, lambda c: c[:2])}


CHOSEN = chosen()


def inputs(c, seed):
    """q, k, v, do, dlse and the options of the package."""
    (n, m), (heads, kv_heads) = c.lengths, HEADS[c.heads]
    lead, kv_lead = (1, heads), (1, kv_heads)
    shapes = [(*lead, n, c.head_dim), *[(*kv_lead, m, c.head_dim)] * 2, (*lead, n, c.head_dim)]
    q, k, v, do = (normal(shape, c.dtype, [seed, i]) for i, shape in enumerate(shapes))
    dlse = normal((*lead, n), "float64" if c.dtype == "float64" else "float32", [seed, 4])
    options = {}
    if c.causal or c.window:
        options |= {"causal": bool(c.causal), "align": c.causal or "bottom_right"}
    if c.window:
        options["window"] = m // 3, m // 5
    if c.softcap:
        options["softcap"] = 2.0
    if c.alibi:
        shift = 0 if c.causal == "top_left" else m - n
        options["bias"] = alibi_bias(alibi_slopes(heads), n, m, shift, DTYPES[c.dtype])
    if c.mask:
        options["mask"] = normal((n, m), seed=[seed, 5]) < 0.8
        options["mask"][0] = n == 1  # a row that sees no key
    return (q, k, v, do, dlse), options


def shown(n, m, causal=False, window=None, align=None, mask=True, **_):
    """Which key each query sees."""
    off = np.arange(m) - np.arange(n)[:, None] - (0 if align == "top_left" else m - n)
    left, right = window or (np.inf, np.inf)
    return (off <= (0 if causal else np.inf)) & (-left <= off) & (off <= right) & mask


def plain(q, k, v, bias, see, softcap):
    """(o, lse) by the equation."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = (s if bias is None else s + bias).masked_fill(~see, -torch.inf)
    some = see.any(-1, keepdim=True)
    s = torch.where(some, s, 0)
    o = torch.where(some, torch.softmax(s, -1) @ v, 0)
    return o, torch.where(some[..., 0], torch.logsumexp(s, -1), -torch.inf)


def sdpa(q, k, v, bias, see, options):
    """o by PyTorch's own function, which has no softcap."""
    if options.get("align") == "top_left" and not {"window", "mask", "bias"} & options.keys():
        how = {"is_causal": True}
    else:
        how = {"attn_mask": see if bias is None else bias.masked_fill(~see, -torch.inf)}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)


def peer(dtype, q, k, v, do, dlse, options):
    """[o, lse], and the gradients by name, of PyTorch in one of its types."""

    def tensor(x):
        wide = x if x.dtype == np.float64 else x.astype(np.float32)
        return torch.tensor(wide, dtype=getattr(torch, dtype), requires_grad=True)

    leaves = {"q": tensor(q), "k": tensor(k), "v": tensor(v)}
    if "bias" in options:
        leaves["bias"] = tensor(options["bias"])
    see = torch.tensor(shown(q.shape[-2], k.shape[-2], **options))
    k, v = (leaves[x].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in "kv")
    given = leaves["q"], k, v, leaves.get("bias"), see
    o, lse = plain(*given, options.get("softcap"))
    if dtype == "float64" and "softcap" not in options:
        o = sdpa(*given, options)
    do, dlse = (tensor(x).detach() for x in (do, dlse))
    ((o * do).sum() + torch.where(lse == -torch.inf, 0, lse * dlse).sum()).backward()
    grads = {name: x.grad.double().numpy() for name, x in leaves.items()}
    return [x.detach().double().numpy() for x in (o, lse)], grads


def compare(c):
    """One combination: o and lse, then the gradients."""
    seed = crc32(repr(c).encode())
    given, options = inputs(c, seed)
    (q, k, v, do, dlse), order = given, ["keys", "queries"][seed % 2]
    block_q, block_kv = TILES[seed % 3]
    blocks = {"block_q": block_q, "block_kv": block_kv}
    got, grads = vjp(q, k, v, do, dlse, order, **blocks, **options)
    same(got, quick(q, k, v, return_lse=True, **blocks, **options))
    refs, ref_grads = peer("float64", *given, options)
    lows, low_grads = refs, ref_grads
    if c.dtype != "float64":
        lows, low_grads = peer(c.dtype, *given, options)
    others = [f(q, k, v, return_lse=True, **blocks, **options) for f in (tiled, uncompiled)]
    for pair in (got, *others):
        for name, x, ref, low in zip(("o", "lse"), pair, refs, lows):
            near(c, name, x, ref, low, largest(ref), FORWARD)
    size = max(map(largest, ref_grads.values()))
    for name, ref in ref_grads.items():
        near(c, f"d{name}", getattr(grads, name), ref, low_grads[name], size, BACKWARD)


# How far float64 may be off, as a share of the largest entry. Narrower types have the
# measuring stick; what is given for them holds where the peer is exact by luck and the stick
# too short: the gradient of a row with one key is 0 to autograd, which sees one probability
# of 1, and the difference of two rounded dot products to the formula with D. A float32 dot
# product of 256 terms may be three times as far off as another that adds them in other order.
FORWARD = {"float64": 1e-13, "float32": 2**-19, "float16": 2**-20, "bfloat16": 2**-20}
BACKWARD = {"float64": 1e-12, "float32": 2**-17, "float16": 2**-8, "bfloat16": 2**-5}


def near(c, name, x, ref, low, size, share):
    """Whether x is close enough to ref."""
    if c.dtype == "float64" or not within(x, ref, low):
        atol = share[c.dtype] * max(1, size)
        np.testing.assert_allclose(x.astype(float), ref, rtol=0, atol=atol, err_msg=f"{name}, {c}")


def name_of(chunk):
    (n, m), head_dim = chunk
    return f"{n}x{m}-{head_dim}"


@pytest.mark.parametrize("chunk", CHOSEN, ids=name_of)
def test_grid(chunk):
    torch.set_num_threads(1)
    for c in CHOSEN[chunk]:
        compare(c)


def test_every_pair_of_values_meets():
    grid, axes = [*cover()], [LENGTHS, HEAD_DIMS, *OTHERS]
    for (i, a), (j, b) in combinations(enumerate(axes), 2):
        missing = {*product(a, b)} - {(c[i], c[j]) for c in grid}
        assert not missing or (i, j) == (0, 1) and all(max(n) > 600 for n, _ in missing)
