"""The fast loop: the same tiles and rules as chapter 4's, on any number of threads."""
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

import flashlit
from flashlit import fast
from flashlit.compiled import exponentials
from flashlit.hbm import HBM, Meter
from helpers import DTYPES, agree, check, normal, qkv, quick, same, tiled
from test_decode import size
from test_properties import calls

MANY = {"block_q": 16, "block_kv": 32}
OPTIONS = {
    "plain": {}, "causal": {"causal": True, "align": "bottom_right"},
    "window": {"window": (20, 3), "align": "top_left"}, "softcap": {"softcap": 2.0}, "scale": {"scale": 3.0},
    "sinks": {"sinks": np.arange(4.0)}, "kv_lengths": {"kv_lengths": np.array([[150], [70]])},
    "bias": {"bias": normal((4, 1, 150))}, "mask": {"mask": normal((130, 150)) > -1},
}  # fmt: skip
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.fixture(params=["numba", "numpy"])
def step(request, monkeypatch):
    """Both steps: the compiled one and NumPy's."""
    monkeypatch.setattr(fast, "FEW", 0)  # threads even for small calls
    if request.param == "numpy":
        monkeypatch.setattr(fast, "_step", lambda: fast._exponentials)
    return request.param


def blas_threads():
    return [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]


def inputs(dtype="float32"):
    return qkv(130, 150, 8, 6, (2, 1, 4), (2, 1, 2), dtype)


def typed(options, dtype):
    """Bias and sinks in a type that goes with q's."""
    other = "float64" if dtype == "float64" else "float32"
    return {k: x.astype(other) if k in ("bias", "sinks") else x for k, x in options.items()}


# the same answer


@given(calls(), st.sampled_from([(None, None), (1, 1), (3, 2), (16, 5)]))
def test_both_steps_are_the_oracle(call, blocks):
    given_, options = call
    options |= dict(zip(("block_q", "block_kv"), blocks))
    want = tiled(*given_, return_lse=True, **options)
    got = quick(*given_, return_lse=True, **options)
    agree(got, want, size(*want))
    options = {k: x for k, x in options.items() if "block" not in k}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "_step", lambda: fast._exponentials)
        check(quick(*given_, return_lse=True, **options), *given_, **options)


@every_option
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(step, dtype, options):
    given_, options = inputs(dtype), typed(options, dtype) | MANY
    want = quick(*given_, return_lse=True, threads=1, **options)
    for threads in (2, 3, 16, None):
        same(quick(*given_, return_lse=True, threads=threads, **options), want)


@every_option
def test_an_entry_alone_has_the_bits_it_has_in_a_batch(step, options):
    q, k, v = inputs()
    options = typed(options, "float32")
    whole = quick(q, k, v, return_lse=True, **options)
    for b in range(2):
        own = {k: x[b] if k == "kv_lengths" else x for k, x in options.items()}
        alone = quick(q[b], k[b], v[b], return_lse=True, **own)
        same(alone, [x[b] for x in whole])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["k", "v"])
def test_poison_out_of_sight_changes_no_bit(step, where, bad):
    q, k, v = inputs()
    options = {"kv_lengths": np.array([[100], [70]]), "causal": True, "align": "bottom_right", **MANY}
    want = quick(q, k, v, return_lse=True, **options)
    x = k if where == "k" else v
    x[0, ..., 100:, :] = x[1, ..., 70:, :] = bad
    same(quick(q, k, v, return_lse=True, **options), want)


def test_a_visible_nan_spoils_its_rows_alone(step):
    q, k, v = inputs()
    want = quick(q, k, v, causal=True, align="top_left", **MANY)
    v[:, :, 1, 60, 2] = np.nan
    got = quick(q, k, v, causal=True, align="top_left", **MANY)
    assert np.isnan(got[:, :, 2:, 60:, 2]).all()
    got[:, :, 2:, 60:, 2] = want[:, :, 2:, 60:, 2]
    same([got], [want])


def test_inputs_are_left_alone_and_may_be_read_only(step):
    given_ = inputs()
    copies = [x.copy() for x in given_]
    for x in given_:
        x.flags.writeable = False
    quick(*given_, **MANY)
    same(given_, copies)


# the same tiles


@pytest.mark.parametrize("blocks", [(16, 32), (7, 50), (200, 200)])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "kv_lengths"])
def test_the_tiles_are_those_of_the_metered_loop(monkeypatch, name, blocks):
    """Columns are cut to what is in reach; otherwise each tile is visited once by both."""
    q, k, v = inputs()
    options = dict(OPTIONS[name], block_q=blocks[0], block_kv=blocks[1])
    slow, quickly = [], []
    keys, loader = fast.Call.keys, fast._loader

    def metered_keys(call, x, head, cols):
        slow.append((x is not call.k, head[:-1], head[-1].start // call.group, cols))
        return keys(call, x, head, cols)

    monkeypatch.setattr(fast.Call, "keys", metered_keys)
    meter = Meter()
    flashlit.flash_attention(*(HBM(x, meter, "x") for x in (q, k, v)), **options)
    monkeypatch.setattr(fast.Call, "keys", keys)

    def spy(call, x, head):
        load = loader(call, x, head)
        first, last = head[-1].start // call.group, -(-head[-1].stop // call.group)

        def noted(cols):
            if head[-1].start % call.group == 0:  # later parts of a group load it again
                quickly.extend((x is not call.k, head[:-1], h, cols) for h in range(first, last))
            return load(cols)

        return noted

    monkeypatch.setattr(fast, "_loader", spy)
    flashlit.flash_attention(q, k, v, threads=1, **options)
    assert len(slow) == len(quickly) > 0

    def key(tile):
        return (*tile[:3], tile[3].start // blocks[1])

    assert sorted(map(key, slow)) == sorted(map(key, quickly))
    wide = sorted(((key(x), x[3].start, x[3].stop) for x in slow))
    cut = sorted(((key(x), x[3].start, x[3].stop) for x in quickly))
    assert all(a[1] <= b[1] < b[2] <= a[2] for a, b in zip(wide, cut) if name == "plain")


# BLAS, interrupts, forks


def test_blas_is_as_before_after_a_call_and_an_error(monkeypatch):
    before = blas_threads()
    flashlit.flash_attention(*inputs(), threads=2, **MANY)
    assert blas_threads() == before
    monkeypatch.setattr(fast, "FEW", 0)
    monkeypatch.setattr(fast, "_scores", lambda *_: 1 / 0)
    for threads in (1, 2):
        with pytest.raises(ZeroDivisionError):
            flashlit.flash_attention(*inputs(), threads=threads, **MANY)
        assert blas_threads() == before and fast._one_thread.calls == 0


def test_overlapping_calls(monkeypatch):
    """Whoever ends first, BLAS keeps to one thread until the last has ended."""
    before, seen = blas_threads(), []
    monkeypatch.setattr(fast, "FEW", 0)
    gates = [threading.Event() for _ in range(3)]

    def work(i):
        gates[i].wait(10)
        seen.append(set(blas_threads()))

    users = [threading.Thread(target=fast.run, args=(work, [(i,)] * 2, 2)) for i in range(3)]
    for user in users:
        user.start()
    time.sleep(0.05)
    for i in (1, 2, 0):
        gates[i].set()
        users[i].join(10)
    assert seen == [{1}] * 6 and blas_threads() == before


def test_calls_from_several_threads(monkeypatch):
    monkeypatch.setattr(fast, "FEW", 0)
    given_, results = inputs(), {}
    want = quick(*given_, return_lse=True, **MANY)

    def user(i):
        results[i] = quick(*given_, return_lse=True, threads=1 + i % 3, **MANY)

    users = [threading.Thread(target=user, args=(i,)) for i in range(6)]
    for x in users:
        x.start()
    for x in users:
        x.join(30)
    assert len(results) == 6
    for got in results.values():
        same(got, want)


INTERRUPTED = """
import numpy as np, time, flashlit
from flashlit import fast
from threadpoolctl import threadpool_info
blas = lambda: [x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"]
before, x = blas(), np.ones((2, 32768, 64), np.float32)
flashlit.flash_attention(x[:, :64], x[:, :64], x[:, :64])
print("ready", flush=True)
try:
    flashlit.flash_attention(x, x, x, threads=THREADS)
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
assert blas() == before and fast._one_thread.calls == 0
o = flashlit.flash_attention(x[:, :2048], x[:, :2048], x[:, :2048])
assert np.abs(o - 1).max() < 1e-5
print("usable")
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_leaves_the_process_usable(threads):
    code = INTERRUPTED.replace("THREADS", str(threads))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0].split() == ["interrupted", "usable"] and child.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_is_forked_while_a_call_is_at_work():
    before, at_work, go = blas_threads(), threading.Event(), threading.Event()

    def work(_):
        at_work.set()
        go.wait(30)

    user = threading.Thread(target=fast.run, args=(work, [(0,), (1,)], 2))
    user.start()
    at_work.wait(10)
    child = os.fork()
    if child == 0:
        ok = blas_threads() == before
        o = flashlit.flash_attention(*[np.ones((4, 1000, 8), np.float32)] * 3, threads=2)
        os._exit(0 if ok and np.abs(o - 1).max() < 1e-5 and blas_threads() == before else 1)
    go.set()
    user.join(10)
    assert os.waitpid(child, 0)[1] == 0 and blas_threads() == before


# memory


@pytest.mark.parametrize("n, options", [(8192, {"causal": True}), (131_072, {"window": (64, 0)})])
def test_memory_does_not_grow_with_the_square(n, options):
    q = k = v = np.ones((1, n, 8), np.float32)
    out = np.empty_like(q)
    flashlit.flash_attention(q[:, :2048], k[:, :2048], v[:, :2048], **options)
    tracemalloc.start()
    flashlit.flash_attention(q, k, v, out=out, threads=2, **options)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20


# what a caller may say


@pytest.mark.parametrize("bad", [0, -1, True, 2.5, "2"])
def test_threads(bad):
    with pytest.raises((TypeError, ValueError), match="threads is an integer >= 1 or None"):
        flashlit.flash_attention(*inputs(), threads=bad)


def test_progress(capsys, monkeypatch):
    with pytest.raises(TypeError, match="progress is True or False, not 1"):
        flashlit.flash_attention(*inputs(), progress=1)
    flashlit.flash_attention(*inputs(), progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "100%" in err
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"flashlit\[progress\]"):
        flashlit.flash_attention(*inputs(), progress=True)


def test_without_numba():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import numpy as np, flashlit; from flashlit import fast\n"
        "x = np.ones((2, 40, 8)); o = flashlit.flash_attention(x, x, x, causal=True)\n"
        "assert np.abs(o - 1).max() < 1e-14 and fast._step() is fast._exponentials"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# the compiled step


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_to_a_unit_in_the_last_place(dtype):
    least = np.log(np.finfo(dtype).tiny)
    s = np.linspace(least, 0, 400_001).astype(dtype)[None]
    exact = np.exp(s.astype(np.longdouble))
    exponentials(s, np.zeros(1, dtype))
    assert (np.abs(s - exact) / np.spacing(exact.astype(dtype))).max() < 1
    below = np.array([[2 * least, -np.inf, 0]], dtype)
    exponentials(below, np.zeros(1, dtype))
    assert below.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_at_every_width(dtype):
    for n in (*range(1, 71), 500, 512, 513):
        s = normal((3, n), dtype, n)
        s[0], m = -np.inf, np.array([-np.inf, -np.inf, 0.5], dtype)
        want = np.maximum(m, s.max(-1))
        p = s.copy()
        exponentials(p, m)
        assert np.array_equal(m, want) and (p[0] == 0).all()
        np.testing.assert_allclose(p[1:], np.exp(s[1:] - want[1:, None]), rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_exponentials_of_what_is_not_finite(bad):
    for j in range(20):
        s = normal((2, 20), seed=j)
        s[0, j] = bad
        m = np.full(2, -np.inf)
        exponentials(s, m)
        assert np.isnan(s[0, j]) and np.isfinite(s[1]).all()
        assert np.isfinite(np.delete(s[0], j)).all()
