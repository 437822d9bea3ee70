"""How fast flashlit is, beside PyTorch and naive NumPy, and what memory it takes.

How to read it: the first table is that of `flashlit bench`, the last lists the
targets, what was measured and whether that is enough. Everything is measured in
turns, medians of --repeats turns after a warm-up, on the same cores; outputs are
compared on the way. `--record FILE` stores the run: `book/bench.json` is one. Close
what else is running first: on two cores of which one is busy, PyTorch's threads wait
for each other, and no quotient is worth reading. The load is printed on the way. Where
PyTorch is missing, what needs it is left out.
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from flashlit import bench, decode_attention, flash_attention, flash_attention_vjp
from flashlit.bench import Case, arrays, rounded, times
from flashlit.cli import _bench_text, _table

SHORT = (16, 32, 64, 128, 256)
STEPWISE = [*bench.both((1, 8, 2048, 64)), Case(1, 8, 64, 64)]
LENGTHS = [2**i for i in range(9, 17)]
LONG = {131072: 64, 8192: 16}  # tokens -> MiB that are allowed
MEMORY = """
import json, re, resource, sys, tracemalloc
from pathlib import Path
import numpy as np
from flashlit import flash_attention

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

def peak():  # MiB; getrusage may count the parent process in
    if STATUS.exists():
        return int(re.search(r"VmHWM:\\s*(\\d+)", STATUS.read_text())[1]) / 2**10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)

n, rng = int(sys.argv[1]), np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, n, 64), dtype=np.float32) for _ in range(3))
out = np.ones_like(q)
short = [x[..., :1024, :] for x in (q, k, v)]
flash_attention(*short, causal=True)
if RESET.exists():
    RESET.write_text("5")
before = peak()
flash_attention(q, k, v, causal=True, out=out)
grown = peak() - before
tracemalloc.start()
flash_attention(q, k, v, causal=True, out=out)
traced = tracemalloc.get_traced_memory()[1] / 2**20
print(json.dumps({"seq_len": n, "rss_mib": grown, "traced_mib": traced}))
"""


def has_torch():
    return "torch" in bench.prepare(arrays(Case(1, 1, 1, 1)), False, ("torch",))[0]


def line(name, took, **more):
    """A flat row of one measurement."""
    return {"case": name, **more, **bench.quotients(took)}


def against_torch(name, q, k, v, causal=False, repeats=7, **more):
    """One call, flashlit's and PyTorch's; and flashlit's by another door."""
    ready, _ = bench.prepare((q, k, v), causal, ("flashlit", "torch"))
    doors = {name: lambda f=f: f(q, k, v, causal=causal) for name, f in more.items()}
    return line(name, times(ready | doors, repeats))


def double(repeats):
    names = "flashlit", "numpy", "torch"
    return [bench.row(case, repeats, names, "float64")[0] for case in bench.CASES]


def grouped(repeats):
    """32 query heads, 8 of keys; then one query of each against a long cache."""
    q = arrays(Case(1, 32, 4096, 128))[0]
    k, v = arrays(Case(1, 8, 4096, 128))[1:]
    rows = [against_torch(f"32:8 heads, 4096{', causal' * c}", q, k, v, c, repeats) for c in (False, True)]
    k, v = arrays(Case(1, 8, 32768, 128))[1:]
    one = np.ascontiguousarray(q[..., :1, :])
    return rows + [against_torch("1 query, 32:8 heads, 32768 keys", one, k, v, repeats=repeats, decode=decode_attention)]


def backward(repeats):
    """The gradients alone, then with the forward pass before them."""
    import torch

    rows, attend = [], torch.nn.functional.scaled_dot_product_attention
    for case in bench.both((1, 8, 2048, 64), (1, 4, 4096, 128)):
        x, c = arrays(case), case.causal
        do = np.random.default_rng(1).standard_normal(x[0].shape).astype("float32")
        y, dy = [torch.from_numpy(x).requires_grad_() for x in x], torch.from_numpy(do)
        back, o = flash_attention_vjp(*x, causal=c)[1], attend(*y, is_causal=c)

        def gradients(o, keep):
            return np.stack([x.numpy() for x in torch.autograd.grad(o, y, dy, retain_graph=keep)])

        alone = {
            "flashlit": lambda: np.stack(back(do)[:3]),
            "torch": lambda: gradients(o, True),
        }
        whole = {
            "flashlit": lambda: np.stack(flash_attention_vjp(*x, causal=c)[1](do)[:3]),
            "torch": lambda: gradients(attend(*y, is_causal=c), False),
        }
        for name, runs in (("gradients", alone), ("forward and gradients", whole)):
            rows.append(line(f"{case}, {name}", times(runs, repeats)))
    return rows


def short(repeats):
    names = "flashlit", "numpy", "torch"
    cases = [Case(1, heads, n, 64, c) for heads in (8, 1) for n in SHORT for c in (False, True)]
    return [bench.row(case, repeats, names)[0] for case in cases]


def threads(repeats):
    """One thread against two."""
    rows = []
    for case in bench.both((1, 8, 2048, 64), (1, 4, 4096, 128), (1, 2, 8192, 64)):
        x, c = arrays(case), case.causal
        runs = {f"threads_{n}": lambda n=n: flash_attention(*x, causal=c, threads=n) for n in (1, 2)}
        took = times(runs, repeats)
        ms = {f"{name}_ms": rounded(1e3 * t) for name, t in took.items()}
        rows.append({"case": str(case)} | ms | {"speedup": rounded(took["threads_1"] / took["threads_2"])})
    return rows


def memory(_):
    """In a process of its own: a peak cannot be reset."""
    rows = []
    for n in LONG:
        done = subprocess.run([sys.executable, "-c", MEMORY, str(n)], capture_output=True, text=True, check=True)
        rows.append({key: x if key == "seq_len" else rounded(x) for key, x in json.loads(done.stdout).items()})
    return rows


def parts(_):
    return [row for d in (64, 128) for row in bench.parts(d)]


def ladder(repeats):
    return [row for case in STEPWISE for row in bench.ladder(case, repeats)]


def share(repeats):
    return [row for case in bench.CASES for row in bench.share(case, repeats)]


def growth(repeats):
    return bench.growth(LENGTHS, repeats)


SECTIONS = dict(
    float64=double, grouped=grouped, backward=backward, short=short, threads=threads,
    memory=memory, parts=parts, ladder=ladder, share=share, growth=growth,
)  # fmt: skip
NEED_TORCH = "grouped", "backward", "short"


def measure(repeats):
    """The whole run, as plain data."""
    def log(name):  # with what the machine was doing in the last minute
        load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
        print(f"... {name}{load}", file=sys.stderr, flush=True)

    log("table")
    run = bench.table(repeats=repeats)
    for name, f in SECTIONS.items():
        log(name)
        run[name] = [] if name in NEED_TORCH and not has_torch() else f(repeats)
    return run | {"targets": targets(run)}


# The targets: a line for each, from the rows of a run.


def column(rows, key, **wanted):
    """The numbers of a column, in rows that are wanted."""
    rows = [r for r in rows if all(r[x] == y for x, y in wanted.items())]
    return [r[key] for r in rows if r.get(key) is not None]


def over_torch(rows, name="flashlit"):
    """A column's time over PyTorch's."""
    return [r[f"{name}_ms"] / r["torch_ms"] for r in rows if r.get("torch_ms")]


def spread(x):
    return max(x) / min(x) if x else None


def mean(x):
    return geometric_mean(x) if x else None


def most(x):
    return max(x, default=None)


def least(x):
    return min(x, default=None)


def targets(run):
    """Flat rows: what, the limit, whether it is a floor, what was measured, whether it is met."""
    numba, table, n4096 = run["machine"]["numba"], run["table"], "1,4,4096,128"
    ours, plain = over_torch(table) if numba else [], over_torch(table, "numpy")
    path = "numba" if numba else "numpy"
    name = "decode" if any("decode_ms" in r for r in run["grouped"]) else "flashlit"
    heads, cache = [r for r in run["grouped"] if "query" not in r["case"]], [r for r in run["grouped"] if "query" in r["case"]]
    alone = [r for r in run["backward"] if "forward" not in r["case"]]
    whole = [r for r in run["backward"] if "forward" in r["case"]]
    long = [r for r in run["growth"] if r["seq_len"] >= 2048]
    window = [r for r in run["growth"] if r["seq_len"] >= 8192]
    rows = [
        ("over PyTorch, geometric mean", 0.95, mean(ours)),
        ("over PyTorch, worst", 1.1, most(ours)),
        ("over PyTorch without Numba, mean", 1.2, mean(plain)),
        ("over PyTorch without Numba, worst", 1.2, most(plain)),
        ("over PyTorch, float64, mean", 1.1, mean(over_torch(run["float64"]))),
        ("over PyTorch, float64, worst", 1.1, most(over_torch(run["float64"]))),
        ("over PyTorch, 32:8 heads, worst", 1.0, most(over_torch(heads))),
        ("over PyTorch, decode", 1.0, most(over_torch(cache))),
        ("over PyTorch, decode_attention", 1.0, most(over_torch(cache, name))),
        ("over autograd, gradients, worst", 1.3, most(over_torch(alone))),
        ("over autograd with forward, worst", 1.3, most(over_torch(whole))),
        *((f"over PyTorch, {h} short head{'s' * (h > 1)}, worst", 3.0,
           most(over_torch([r for r in run["short"] if r["heads"] == h]))) for h in (8, 1)),
        ("over naive, 4096 causal", 1 / 6, least(column(table, "flashlit_over_naive", case=n4096 + " causal"))),
        ("over naive, 4096", 1 / 2.5, least(column(table, "flashlit_over_naive", case=n4096))),
        ("at least: share of the limit, worst", 0.8, least(column(run["share"], "share", path=path, causal=False))),
        ("at least: share of it, causal, worst", 0.7, least(column(run["share"], "share", path=path, causal=True))),
        ("at least: two threads over one, worst", 1.8, least(column(run["threads"], "speedup"))),
        *((f"MiB, {kind}, {n:,} tokens", float(room), most(column(run["memory"], f"{key}_mib", seq_len=n)))
          for n, room in LONG.items() for kind, key in (("tracemalloc", "traced"), ("peak RSS", "rss"))),
        ("time / N^2, most over least", 1.2, spread(column(long, "flashlit_ns_per_score"))),
        ("window: time / N, most over least", 1.2, spread(column(window, "window_ns_per_token"))),
    ]  # fmt: skip
    return [verdict(*row) for row in rows]


def verdict(what, limit, got):
    """One target as a flat row; a measurement that is missing meets nothing and misses nothing."""
    floor, got = what.startswith("at least"), rounded(got)
    met = None if got is None else bool(got >= limit if floor else got <= limit)
    return {"target": what.removeprefix("at least: "), "floor": floor, "limit": rounded(limit), "measured": got, "met": met}


def targets_text(rows):
    said = {True: "met", False: "missed", None: "not measured"}
    lines = [
        [r["target"], f"{'>=' if r['floor'] else '<='} {r['limit']}", r["measured"], said[r["met"]]] for r in rows
    ]
    return _table(["target", "limit", "measured", ""], *lines)


def rows_text(rows):
    """Flat rows as a table, without what no row has and what the case says already."""
    keys = dict.fromkeys(k for r in rows for k, x in r.items() if x is not None and not isinstance(x, bool))
    if "case" in keys:
        keys = [k for k in keys if k not in Case._fields]
    return _table(keys, *([r.get(k) for k in keys] for r in rows))


def text(run):
    """The first table, every section's rows, and the targets."""
    lines = [_bench_text(None, run)]
    for name in SECTIONS:
        rows = run[name]
        if not rows:
            lines += ["", f"{name}: PyTorch is not installed"]
            continue
        lines += ["", name, rows_text(rows)]
    return "\n".join(lines + ["", targets_text(run["targets"])])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--record", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(__doc__)
    run = measure(args.repeats)
    print(text(run))
    if args.record:
        args.record.write_text(json.dumps(run, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
