"""What the package promises about itself: what it imports, says and keeps in memory."""
import ast
import importlib
import inspect
import io
import subprocess
import sys
import tokenize
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import flashlit
from flashlit import cases
from flashlit.naive import attention
from flashlit.tiled import flash_attention
from helpers import qkv

FOLDER = Path(flashlit.__file__).parent
ANY = None
ARROWS = {  # what a module may import from its own package
    "draw": set(),
    "scores": set(),
    "inputs": {"scores"},
    "naive": {"inputs", "scores"},
    "online": {"inputs", "naive"},
    "tiled": {"inputs", "online", "scores"},
    "hbm": set(),
    "traffic": {"scores"},
    "roofline": {"draw"},
    "model": {"roofline", "traffic"},
    "variants": {"scores", "traffic"},
    "compiled": set(),
    "fast": {"compiled", "inputs", "naive", "online", "scores", "tiled"},
    "backward": {"fast", "inputs", "naive", "online", "scores", "tiled", "traffic"},
    "decode": {"fast", "inputs", "online", "scores", "tiled", "traffic"},
    "cases": set(),
    "testing": {"cases"},
    "museum": set(),
    "bench": {"compiled", "fast", "naive", "scores", "tiled"},
    "cli": ANY,
}
EXTRAS = {  # what a module needs besides NumPy, where it needs it
    "draw": {"matplotlib"}, "cli": {"matplotlib"}, "compiled": {"numba"}, "fast": {"threadpoolctl", "tqdm"},
    "bench": {"jax", "numba", "onnx", "onnxruntime", "torch"},
}  # fmt: skip
HANDED_OUT = ["attention", "flash_attention", "merge", "Problem", "DEVICES", "estimate"]
MODULES = sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))


each_module = pytest.mark.parametrize("module", MODULES)


def source(module):
    return (FOLDER / f"{module}.py").read_text("utf-8")


def imports(module, node=None):
    """(ours, others): modules that are imported, anywhere in the source."""
    ours, others = set(), set()
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(["flashlit"] * node.level + [node.module] * bool(node.module))
            names = [f"{base}.{alias.name}" if base == "flashlit" else base for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            ours.add(rest.split(".")[0]) if top == "flashlit" else others.add(top)
    return ours - {"__version__"}, others


@each_module
def test_arrows(module):
    assert module in ARROWS, "a new module: enter it in the table, and in CONTRIBUTING"
    ours, _ = imports(module)
    assert ARROWS[module] is ANY or ours == ARROWS[module]


@each_module
def test_only_numpy_is_needed(module):
    _, others = imports(module)
    extra = others - set(sys.stdlib_module_names) - {"numpy", "flashlit"}
    assert extra <= EXTRAS.get(module, set())


def test_importing_everything_loads_numpy_and_nothing_else():
    """In a process of its own: a shell's start-up files may load what they like before."""
    code = (
        "import sys, numpy; before = set(sys.modules)\n"
        f"import flashlit, {', '.join(f'flashlit.{m}' for m in MODULES if m != 'compiled')}\n"
        "print(*{m.partition('.')[0] for m in sys.modules.keys() - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) <= set(sys.stdlib_module_names) | {"flashlit", "numpy"}


@pytest.mark.parametrize("name", HANDED_OUT)
def test_handed_out(name):
    assert getattr(flashlit, name).__module__.startswith("flashlit.")


def test_no_name_hides_a_module():
    for module in MODULES:
        assert importlib.import_module(f"flashlit.{module}") is getattr(flashlit, module)


# Every public name says what it takes and gives.


def public(module):
    """Public functions and classes of a module, and the public functions in those classes."""
    body = ast.parse(source(module)).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def commented(module):
    """Numbers of the lines that carry a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source(module)).readline)
    return {t.start[0] for t in tokens if t.type == tokenize.COMMENT}


def own_words(node):
    """Whether the annotation alone says it: a name of ours, or words for people."""
    words = "" if node is None else ast.unparse(node).removesuffix(" | None")
    return words in ("Problem", "Device", "str", "bool")


@each_module
def test_module_docstring(module):
    assert ast.get_docstring(ast.parse(source(module)))


@each_module
def test_docstrings(module):
    assert [node.name for node in public(module) if not ast.get_docstring(node)] == []


@each_module
def test_every_parameter_has_its_shape_or_unit_beside_it(module):
    lines, silent = commented(module), []
    for node in public(module):
        if isinstance(node, ast.FunctionDef):
            everyone = [x for x in ast.walk(node.args) if isinstance(x, ast.arg)]
        else:
            everyone = [x for x in node.body if isinstance(x, ast.AnnAssign) and x.target.id != "_"]
        everyone = [x for x in everyone if not own_words(x.annotation) and x.lineno not in lines]
        silent += [f"{node.name}: {ast.unparse(x)}" for x in everyone]
    assert silent == []


@each_module
def test_all_names_exist(module):
    loaded = importlib.import_module(f"flashlit.{module}")
    names = getattr(loaded, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(loaded, name)] == []


# Memory: no square of the length in the tiled path.


def peak(path, n, **options):
    """Bytes in use at most during a call, beyond its inputs and its output; other threads can only add to it."""
    q, k, v = qkv(n, n, d=16, dtype="float32")
    out, used = np.empty_like(q), []
    for _ in range(3):
        tracemalloc.start()
        path(q, k, v, out=out, **options)
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(used)


def growth(path, lengths, **options):
    """By how much the peak grows with each doubling."""
    used = [peak(path, n, **options) for n in lengths]
    return [b / a for a, b in zip(used, used[1:])]


@pytest.mark.parametrize("causal", [False, True])
def test_tiled_memory_does_not_grow_with_the_square(causal):
    assert max(growth(flash_attention, (1024, 2048, 4096), causal=causal)) < 1.5
    assert max(growth(flash_attention, (512, 1024, 2048), causal=causal, block_q=64, block_kv=64)) < 1.5


def test_naive_memory_does():
    assert min(growth(attention, (256, 512, 1024))) > 3.5


def test_tiled_memory_grows_with_the_tile():
    small, large = (peak(flash_attention, 1024, block_q=b, block_kv=b) for b in (64, 256))
    assert 8 < large / small < 20


# one signature for all doors

OWN = {"out", "return_lse", "block_q", "block_kv", "splits", "block_table", "threads", "progress"}
DOORS = [flash_attention, flashlit.flash_attention, flashlit.decode_attention, flashlit.flash_attention_vjp]


def shared(door):
    """Parameters that every door has, with their defaults and annotations."""
    return [x for x in inspect.signature(door).parameters.values() if x.name not in OWN]


@pytest.mark.parametrize("door", DOORS)
def test_doors_take_the_same_options(door):
    assert shared(door) == shared(flashlit.attention)


def test_the_judge_asks_for_every_option():
    options = {x.name for x in shared(flashlit.attention)} - {*"qkv"} | {"return_lse"}
    assert options | {"out", "block_table"} == {*cases.OPTIONS}
    asked = set().union(*(case.options for case in cases.adversarial_inputs()))
    assert asked == {*cases.OPTIONS}
