"""How times are taken and set in tables. No test depends on a time."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bench_speed
from flashlit import bench, fast
from flashlit.bench import Case
from flashlit.cli import _bench_text, _draw_bench, main
from flashlit.tiled import BLOCK_KV, BLOCK_Q

RECORDED = json.loads((Path(__file__).parents[1] / "book" / "bench.json").read_text())
OWN = ("flashlit", "numpy", "naive")
TINY = Case(1, 2, 40, 8, True)
SECTIONS = ("table", "float64", "grouped", "backward", "short", "threads", "memory", "parts", "ladder", "share", "growth")
NAMES = set(bench.COLUMNS)


def close(a, b):
    """Equal as far as three digits go."""
    return a == pytest.approx(b, rel=0.011)


# the clock

def test_turns():
    """All take turns, and a turn is many calls of a function that is quick."""
    seen, x = [], np.ones(2)
    took = bench.times({name: lambda name=name: (seen.append(name), x)[1] for name in "abc"}, repeats=2)
    turns = [name for name, last in zip(seen, ["", *seen]) if name != last]
    assert turns == 3 * [*"abc"] and len(seen) > 1000
    assert list(took) == [*"abc"] and min(took.values()) > 0


def test_a_turn_of_a_quick_function(monkeypatch):
    """It sleeps, warms up for WARM, and counts the calls of at least LEAST: their mean."""
    now, calls = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))

    def f():  # slow until it is warm
        calls.append(now[0])
        now[0] += 0.004 if now[0] < bench.PAUSE + 0.01 else 0.002
        return 7

    seconds, out = bench._turn(f)
    assert out == 7 and seconds == pytest.approx(0.002)
    assert bench.PAUSE <= calls[0] and now[0] >= bench.PAUSE + bench.WARM + bench.LEAST


def test_median_of_a_call(monkeypatch):
    """A clock of our own: the n-th call takes n seconds. Of each turn one counts, and of eight turns the last seven."""
    now, x = [0.0], np.ones(2)
    calls = iter(range(1, 100))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench.time, "sleep", lambda s: None)

    def f():
        now[0] += next(calls)
        return x

    assert bench.times({"f": f}, repeats=7) == {"f": 10}  # 4, 6 ... 16


@pytest.mark.parametrize("off", [1e-3, np.nan, np.inf])
def test_wrong_is_an_error(off):
    x = np.ones(4, np.float32)
    y = x.copy()
    y[2] += off
    with pytest.raises(ArithmeticError, match="theirs is off by"):
        bench.times({"ours": lambda: x, "theirs": lambda: y}, repeats=1)
    bench.times({"ours": lambda: x, "theirs": lambda: y}, repeats=1, compare=False)


def test_rounding_is_no_error():
    x = np.full(4, 3, np.float32)
    bench.agree("theirs", x + np.float32(1e-5), x)


def test_numpy_step():
    step = fast._step
    with pytest.raises(KeyError), bench.numpy_step():
        assert fast._step() is fast._exponentials and bench.paths() == ["numpy"]
        raise KeyError
    assert fast._step is step


# rows

def check_row(r):
    assert r["flashlit_ms"] > 0
    for name in NAMES - {"flashlit"}:
        ms, quotient = r.get(f"{name}_ms"), r.get(f"flashlit_over_{name}")
        assert (ms is None) == (quotient is None)
        assert ms is None or close(quotient, r["flashlit_ms"] / ms)


def test_row():
    r, missing = bench.row(TINY, 1, OWN)
    assert missing == {} and r["case"] == "1,2,40,8 causal"
    assert list(r)[:6] == ["case", "batch", "heads", "seq_len", "head_dim", "causal"]
    assert list(r)[6:] == [f"{n}_ms" for n in OWN] + [f"flashlit_over_{n}" for n in OWN[1:]]
    check_row(r)


def test_a_row_that_is_wrong(monkeypatch):
    monkeypatch.setitem(bench.COLUMNS, "naive", lambda q, k, v, causal: lambda: q * 0)
    with pytest.raises(ArithmeticError, match="naive is off"):
        bench.row(TINY, 1, OWN)


def test_missing_peers(monkeypatch):
    for name in ("torch", "onnxruntime", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
    run = bench.table([TINY], 1)
    assert set(run["not_measured"]) == {"torch", "onnxruntime", "jax"}
    (r,) = run["table"]
    assert [r[f"{n}_ms"] for n in run["not_measured"]] == [None] * 3
    check_row(r)
    said = _bench_text(None, run)
    assert "no PyTorch: " in said and "no JAX: " in said and "no ONNX RT: " in said


def test_torch_column():
    pytest.importorskip("torch")
    for dtype in ("float32", "float64"):
        r, missing = bench.row(TINY, 1, ("flashlit", "torch"), dtype)
        assert missing == {} and r["torch_ms"] > 0
        check_row(r)


def test_naive_only_where_it_fits():
    q = SimpleNamespace(shape=(1, 1, 16384, 64), itemsize=4)
    with pytest.raises(MemoryError, match="1 GiB"):
        bench.COLUMNS["naive"](q, q, q, False)


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import sys; from flashlit import bench; bench.row(bench.Case(1, 1, 8, 4), 1, ('naive', 'flashlit'))\n"
        "assert not {'torch', 'jax', 'onnx', 'onnxruntime'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_machine():
    on = bench.machine()
    assert on["numpy"] == np.__version__ and on["cores"] == fast.cores() and on["processor"]
    assert set(on) == set(RECORDED["machine"])


# parts, share, growth

def test_parts():
    rows, four = bench.parts(8, turns=1), {"maximum", "shift", "exponential", "sum"}
    lacks = {"numpy": {"step"}, "numba": four, "torch": {*four, "step", "rescale"}}
    assert [r["path"] for r in rows] == bench.paths() + ["torch"] * bench_speed.has_torch()
    for r in rows:
        given = {part for part in bench.PARTS if r[part] is not None}
        assert given == set(bench.PARTS) - lacks[r["path"]]


def test_ladder(monkeypatch):
    """Every rung undoes what comes after it, no more; all give the same."""
    seen, undone, real = [], [], fast.flash_attention
    before = {name: getattr(owner, at) for name, (owner, at, _) in bench.CHANGES.items()}

    def state():
        return [getattr(owner, at) is before[name] for name, (owner, at, _) in bench.CHANGES.items()]

    def flash_attention(*x, **options):
        undone.append(state())
        return real(*x, **options)

    def times(runs, repeats):
        seen.extend(f() for f in runs.values())
        return dict.fromkeys(runs, 1.0)

    case = Case(1, 4, 600, 8, True)
    monkeypatch.setattr(bench, "times", times)
    monkeypatch.setattr(fast, "flash_attention", flash_attention)
    rows = bench.ladder(case, 1)
    assert [r["ms"] for r in rows] == [1000.0] * 7
    for o in seen:
        bench.agree("a rung", o, seen[0])
    n = len(bench.CHANGES)
    assert undone == [[i < rung for i in range(n)] for rung in range(n + 1)] and all(state())
    assert seen[-1].tobytes() == real(*bench.arrays(case), causal=True).tobytes()


def test_what_the_ladder_undoes(monkeypatch):
    """Each stand-in is the loop without that change."""
    old = {name: stand_in for name, (_, _, stand_in) in bench.CHANGES.items()}
    assert old["compiled step"]() is fast._exponentials
    assert old["keys in reach"](None, None, range(3)) == range(3)
    assert old["every core"](None, 8) == 1
    assert old["heads together"](SimpleNamespace(heads=lambda: "one by one"), 8) == "one by one"
    monkeypatch.setattr(bench, "_walk", lambda *x, careful: (x, careful))
    assert old["poison at the end"](1, 2, careful=False) == ((1, 2), True)


@pytest.mark.parametrize("name", bench.CHANGES)
def test_each_change_is_one(name):
    """What the ladder undoes is used by the loop: undone, it is called."""
    owner, at, old = bench.CHANGES[name]
    calls, x = [], bench.arrays(Case(1, 4, 600, 8, True))

    def counted(*args, **kwargs):
        calls.append(1)
        return old(*args, **kwargs)

    with bench._replaced((owner, at, counted)):
        o = fast.flash_attention(*x, causal=True)
    assert calls and getattr(owner, at) is not counted
    bench.agree(name, o, fast.flash_attention(*x, causal=True))


def test_the_products_of_torch():
    pytest.importorskip("torch")
    tile = bench._Tile(8, rows=6, cols=5)
    work = bench._torch_parts(tile)["torch"]
    tile.s[:], tile.new[:] = 0, 0
    work["scores"]()
    np.testing.assert_allclose(tile.s, tile.q @ tile.k.T, rtol=1e-5, atol=1e-6)
    work["values"]()
    np.testing.assert_allclose(tile.new, tile.s @ tile.v, rtol=1e-5, atol=1e-5)


def test_parts_count_no_warm_up(monkeypatch):
    """A clock of our own: the n-th use of a part takes n seconds; the first five do not count."""
    now, uses = [0.0], []

    def scores(tile):
        uses.append(1)
        now[0] += len(uses)

    monkeypatch.setattr(bench, "paths", lambda: ["numpy"])
    monkeypatch.setattr(bench, "_torch_parts", lambda tile: {})
    monkeypatch.setattr(bench._Tile, "scores", scores)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    (r,) = bench.parts(8, turns=3)
    assert len(uses) == 8 and r["scores"] == bench.rounded(1e9 * 7 / (BLOCK_Q * BLOCK_KV))


@pytest.mark.parametrize("causal", [False, True])
def test_share(monkeypatch, causal):
    """From times of our own: a limit of 3 ms for SCORES on each core."""
    took = {"flashlit": 1.0, "numpy": 2.0, "products 256 x 512": 4e-3, "products 512 x 512": 2e-3,
            "exp numpy": 3e-3, "exp numba": 1e-3}
    monkeypatch.setattr(bench, "times", lambda *_, **__: took)
    monkeypatch.setattr(bench, "paths", lambda: ["numpy", "numba"])
    n = 100
    looks = 2 * (n * (n + 1) // 2 if causal else n * n) / (bench.SCORES * fast.cores())
    plain, numba = bench.share(Case(1, 2, n, 8, causal), 1)
    for r, exp, ours in ((plain, 3e-3, 2.0), (numba, 1e-3, 1.0)):
        assert close(r["products_ms"], 1e3 * looks * 2e-3) and close(r["exponentials_ms"], 1e3 * looks * exp)
        assert close(r["share"], looks * (2e-3 + exp) / ours) and r["ours_ms"] == 1e3 * ours


def test_growth():
    rows = bench.growth([8, 16], 1, ("flashlit", "naive"), window=4)
    assert [r["seq_len"] for r in rows] == [8, 16]
    for r in rows:
        assert close(r["flashlit_ns_per_score"], 1e6 * r["flashlit_ms"] / r["seq_len"] ** 2)
        assert close(r["window_ns_per_token"], 1e6 * r["window_ms"] / r["seq_len"])
        assert r["naive_ms"] > 0


# the command

@pytest.fixture
def bench_line(monkeypatch, capsys):
    """`flashlit bench` on tiny cases: status, standard output, standard error."""
    for name in ("CASES", "QUICK"):
        monkeypatch.setattr(bench, name, bench.both((1, 2, 24 if name == "CASES" else 8, 4)))
    for name in ("onnxruntime", "jax"):
        monkeypatch.setitem(sys.modules, name, None)

    def bench_line(*words):
        status = main(["bench", *words])
        return status, *capsys.readouterr()

    return bench_line


def test_command(bench_line):
    status, out, err = bench_line("--repeats", "1")
    assert (status, err) == (0, "")
    assert "milliseconds" in out and "1,2,24,4 " in out and "  causal " in out and "geometric mean" in out
    assert str(bench.machine()["processor"]) in out


@pytest.mark.parametrize("words, n", [((), 24), (("--quick",), 8)])
def test_command_json(bench_line, words, n):
    status, out, err = bench_line("--json", "--repeats", "2", *words)
    run = json.loads(out, parse_constant=pytest.fail)
    assert (status, err) == (0, "")
    assert list(run) == ["machine", "repeats", "table", "not_measured"] and run["repeats"] == 2
    assert [r["seq_len"] for r in run["table"]] == [n, n]
    for r in run["table"]:
        check_row(r)


def test_command_plot(bench_line, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    status, _, err = bench_line("--repeats", "1", "--plot", str(file))
    assert (status, err) == (0, "") and file.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("words", [("--repeats", "0"), ("--repeats", "x"), ("--quick", "1"), ("--plot", "a.pdf")])
def test_command_refuses(bench_line, words):
    status, out, err = bench_line(*words)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and err.startswith("flashlit")


@pytest.mark.parametrize("column, said", [
    (lambda q, k, v, causal: lambda: q * 0, "ArithmeticError: naive is off by"),
    (lambda q, k, v, causal: lambda: np.empty(2**48, "V1"), "MemoryError: "),
    (lambda q, k, v, causal: lambda: q @ q, "ValueError: "),
])
def test_command_fails_in_one_line(bench_line, monkeypatch, column, said):
    monkeypatch.setitem(bench.COLUMNS, "naive", column)
    status, out, err = bench_line("--repeats", "1")
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and said in err


# the recorded run

def test_recorded_sections():
    run = RECORDED
    assert {"machine", "repeats", "not_measured", "targets", *SECTIONS} == set(run)
    assert all(run[name] for name in SECTIONS) and run["machine"]["torch"] and run["machine"]["numba"]
    for name in SECTIONS:
        for r in run[name]:
            assert not any(isinstance(x, (dict, list)) for x in r.values()), "a row is flat"


def test_recorded_table():
    run = RECORDED
    assert [r["case"] for r in run["table"]] == list(map(str, bench.CASES))
    assert [r["case"] for r in run["float64"]] == list(map(str, bench.CASES))
    for r in (r for name in ("table", "float64", "short", "grouped", "backward") for r in run[name]):
        check_row(r)
        assert r["torch_ms"] > 0


def test_recorded_parts_and_shares():
    run = RECORDED
    assert [(r["head_dim"], r["path"]) for r in run["parts"]] == [(d, p) for d in (64, 128) for p in ("numpy", "numba", "torch")]
    assert all(set(bench.PARTS) <= set(r) for r in run["parts"])
    assert [(r["case"], r["path"]) for r in run["share"]] == [(str(c), p) for c in bench.CASES for p in ("numpy", "numba")]
    for r in run["share"]:
        assert close(r["share"], (r["products_ms"] + r["exponentials_ms"]) / r["ours_ms"])


def test_recorded_ladder():
    names = ["chapter 4", "in place", *bench.CHANGES]
    assert [(r["case"], r["loop"]) for r in RECORDED["ladder"]] == [(str(c), n) for c in bench_speed.STEPWISE for n in names]
    assert all(r["ms"] > 0 for r in RECORDED["ladder"])


def test_recorded_growth():
    rows = RECORDED["growth"]
    assert [r["seq_len"] for r in rows] == bench_speed.LENGTHS
    assert all(r["torch_ms"] and r["flashlit_ms"] and r["window_ms"] for r in rows)
    assert [r["naive_ms"] is None for r in rows] == sorted(r["naive_ms"] is None for r in rows)


def test_recorded_targets():
    """What the rows say, by the same rule."""
    assert bench_speed.targets(RECORDED) == RECORDED["targets"]
    assert all(r["met"] is not None for r in RECORDED["targets"])
    for r in RECORDED["targets"]:
        floor, limit, got = r["floor"], r["limit"], r["measured"]
        assert r["met"] == (got >= limit if floor else got <= limit)


def test_targets_without_torch_or_numba():
    """What is missing is neither met nor missed."""
    run = json.loads(json.dumps(RECORDED))
    run["machine"]["numba"] = None
    for name in bench_speed.NEED_TORCH:
        run[name] = []
    for r in run["table"] + run["float64"] + run["growth"]:
        r["torch_ms"] = None
    rows = bench_speed.targets(run)
    unknown = [r["target"] for r in rows if r["met"] is None]
    assert unknown and all("over PyTorch" in x or "autograd" in x for x in unknown)
    assert "not measured" in bench_speed.targets_text(rows)
    assert "short: PyTorch is not installed" in bench_speed.text(run | {"targets": rows})


def test_picture_of_the_recorded_run():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    ax = pyplot.Figure().subplots()
    _draw_bench(ax, RECORDED)
    shown = {line.get_label(): len(line.get_xdata()) for line in ax.get_lines()}
    assert shown["flashlit"] == shown["PyTorch"] == len(bench.CASES) and shown["naive"] == len(bench.CASES) - 2
