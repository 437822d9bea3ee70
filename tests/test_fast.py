"""The fast loop: the same tiles and rules as chapter 4's, on any number of threads."""
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import ThreadpoolController, threadpool_info, threadpool_limits

import flashlit
from flashlit import fast
from flashlit.compiled import exponentials
from flashlit.hbm import HBM, Meter
from flashlit.inputs import check as checked
from helpers import DTYPES, agree, check, normal, qkv, quick, same, tiled, uncompiled
from test_decode import size
from oracle import visible
from test_properties import BLOCKS, calls

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
    agree(uncompiled(*given_, return_lse=True, **options), want, size(*want))
    options = {k: x for k, x in options.items() if "block" not in k}
    check(uncompiled(*given_, return_lse=True, **options), *given_, **options)


@given(calls(dtypes=["float32"]), BLOCKS, st.integers(2, 5))
def test_threads_and_every_option_at_once(call, blocks, threads):
    given_, options = call
    options |= {"return_lse": True, **blocks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "FEW", 0)
        for path in (quick, uncompiled):
            same(path(*given_, threads=threads, **options), path(*given_, threads=1, **options))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"bias": normal((4, 1, 900), "float32")}], ids=str)
def test_threads_that_do_work_at_once(step, options):
    """Tiles of default size, each long enough that another thread is at work beside it."""
    given_ = qkv(900, 900, 32, lead=(4,), kv_lead=(2,), dtype="float32")
    want = quick(*given_, return_lse=True, threads=1, **options)
    for threads in (2, 3, 16):
        same(quick(*given_, return_lse=True, threads=threads, **options), want)


@every_option
@pytest.mark.parametrize("group", [2, 1])
@pytest.mark.parametrize("blocks", [(None, None), (16, 32), (60, 64), (130, 7)])
def test_any_chunk_of_heads(step, blocks, group, options):
    """All heads in one task, whole groups, a part of one: what chapter 4 gives, a group at a time."""
    given_ = qkv(130, 150, 8, 6, (2, 1, 4), (2, 1, 4 // group))
    options = options | dict(zip(("block_q", "block_kv"), blocks), return_lse=True)
    want = tiled(*given_, **options)
    agree(quick(*given_, **options), want, size(*want))


@pytest.mark.parametrize("n, m", [(128, 3000), (63, 5000), (101, 2048), (256, 1500), (1, 2100), (5, 70)])
def test_a_head_alone_has_the_bits_it_has_among_others(step, n, m):
    q, k, v = (normal((4, x, 32), "float32", i) for i, x in enumerate((n, m, m)))
    want = quick(q, k, v, return_lse=True)
    for h in (1, 2, 3):
        same(quick(q[:h], k[:h], v[:h], return_lse=True), [x[:h] for x in want])


def test_heads_of_a_task_do_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(fast, "TASK", 40_000)
    one, many = (fast._heads(checked(*qkv(60, 150, lead=(n, 8))), 60) for n in (1, 3))
    assert len(one) > 1 and [h[-1] for h in many] == 3 * [h[-1] for h in one]


def test_a_cache_in_pages_counts_all_of_them():
    q, k, v = qkv(1, 2048, 64, lead=(1, 8))
    pages = [x.reshape(8, 16, 128, 64).swapaxes(0, 1) for x in (k, v)]
    table = np.arange(16)[None]
    assert fast.crew(checked(q, k, v), 5) == fast.crew(checked(q, *pages, block_table=table), 5) == 1
    q, k, v = qkv(1, 8192, 64, lead=(1, 8))
    pages = [x.reshape(8, 64, 128, 64).swapaxes(0, 1) for x in (k, v)]
    table = np.arange(64)[None]
    assert fast.crew(checked(q, k, v), 5) == fast.crew(checked(q, *pages, block_table=table), 5) == 5


def test_a_call_gets_the_threads_it_asks_for(monkeypatch):
    asked = []
    monkeypatch.setattr(fast, "run", lambda work, tasks, threads, progress: asked.append(threads))
    monkeypatch.setattr(fast, "cores", lambda: 7)
    for n, threads in ((2000, None), (2000, 1), (2000, 3), (20, None), (20, 3)):
        flashlit.flash_attention(*qkv(n, n, lead=(1,)), threads=threads)
    assert asked == [7, 1, 3, 1, 1]


@every_option
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(step, dtype, options):
    given_, options = inputs(dtype), typed(options, dtype) | MANY
    want = quick(*given_, return_lse=True, threads=1, **options)
    for threads in (2, 3, 16, None):
        same(quick(*given_, return_lse=True, threads=threads, **options), want)


@every_option
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [{}, MANY], ids=["default", "many"])
def test_an_entry_alone_has_the_bits_it_has_in_a_batch(step, blocks, dtype, options):
    q, k, v = inputs(dtype)
    options = typed(options, dtype) | blocks
    whole = quick(q, k, v, return_lse=True, **options)
    for b in range(2):
        own = {k: x[b] if k == "kv_lengths" else x for k, x in options.items()}
        alone = quick(q[b], k[b], v[b], return_lse=True, **own)
        same(alone, [x[b] for x in whole])


HIDING = {  # no row sees keys 100 to 119
    "kv_lengths": {"kv_lengths": np.array([[100], [70]]), "causal": True, "align": "bottom_right"},
    "mask": {"mask": (np.arange(150) < 100) | (np.arange(150) >= 120)},
    "bias": {"bias": np.where(np.arange(150) // 20 == 5, -np.inf, 0).astype(np.float32)},
    "window": {"window": (200, 5), "align": -40},
}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("hiding", HIDING.values(), ids=HIDING)
def test_poison_out_of_sight_changes_no_bit(step, hiding, where, bad):
    q, k, v = inputs()
    options = hiding | MANY
    want = quick(q, k, v, return_lse=True, **options)
    (k if where == "k" else v)[..., 100:120, :] = bad
    same(quick(q, k, v, return_lse=True, **options), want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("name", ["causal", "window", "sinks"])
def test_poison_changes_no_bit_of_rows_that_do_not_see_it(step, name, where, bad):
    q, k, v = inputs()
    options = typed(OPTIONS["causal"] | OPTIONS[name], "float32") | MANY
    want = quick(q, k, v, return_lse=True, **options)
    (k if where == "k" else v)[..., 60, :] = bad
    blind = ~visible(130, 150, **{x: options[x] for x in ("causal", "window", "align") if x in options})[:, 60]
    got = quick(q, k, v, return_lse=True, **options)
    assert blind.any() and np.isnan(got[0]).any() == (where == "v" and np.isnan(bad) or where == "k")
    same([got[0][..., blind, :], got[1][..., blind]], [want[0][..., blind, :], want[1][..., blind]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_poison_in_an_entry_changes_no_bit_of_another(step, bad):
    q, k, v = inputs()
    want = quick(q, k, v, return_lse=True, **MANY)
    for x in (q, k, v):
        x[0] = bad
    same([x[1] for x in quick(q, k, v, return_lse=True, **MANY)], [x[1] for x in want])


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
    assert sorted(slow, key=str) == sorted(quickly, key=str) or name in ("causal", "window")


BANDS = [("causal", -20), ("causal", 0), ("causal", 20), ((0, 0), 7), ((20, 3), 0), ((None, 5), 30), ((3, None), -9)]


@pytest.mark.parametrize("band, shift", BANDS)
@pytest.mark.parametrize("blocks", [(16, 32), (7, 50), (1, 1), (200, 200)])
def test_a_tile_reaches_no_further_than_its_rows_see(monkeypatch, blocks, band, shift):
    """Every tile in which a score exists, once, from the first column with one to the last."""
    n, m, (high, wide), seen = 60, 70, blocks, []
    options = {"align": shift} | ({"causal": True} if band == "causal" else {"window": band})
    loader, walk, at = fast._loader, fast._walk, []

    def noted(call, head, rows, *rest, **how):
        at[:] = [rows]
        return walk(call, head, rows, *rest, **how)

    def spy(call, x, head):
        load = loader(call, x, head)
        return lambda cols: (x is call.k and seen.append((*at, cols)), load(cols))[1]

    monkeypatch.setattr(fast, "_walk", noted)
    monkeypatch.setattr(fast, "_loader", spy)
    flashlit.flash_attention(*qkv(n, m, 4, lead=(1,)), block_q=high, block_kv=wide, **options)
    shown, want = visible(n, m, **options), []
    for i in range(0, n, high):
        rows = slice(i, min(i + high, n))
        for j in range(0, m, wide):
            some = j + np.flatnonzero(shown[rows, j : j + wide].any(0))
            if some.size:
                want.append((rows, slice(int(some[0]), int(some[-1]) + 1)))
    assert sorted(seen, key=str) == sorted(want, key=str)


# BLAS, interrupts, forks


@pytest.fixture
def three():
    """A BLAS that works on three threads, however the tests were started."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    before = [x.num_threads for x in libraries]
    for x in libraries:
        fast._set_threads(x, 3)
    assert {*blas_threads()} == {3}
    yield
    after = {*blas_threads()}
    for x, threads in zip(libraries, before):
        fast._set_threads(x, threads)
    assert after == {3} and not fast._one_thread.holders


def test_blas_is_as_before_after_a_call_and_an_error(three, monkeypatch):
    before = blas_threads()
    flashlit.flash_attention(*inputs(), threads=2, **MANY)
    assert blas_threads() == before
    monkeypatch.setattr(fast, "FEW", 0)
    monkeypatch.setattr(fast, "_scores", lambda *_: 1 / 0)
    for threads in (1, 2):
        with pytest.raises(ZeroDivisionError):
            flashlit.flash_attention(*inputs(), threads=threads, **MANY)
        assert blas_threads() == before and not fast._one_thread.holders


def test_a_limit_of_the_callers_own_works_after_a_call(three):
    for threads in (1, 2):
        flashlit.flash_attention(*qkv(1100, 1100, lead=(1,)), threads=threads)
        with threadpool_limits(1, user_api="blas"):
            assert {*blas_threads()} == {1}
        assert {*blas_threads()} == {3}


def test_no_thread_keeps_control_of_blas(three):
    """Neither one of the caller's own, nor the helper that is the last to leave a call."""
    ready, done, both, seen = threading.Event(), threading.Event(), threading.Barrier(2), []

    def other():
        with threadpool_limits(2, user_api="blas"):
            ready.set()
            done.wait(60)

    def work(main):
        both.wait(20)
        seen.append({*blas_threads()})
        if threading.current_thread() is not main:
            time.sleep(0.05)

    own = threading.Thread(target=other)
    own.start()
    ready.wait(20)
    fast.run(work, [(threading.current_thread(),)] * 2, 2)
    assert seen == [{1}, {1}] and {*blas_threads()} == {2}
    with threadpool_limits(1, user_api="blas"):
        assert {*blas_threads()} == {1}
    done.set()
    own.join(20)
    for lib in fast._blas():
        fast._set_threads(lib, 3)


@pytest.mark.parametrize("calls", range(1, 50))
def test_an_interrupt_anywhere_in_the_hold(three, calls):
    """Ctrl-C is seen where a function begins or returns: after so many of these, BLAS is as before."""
    left = [calls]

    def profile(frame, event, arg):
        if frame.f_code.co_filename == fast.__file__ and event in ("call", "c_return"):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    before = sys.getprofile()
    try:
        sys.setprofile(profile)
        with fast._one_thread.hold():
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
    assert {*blas_threads()} == {3} and not fast._one_thread.holders


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_a_task_ends_the_call(three, threads):
    done = []

    def work(i):
        if i == 3:
            raise KeyError("load failed")
        time.sleep(0.002)
        done.append(i)

    with pytest.raises(KeyError, match="load failed"):
        fast.run(work, [(i,) for i in range(500)], threads)
    assert {0, 1, 2} <= {*done} and len(done) < 100
    time.sleep(0.01)
    assert len(done) < 100  # no thread goes on by itself


def test_an_interrupt_before_the_caller_works(monkeypatch):
    """The helper that has begun takes no further task, and is waited for."""
    done, begun = [], threading.Event()

    def work(i):
        begun.set()
        time.sleep(0.002)
        done.append(i)

    class Queue:
        def put(self, job):
            if begun.is_set():
                raise KeyboardInterrupt
            threading.Thread(target=job).start()
            begun.wait()

    monkeypatch.setattr(fast, "_helpers", lambda count: Queue())
    with pytest.raises(KeyboardInterrupt):
        fast.run(work, [(i,) for i in range(500)], 3)
    assert done and len(done) < 100
    before = len(done)
    time.sleep(0.01)
    assert len(done) == before


def test_an_error_that_only_a_helper_meets(monkeypatch):
    """The caller raises it, though its own tasks went well."""
    caller, failed = threading.current_thread(), threading.Event()

    def work(i):
        if threading.current_thread() is not caller:
            failed.set()
            raise KeyError("of a helper")
        assert failed.wait(10)

    with pytest.raises(KeyError, match="of a helper"):
        fast.run(work, [(i,) for i in range(2)], 2)


def test_threads_that_cannot_be_started(three, monkeypatch):
    """The call does with those that there are."""
    start, started = threading.Thread.start, []

    def refuse(thread):
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    fast._helpers.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    fast.run(lambda i: done.append(i), [(i,) for i in range(50)], 5)
    fast._helpers.cache_clear()
    assert sorted(done) == [*range(50)] and len(started) == 2


def test_helpers_keep_nothing_of_a_call():
    """Nor does the call keep what a helper has done."""
    class Tile:
        pass

    both, tile = threading.Barrier(2), Tile()
    gone = weakref.ref(tile)
    fast.run(lambda tile: both.wait(20), [(tile,)] * 2, 2)
    del tile
    for _ in range(100):
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None


ENDING = """
import atexit, threading, time, numpy as np, flashlit
x = np.ones((8, 1100, 16), np.float32)
def call(name):
    o = flashlit.flash_attention(x, x, x, threads=2)
    print(name, bool(np.abs(o - 1).max() < 1e-5), flush=True)
def late():
    time.sleep(0.3)
    call("thread")
atexit.register(call, "exit")
threading.Thread(target=late).start()
"""


def test_calls_while_python_ends():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=100)
    assert sorted(done.stdout.splitlines()) == ["exit True", "thread True"] and done.stderr == ""


@pytest.mark.parametrize("threads", [1, 2])
def test_an_output_that_cannot_be_written(three, monkeypatch, threads):
    class Full(np.ndarray):
        def __setitem__(self, *_):
            raise OSError("no space left")

    monkeypatch.setattr(fast, "FEW", 0)
    given_ = inputs()
    out = np.zeros((2, 1, 4, 130, 6), np.float32).view(Full)
    with pytest.raises(OSError, match="no space left"):
        quick(*given_, out=out, threads=threads, **MANY)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
@pytest.mark.parametrize("threads", [1, 2, (1, 2, 3)])
def test_overlapping_calls(three, threads, order):
    """Each ends when its own work is done; until the last has ended BLAS keeps to one thread."""
    threads = threads if isinstance(threads, tuple) else (threads,) * 3
    seen, gates, at_work = [], [threading.Event() for _ in range(3)], threading.Semaphore(0)

    def work(i):
        at_work.release()
        gates[i].wait(60)
        seen.append({*blas_threads()})

    users = [threading.Thread(target=fast.run, args=(work, [(i,)] * 2, threads[i])) for i in range(3)]
    try:
        for user in users:
            user.start()
            assert at_work.acquire(timeout=20), "a call waits for another"
        for i in order:
            gates[i].set()
            users[i].join(20)
            assert not users[i].is_alive()
    finally:
        [gate.set() for gate in gates]
        [user.join(30) for user in users]
    assert seen == [{1}] * 6


def test_calls_from_several_threads(three, monkeypatch):
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
import numpy as np, signal, threading, flashlit
from flashlit import fast
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from threadpoolctl import threadpool_info
blas = lambda: {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}
for x in fast._blas():
    fast._set_threads(x, 3)
x = np.ones((2, 65536, 64), np.float32)
other, at_work, ended = threading.Event(), threading.Semaphore(0), []
flashlit.flash_attention(x[:, :64], x[:, :64], x[:, :64])
if BESIDE:  # a long call of another thread goes on meanwhile
    work = lambda i: at_work.release() or other.wait(20) or ended.append(i)
    beside = threading.Thread(target=fast.run, args=(work, [(0,), (1,)], THREADS))
    beside.start()
    [at_work.acquire() for _ in range(2)]
tile = fast.fast_state
def first(*args):
    fast.fast_state = tile
    print("at work", flush=True)
    return tile(*args)
fast.fast_state = first
try:
    flashlit.flash_attention(x, x, x, threads=THREADS)
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
if BESIDE:
    print("late" if ended else "beside")
    other.set()
    beside.join()
assert blas() == {3} and not fast._one_thread.holders
o = flashlit.flash_attention(x[:, :2048], x[:, :2048], x[:, :2048])
assert np.abs(o - 1).max() < 1e-5 and blas() == {3}
print("usable")
"""


@pytest.mark.parametrize("threads, beside", [(1, False), (2, False), (2, True)])
def test_an_interrupt_leaves_the_process_usable(threads, beside):
    code = INTERRUPTED.replace("THREADS", str(threads)).replace("BESIDE", str(beside))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "at work\n"
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=60)[0].replace("at work", "").split()
    assert said == ["interrupted", *["beside"] * beside, "usable"] and child.returncode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_is_forked_while_a_call_is_at_work(three):
    before, at_work, go = blas_threads(), threading.Event(), threading.Event()

    def work(_):
        at_work.set()
        go.wait(30)

    user = threading.Thread(target=fast.run, args=(work, [(0,), (1,)], 2))
    user.start()
    at_work.wait(10)
    child = os.fork()
    if child == 0:
        ok = blas_threads() == before and not fast._helpers.cache_info().currsize  # none of its parent's
        o = flashlit.flash_attention(*[np.ones((4, 1000, 8), np.float32)] * 3, threads=2)
        os._exit(0 if ok and np.abs(o - 1).max() < 1e-5 and blas_threads() == before else 1)
    go.set()
    user.join(10)
    assert os.waitpid(child, 0)[1] == 0 and blas_threads() == before


# memory


@pytest.mark.parametrize("n, options", [(8192, {"causal": True}), (8192, {"softcap": 3.0}), (131_072, {"window": (64, 0)})])
def test_memory_does_not_grow_with_the_square(n, options):
    q = k = v = np.ones((1, n, 64), np.float32)
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
    monkeypatch.setattr(fast, "FEW", 0)
    for threads in (1, 2):
        quick(*inputs(), progress=True, threads=threads, block_q=33)
        out, err = capsys.readouterr()
        assert out == "" and "100%" in err and "8/8" in err  # 2 entries, 4 tiles of rows
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


def test_without_a_place_for_compiled_code():
    code = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "import numpy as np; from flashlit import fast\n"
        "m, l = np.zeros((2, 1)); assert fast._step()(np.zeros((1, 3)), m, l) == 1 and l == 3\n"
        "assert fast._step().__module__ == 'flashlit.compiled'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# the compiled step


def start(rows, dtype, m=-np.inf):
    """The maximum and the sum before the first tile."""
    return np.full(rows, m, dtype), np.zeros(rows, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_to_a_unit_in_the_last_place(dtype):
    least = np.log(np.finfo(dtype).tiny)
    s = np.linspace(least, 0, 400_001).astype(dtype)[None]
    exact = np.exp(s.astype(np.longdouble))
    exponentials(s, *start(1, dtype, 0))
    assert (np.abs(s - exact) / np.spacing(exact.astype(dtype))).max() < 1
    below = np.array([[2 * least, -np.inf, 0]], dtype)
    exponentials(below, *start(1, dtype, 0))
    assert below.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_at_every_width(dtype):
    eps = 4 * np.finfo(dtype).eps
    for n in (*range(1, 71), 500, 512, 513):
        s = normal((3, n), dtype, n)
        old = np.array([-np.inf, -np.inf, 0.5], dtype)
        s[0], m, l = -np.inf, old.copy(), np.array([0, 0, 2.5], dtype)
        want = np.maximum(m, s.max(-1))
        p = s.copy()
        shrink = exponentials(p, m, l)
        assert np.array_equal(m, want) and (p[0] == 0).all() and l[0] == 0
        np.testing.assert_allclose(p[1:], np.exp(s[1:] - want[1:, None]), rtol=eps)
        np.testing.assert_allclose(shrink, [0, 0, np.exp(old[2] - want[2])], rtol=eps)
        np.testing.assert_allclose(l, shrink * [0, 0, 2.5] + p.sum(-1, dtype=np.longdouble), rtol=4 * eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_of_negative_and_of_equal_scores(dtype):
    """The maximum is found by the bits, whose order depends on the sign."""
    for scores in ([-3, -1, -2], [-0.0, 0.0, -0.0], [-1e-30, 1e-30, 0], [5, 5, 5], [-1e30, -1e-30, -1]):
        s, (m, l) = np.array([scores], dtype), start(1, dtype)
        exponentials(s, m, l)
        assert m[0] == max(dtype(x) for x in scores) and s.max() == 1


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_exponentials_of_what_is_not_finite(bad):
    """It spoils the sum of its row, in this tile and after the next, and no other's."""
    for j in range(20):
        s = normal((2, 20), seed=j)
        s[0, j] = bad
        m, l = start(2, float)
        for tile in (s, normal((2, 20))):
            exponentials(tile, m, l)
            assert np.isnan(l[0]) and np.isfinite(s[1]).all() and np.isfinite([m[1], l[1]]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_of_rows_that_are_not_contiguous(dtype):
    wide = normal((40, 60), dtype, 1)
    for view in (wide[::2, ::3], wide.T, wide[::-1, ::-1], wide[:, 5:9]):
        s, one = np.ascontiguousarray(view), start(len(view), dtype)
        other = start(len(view), dtype)
        exponentials(s, *one)
        exponentials(view, *other)
        same([np.ascontiguousarray(view), other[0]], [s, one[0]])
        np.testing.assert_allclose(other[1], one[1], rtol=9 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_beside_numpy_where_something_is_not_finite(dtype):
    """Hidden rows, NaN, +inf and -inf at every width: the same maximum and sum, NaN in the same sums."""
    for n in range(1, 71):
        s = normal((12, n), dtype, n)
        s[np.arange(12), np.arange(12) * 5 % n] = np.resize([np.nan, np.inf, -np.inf], 12)
        s[9:11] = -np.inf
        m = np.resize(np.array([-np.inf, 0.5, -3], dtype), 12)
        tiles = [(s.copy(), m.copy(), np.where(m == -np.inf, 0, 2).astype(dtype)) for _ in range(2)]
        with np.errstate(all="ignore"):
            shrinks = [f(*tile) for f, tile in zip((exponentials, fast._exponentials), tiles)]
        (a, x, y), (b, m, l) = tiles
        odd = np.isnan(l)
        assert np.array_equal(np.isnan(y), odd) and np.array_equal(x[~odd], m[~odd]) and odd.any()
        for got, want in ((a, b), (y, l), shrinks):
            np.testing.assert_allclose(got[~odd], want[~odd], rtol=32 * np.finfo(dtype).eps, atol=0)
        assert (a[9:11] == 0).all()
