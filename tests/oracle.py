"""Attention written a second time, slowly, and how close is close enough.

Nothing here comes from the package: a loop over rows, a loop over keys, and
np.longdouble throughout.
"""
import numpy as np

INF = np.longdouble(np.inf)


def wide(x):
    """x in np.longdouble; the small types of ml_dtypes go through float32."""
    x = np.asarray(x)
    if x.dtype.kind == "f" and x.dtype.itemsize >= 8:
        return x.astype(np.longdouble)
    return x.astype(np.float32).astype(np.longdouble)


def sees(i, j, seq_q, seq_kv, causal=False, window=None, align=None):
    """Whether query i may look at key j, by position within their document."""
    left, right = (None, None) if window is None else window
    shift = {None: 0, "top_left": 0, "bottom_right": seq_kv - seq_q}.get(align, align)
    return (
        (not causal or j <= i + shift)
        and (left is None or i + shift - left <= j)
        and (right is None or j <= i + shift + right)
    )


def document(shape, rows, cols, band):
    """A table of that shape, False but where a query of `rows` sees a key of `cols`."""
    table = np.zeros(shape, bool)
    for i in range(*rows):
        for j in range(*cols):
            own = i - rows[0], j - cols[0], rows[1] - rows[0], cols[1] - cols[0]
            table[i, j] = sees(*own, **band)
    return table


def visible(seq_q, seq_kv, *, kv_lengths=None, cu_seqlens_q=None, cu_seqlens_kv=None, **band):
    """The same for all pairs: (seq_q, seq_kv) bool; with kv_lengths (..., 1, seq_q, seq_kv)."""
    shape = seq_q, seq_kv
    if kv_lengths is not None:
        tables = [document(shape, (0, seq_q), (0, int(m)), band) for m in np.ravel(kv_lengths)]
        return np.reshape(np.array(tables, bool), (*np.shape(kv_lengths), 1, *shape))
    if cu_seqlens_q is None:
        return document(shape, (0, seq_q), (0, seq_kv), band)
    parts = zip(zip(cu_seqlens_q, cu_seqlens_q[1:]), zip(cu_seqlens_kv, cu_seqlens_kv[1:]))
    return np.any([np.zeros(shape, bool), *(document(shape, *part, band) for part in parts)], axis=0)


def whole(q, k, v, mask, bias):
    """All five with every leading axis written out; a heads axis is added where none is."""
    q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if kv_heads:  # query head h reads key/value head h // group
        k, v = (np.repeat(x, heads // kv_heads, axis=-3) for x in (k, v))
    batch = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    q, k, v = (np.broadcast_to(x, (*batch, heads, *x.shape[-2:])) for x in (q, k, v))
    shape = (*batch, heads, q.shape[-2], k.shape[-2])
    mask = np.broadcast_to(True if mask is None else mask, shape)
    bias = np.broadcast_to(np.longdouble(0) if bias is None else wide(bias), shape)
    return q, k, v, mask, bias


def row(q, k, v, shown, bias, sink, scale, softcap):
    """One query against the keys it is shown: its output and log-sum-exp."""
    logits, values = [], []
    if sink != -INF:  # one more logit, and a value of zeros
        logits.append(sink)
        values.append(np.zeros(v.shape[-1], np.longdouble))
    for j in range(len(k)):
        if not shown[j] or bias[j] == -INF:
            continue  # hidden: what the key and the value hold is never looked at
        s = scale * (q * k[j]).sum()
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        s = s + bias[j]
        if s != -INF:
            logits.append(s)
            values.append(v[j])
    if not logits:
        return np.zeros(v.shape[-1], np.longdouble), -INF
    if any(np.isnan(s) or s == INF for s in logits):
        return np.full(v.shape[-1], np.longdouble(np.nan)), np.longdouble(np.nan)
    top = max(logits)
    weights = [np.exp(s - top) for s in logits]
    total = sum(weights)
    o = sum((p * x for p, x in zip(weights, values)), np.zeros(v.shape[-1], np.longdouble))
    return o / total, top + np.log(total)


def oracle(q, k, v, *, mask=None, bias=None, sinks=None, softcap=None, scale=None, **position):
    """o and lse in np.longdouble, row by row."""
    flat = max(np.ndim(x) for x in (q, k, v)) == 2
    q, k, v, mask, bias = whole(wide(q), wide(k), wide(v), mask, bias)
    n, m = q.shape[-2], k.shape[-2]
    scale = 1 / np.sqrt(np.longdouble(q.shape[-1])) if scale is None else np.longdouble(scale)
    softcap = None if softcap is None else np.longdouble(softcap)
    shown = mask & visible(n, m, **position)
    sinks = np.full(q.shape[-3], -INF) if sinks is None else wide(sinks)
    o = np.zeros((*q.shape[:-1], v.shape[-1]), np.longdouble)
    lse = np.zeros(q.shape[:-1], np.longdouble)
    with np.errstate(all="ignore"):
        for at in np.ndindex(q.shape[:-1]):
            head, sink = at[:-1], sinks[at[-2]]
            o[at], lse[at] = row(q[at], k[head], v[head], shown[at], bias[at], sink, scale, softcap)
    return (o[0], lse[0]) if flat else (o, lse)


def plain(dtype, q, k, v, *, mask=None, bias=None, sinks=None, softcap=None, scale=None, **position):
    """o and lse by the equation, every step rounded to dtype: the `low` of the stick."""
    flat = max(np.ndim(x) for x in (q, k, v)) == 2
    work = np.float64 if np.dtype(dtype) == np.float64 else np.float32

    def rounded(x):
        return np.asarray(x).astype(dtype).astype(work)

    q, k, v, mask, bias = whole(*(np.asarray(x).astype(work) for x in (q, k, v)), mask, bias)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with np.errstate(all="ignore"):
        s = rounded(q @ np.swapaxes(rounded(work(scale) * k), -1, -2))
        if softcap is not None:
            s = rounded(softcap * np.tanh(s.astype(np.float64) / softcap))
        s = rounded(s + bias.astype(work))
        s = np.where(mask & visible(*s.shape[-2:], **position), s, -np.inf)
        sink = -np.inf if sinks is None else rounded(sinks)[:, None, None]
        top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
        base = np.where(top == -np.inf, 0, top)
        p = rounded(np.exp(rounded(s - base)))
        total = rounded(p.sum(-1, keepdims=True) + np.exp(rounded(sink - base)))
        o = rounded(rounded(p / np.where(total == 0, 1, total)) @ v)
        lse = rounded(top + rounded(np.log(total)))[..., 0]
    return (o[0], lse[0]) if flat else (o, lse)


def largest(x):
    """max|x| over the finite entries, 0 if there are none."""
    x = np.abs(wide(x))
    return x[np.isfinite(x)].max(initial=0)


def limit(dtype, ref, low, size=1.0):
    """FlashAttention's measuring stick: the largest error allowed."""
    with np.errstate(all="ignore"):
        r = np.asarray(ref).astype(dtype)
        noise = (r + r.dtype.type(0.3) - r.dtype.type(0.3)) - r
        reach = 3 * largest(wide(low) - ref) + 2 * largest(noise)
    return max(reach, 1e-14 * max(1.0, size)) if r.dtype == np.float64 else reach


def within(x, ref, low=None, size=1.0):
    """Whether x is as close to ref as it must be; size is max|v| (only float64 asks)."""
    x, ref = np.asarray(x), np.asarray(ref)
    low = ref if low is None else low  # then nothing is allowed but the noise of the type
    if x.shape != ref.shape:
        return False
    odd = ~np.isfinite(ref)
    if not np.array_equal(wide(x)[odd], ref[odd].astype(np.longdouble), equal_nan=True):
        return False
    if np.isnan(x[~odd].astype(np.float64)).any():
        return False
    error = np.abs(wide(x)[~odd] - ref[~odd].astype(np.longdouble))
    return bool(error.max(initial=0) <= limit(x.dtype, ref, low, size))
