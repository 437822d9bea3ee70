"""The gradients of attention written a second time, slowly.

Nothing here comes from the package: one row at a time, one key at a time, the
softmax's derivative as its full Jacobian, and np.longdouble throughout. There is no
log-sum-exp to recompute from, no D, and no tile.
"""
import numpy as np

from oracle import INF, sees, wide


def visible(n, m, length, cu_q, cu_kv, *band):
    """(n, m) bool: what position, length and document let a query see."""
    table = np.zeros((n, m), bool)
    ends_q, ends_kv = ([0, n], [0, int(length)]) if cu_q is None else (list(cu_q), list(cu_kv))
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_kv, ends_kv[1:]):
        for i in range(a, b):
            for j in range(c, d):
                table[i, j] = sees(i - a, j - c, b - a, d - c, *band)
    return table


def spread(x, lead, group):
    """A matrix for every query head, written out."""
    x = x[None] if x.ndim == 2 else x
    return np.broadcast_to(np.repeat(x, group, axis=-3), (*lead, *x.shape[-2:]))


@np.errstate(all="ignore")
def gathered(g, shape, group=1):
    """The gradient of what was spread: the sum over all its copies."""
    if group > 1:
        g = g.reshape(*g.shape[:-3], g.shape[-3] // group, group, *g.shape[-2:]).sum(-3)
    g = g.sum(tuple(range(g.ndim - len(shape))))
    for axis, n in enumerate(shape):
        if n == 1:
            g = g.sum(axis, keepdims=True)
    return g


def row(q, k, v, bias, sink, do, dlse, scale, softcap):
    """One query against the keys it sees: gradients of q, k, v, each bias and the sink."""
    raw = [scale * (q * key).sum() for key in k]
    capped = raw if softcap is None else [softcap * np.tanh(s / softcap) for s in raw]
    logits = [c + b for c, b in zip(capped, bias)]
    seen = [j for j, x in enumerate(logits) if x != -INF]
    everyone = [logits[j] for j in seen] + ([] if sink is None else [sink])
    dq, dk, dv, dbias = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros_like(bias)
    if not everyone:
        return dq, dk, dv, dbias, np.longdouble(0)
    top = max(everyone)
    if top == INF or any(np.isnan(x) for x in everyone):
        top = np.longdouble(np.nan)
    p = [np.exp(x - top) for x in everyone]
    p = [x / sum(p) for x in p]
    dp = [(do * v[j]).sum() for j in seen] + ([] if sink is None else [np.longdouble(0)])
    dlogits = [
        sum(dp[b] * p[b] * ((a == b) - p[a]) for b in range(len(p))) + dlse * p[a] for a in range(len(p))
    ]
    for a, j in enumerate(seen):
        dbias[j] = dlogits[a]
        slope = 1 if softcap is None else 1 / np.cosh(raw[j] / softcap) ** 2
        dq += scale * dlogits[a] * slope * k[j]
        dk[j] = scale * dlogits[a] * slope * q
        dv[j] = p[a] * do
    return dq, dk, dv, dbias, np.longdouble(0) if sink is None else dlogits[-1]


def oracle_vjp(
    q, k, v, do, dlse=None, *, mask=None, bias=None, causal=False, window=None, align=None, softcap=None,
    scale=None, kv_lengths=None, sinks=None, cu_seqlens_q=None, cu_seqlens_kv=None,
):  # fmt: skip
    """The gradients of sum(o * do) + sum(lse * dlse): a dict of np.longdouble arrays."""
    shapes = {"q": np.shape(q), "k": np.shape(k), "v": np.shape(v)}
    (n, d), m = shapes["q"][-2:], shapes["k"][-2]
    heads, kv_heads = ((1, *shapes[name][:-2])[-1] for name in "qk")
    group = heads // kv_heads if kv_heads else 1
    batch = np.broadcast_shapes(*(x[:-3] for x in shapes.values()))
    lead = (*batch, heads)
    q = spread(wide(q), lead, 1)
    k, v = (spread(wide(x), lead, group) for x in (k, v))
    do = wide(do).reshape(*lead, n, v.shape[-1])
    dlse = np.zeros((*lead, n)) if dlse is None else wide(dlse).reshape(*lead, n)
    mask = np.broadcast_to(True if mask is None else mask, (*lead, n, m))
    added = np.broadcast_to(np.longdouble(0) if bias is None else wide(bias), (*lead, n, m))
    lengths = np.broadcast_to(m if kv_lengths is None else kv_lengths, batch)
    scale = 1 / np.sqrt(np.longdouble(d)) if scale is None else np.longdouble(scale)
    softcap = None if softcap is None else np.longdouble(softcap)

    dq, dk, dv, dbias = (np.zeros(x.shape, np.longdouble) for x in (q, k, v, added))
    dsinks = np.zeros(heads, np.longdouble)
    with np.errstate(all="ignore"):
        for head in np.ndindex(*lead):
            band = causal, window, align
            shown = mask[head] & visible(n, m, lengths[head[:-1]], cu_seqlens_q, cu_seqlens_kv, *band)
            sink = None if sinks is None or np.isneginf(sinks[head[-1]]) else wide(sinks)[head[-1]]
            for i in range(n):
                js = [j for j in range(m) if shown[i, j] and added[head][i, j] != -INF]
                g = row(
                    q[head][i], k[head][js], v[head][js], added[head][i, js], sink,
                    do[head][i], dlse[head][i], scale, softcap,
                )  # fmt: skip
                dq[head][i] += g[0]
                dk[head][js] += g[1]
                dv[head][js] += g[2]
                dbias[head][i, js] += g[3]
                dsinks[head[-1]] += g[4]
    grads = {"q": gathered(dq, shapes["q"])}
    grads |= {name: gathered(x, shapes[name], group) for name, x in (("k", dk), ("v", dv))}
    grads["bias"] = None if bias is None else gathered(dbias, np.shape(bias))
    grads["sinks"] = None if sinks is None else dsinks
    return grads
