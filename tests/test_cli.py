"""The command line: what it prints, what it refuses, what it leaves behind."""
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashlit import __version__
from flashlit.cli import main
from flashlit.roofline import DEVICES, gpu_rows
from flashlit.traffic import ITEM_BYTES, Problem, compulsory_bytes, flash_bytes, flops

DATA = Path(__file__).parent / "data"
COMMANDS = ("equivalence", "traffic", "model", "devices")
PYTHON_M = [sys.executable, "-m", "flashlit"]
SCRIPT = [str(Path(sys.executable).with_name("flashlit"))]
ROOT_USER = hasattr(os, "geteuid") and os.geteuid() == 0


def seed(number):
    """A seed document."""
    return json.loads((DATA / f"seed_{number:03}.json").read_text())


def strict(text):
    """One JSON value, without NaN and infinity."""
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def shell(*words, **options):
    """A process of its own, and what it printed."""
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def run(capsys):
    """A command line, in this process: its standard output. It must succeed."""
    def run(line):
        status = main(line.split())
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out

    return run


@pytest.fixture
def value(run):
    """The JSON value that a command line prints."""
    return lambda line: strict(run(f"{line} --json"))


@pytest.fixture
def refused(capsys):
    """A command line that must fail: its one line on standard error."""
    def refused(line):
        status = main(line if isinstance(line, list) else line.split())
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert err.endswith("\n") and len(err.splitlines()) == 1, err
        assert err.startswith("flashlit")
        return err

    return refused


# The seed documents.

def test_equivalence_is_the_seed(value):
    ours, theirs = value("equivalence"), seed(0)["equivalence_check"]
    assert list(ours) == list(theirs)
    assert 0 <= ours.pop("max_abs_diff") <= 5e-16
    theirs.pop("max_abs_diff")
    assert ours == theirs


def test_traffic_is_the_seed(value):
    ours, theirs = value("traffic"), seed(0)["hbm_traffic_sweep"]
    assert ours == theirs
    assert [list(row) for row in ours] == [list(row) for row in theirs]


def test_model_is_the_seed(value):
    ours, theirs = value("model"), seed(1)
    assert list(ours) == ["model", "inputs", "outputs", "profile", "steps"]
    assert list(ours["outputs"]) == list(theirs["outputs"])
    assert ours["outputs"].pop("verdict")
    theirs["outputs"].pop("verdict")
    for key in ("inputs", "outputs", "profile", "steps"):
        assert ours[key] == theirs[key], key


def test_devices_are_the_catalogue(value):
    rows = value("devices")
    assert rows == list(gpu_rows())
    assert rows[-1]["name"] == "seed" and rows[-1]["hbm_gb"] is None
    assert all(isinstance(row["hbm_bw_gb_s"], (int, float)) for row in rows)


# Options.

def test_equivalence_options(value):
    full = value("equivalence --no-causal")
    assert full["standard_materialized_elements"] == 2 * 64 * 64
    assert full["flash_tiles_visited"] == 16

    ragged = value("equivalence --seq-len 37 --head-dim 3 --block-q 8 --block-kv 5")
    assert ragged["standard_materialized_elements"] == 37 * 38
    tiles = sum(-(-min(8 * t + 8, 37) // 5) for t in range(5))
    assert ragged["flash_tiles_visited"] == tiles
    assert ragged["flash_sram_tile_elements"] == 40
    assert len(ragged["sample_row0_first4"]) == 3

    large = value("equivalence --block-q 1000 --block-kv 1000000000")
    assert large["flash_sram_tile_elements"] == 64 * 64  # what was there to hold
    one = value("equivalence --seq-len 1 --head-dim 1")
    assert one["standard_materialized_elements"] == 2


def test_equivalence_seed(value):
    first, again, other = (value(f"equivalence --seed {s}") for s in (3, 3, 4))
    assert first == again
    assert first["sample_row0_first4"] != other["sample_row0_first4"]


def test_traffic_options(value):
    line = "traffic --seq-len 1000 200 --heads 3 --head-dim 64 --block 7 --dtype FP32"
    long, short = value(line)
    assert (long["seq_len"], short["seq_len"]) == (1000, 200)
    assert (long["num_heads"], long["head_dim"], long["num_q_blocks"]) == (3, 64, 143)
    once = 4 * 1000 * 64 * 3 * 4
    assert long["standard_qkv_o_mb"] == round(once / 1e6, 2)
    assert long["standard_total_hbm_mb"] == round((once + 4 * 1000**2 * 3 * 4) / 1e6, 2)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_traffic_types(value, dtype):
    row, = value(f"traffic --seq-len 1024 --dtype {dtype}")
    assert row["standard_qkv_o_mb"] == round(4 * 1024 * 128 * 32 * ITEM_BYTES[dtype] / 1e6, 2)


def test_model_options(value):
    whole = value("model --batch 2 --heads 4 --seq-len 2048 --head-dim 64 --no-causal --block 64")
    half = value("model --batch 2 --heads 4 --seq-len 2048 --head-dim 64 --block 64")
    assert whole["inputs"]["causal"] == 0 and half["inputs"]["causal"] == 1
    assert whole["inputs"]["block_size"] == 64
    ratio = whole["outputs"]["flops_gflop"] / half["outputs"]["flops_gflop"]
    assert ratio == pytest.approx(2, rel=1e-2)


def test_model_of_a_step(value, run):
    """One query of 32 heads against a cache of 8: K and V once per kv head."""
    line = "model --seq-q 1 --seq-kv 131072 --batch 16 --kv-heads 8 --align BOTTOM_right --device h100-sxm"
    report = value(line)
    moved = 16 * 256 * 2 * (32 + 8 * 131072)
    assert report["outputs"]["fa_hbm_gb"] == round(moved / 1e9, 4)
    assert report["outputs"]["sram_fit"] is True and report["outputs"]["achieved_block"] == 1
    assert report["outputs"]["q_blocks"] == 1 and report["outputs"]["kv_blocks"] == 1024
    inputs = report["inputs"]
    assert (inputs["seq_q"], inputs["seq_length"], inputs["kv_heads"]) == (1, 131072, 8)
    assert inputs["align"] == "bottom_right" and "window" not in inputs
    assert report["profile"]["seq_length"] == 131072
    assert "S1x131072" in run(line)


def test_model_of_a_window(value):
    p = Problem(131072, batch=8, heads=32, kv_heads=8, value_dim=64, causal=True, window=(4095, None))
    report = value("model --seq-len 131072 --kv-heads 8 --value-dim 64 --window 4095 NONE")
    assert report["outputs"]["flops_gflop"] == round(flops(p) / 1e9, 2)
    assert report["inputs"]["window"] == [4095, None] and report["inputs"]["value_dim"] == 64
    cache = "--seq-q 1 --seq-kv 131072 --window 4095 0 --align bottom_right"
    assert value(f"model --batch 1 --kv-heads 8 {cache}")["outputs"]["fa_hbm_gb"] == round(512 * (32 + 8 * 4096) / 1e9, 4)
    shifts = [value(f"model --seq-q 1 --seq-kv 131072 --align {x}") for x in ("bottom_right", "131071")]
    assert shifts[0]["outputs"] == shifts[1]["outputs"]


def test_traffic_of_shared_heads(value, run):
    line = "traffic --seq-len 8192 --kv-heads 8 --value-dim 64 --window 4095 none"
    row, = value(line)
    p = Problem(8192, heads=32, kv_heads=8, value_dim=64, causal=True, window=(4095, None))
    assert row["tiled_logical_access_mb_no_cache_reuse"] == round(flash_bytes(p) / 1e6, 2)
    assert row["qkvo_compulsory_bytes_mb"] == round(compulsory_bytes(p) / 1e6, 2)
    assert (row["kv_heads"], row["value_dim"], row["window"]) == (8, 64, [4095, None])
    assert "kv_heads 8,\nvalue_dim 64, window [4095, None]\n" in run(line)


@pytest.mark.parametrize("name", DEVICES)
def test_model_of_every_device(run, value, name):
    given = " --sram-kib 512" if DEVICES[name].sram is None else ""
    inputs = value(f"model --device {name.upper()}{given}")["inputs"]
    assert inputs["hbm_bandwidth_gb_s"] == DEVICES[name].bandwidth / 1e9
    assert inputs["sram_kb"] == (512 if given else DEVICES[name].sram / 1024)
    assert name in run(f"model --device {name}{given}")


def test_model_figures_replaced(value):
    given = "--bandwidth-gb-s 1000.5 --tflops 123.25 --sram-kib 64"
    report = value(f"model --device h200 {given}")
    assert report["inputs"]["hbm_bandwidth_gb_s"] == 1000.5
    assert report["inputs"]["compute_tops"] == 123.25
    assert report["inputs"]["sram_kb"] == 64
    assert report["outputs"]["sram_fit"] is False
    assert report["outputs"]["achieved_block"] == 64


@pytest.mark.parametrize("dtype, tflops", [("fp8", 1978.9), ("fp32", 66.9), ("fp16", 989.4)])
def test_model_types(value, dtype, tflops):
    assert value(f"model --device h100-sxm --dtype {dtype}")["inputs"]["compute_tops"] == tflops


# Tables.

@pytest.mark.parametrize("line", [
    *COMMANDS, "model --seq-len 512 --batch 1", "model --sram-kib 1",
    "traffic --kv-heads 8 --value-dim 64 --window 4095 none",
    "model --seq-q 7 --seq-kv 131072 --align -5 --kv-heads 8 --window none none --value-dim 64",
])
def test_tables(run, line):
    text = run(line)
    assert text.isascii() and text.endswith("\n") and not text.endswith("\n\n")
    assert max(map(len, text.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_tables_show_the_figures(run):
    assert "4,160" in run("equivalence")
    assert "275,951.65" in run("traffic") and "69,524.78" in run("traffic")
    for figure in ("10.898", "4.442", "2.45", "295.5", "120.5", "192"):
        assert figure in run("model")
    for name in DEVICES:
        assert name in run("devices")


# Large and small.

def test_a_billion_tokens(value, run):
    n = 10**9
    row, = value(f"traffic --seq-len {n}")
    assert row["standard_nxn_matrix_hbm_mb"] == 8 * 32 * n**2 / 10**6
    tiles = 7812500 * (7812500 + 1) // 2
    tiled = (2 * n + 2 * 128 * tiles) * 128 * 32 * 2
    assert row["tiled_logical_access_mb_no_cache_reuse"] == round(tiled / 10**6, 2)
    report = value(f"model --seq-len {n}")
    assert report["outputs"]["flops_gflop"] == 2 * n**2 * 128 * 8 * 32 / 1e9
    run(f"traffic --seq-len {n}"), run(f"model --seq-len {n}")


@pytest.mark.parametrize("n", [1, 2, 10**18])
def test_any_size(value, run, n):
    for line in (
        f"traffic --seq-len {n} --heads {n} --head-dim {n} --block {n} --dtype fp64",
        f"traffic --seq-len {n} --heads 1 --head-dim 1 --block 1 --dtype fp8",
        f"model --batch {n} --heads {n} --seq-len {n} --head-dim {n} --block {n}",
    ):
        value(line), run(line)


@pytest.mark.parametrize("x", ["0.001", "1e12"])
@pytest.mark.parametrize("option", ["--bandwidth-gb-s", "--tflops", "--sram-kib"])
def test_any_figure(value, run, option, x):
    for n in (1, 8192, 10**18):
        value(f"model --seq-len {n} {option} {x}"), run(f"model --seq-len {n} {option} {x}")


# Bad input.

SIZES = {
    "equivalence": ("--seq-len", "--head-dim", "--block-q", "--block-kv"),
    "traffic": ("--seq-len", "--heads", "--kv-heads", "--head-dim", "--value-dim", "--block"),
    "model": ("--batch", "--heads", "--kv-heads", "--seq-len", "--seq-q", "--seq-kv", "--head-dim", "--value-dim",
              "--block"),
}
BAD_SIZES = ("0", "-1", "-5000000000", "1.5", "1e3", "-1e3", "nan", "inf", "-inf", "ten",
             "0x10", "", " ", "1,024", "9" * 30, "9" * 5000)


@pytest.mark.parametrize("command, option", [(c, o) for c in SIZES for o in SIZES[c]])
def test_bad_sizes(refused, command, option):
    for text in BAD_SIZES:
        said = refused([command, option, text])
        assert f"argument {option}: a whole number from 1 to " in said
        assert repr(text) in said


@pytest.mark.parametrize("option", ["--bandwidth-gb-s", "--tflops", "--sram-kib"])
def test_bad_figures(refused, option):
    for text in ("0", "-1", "-1e3", "nan", "-nan", "inf", "-inf", "1e300", "1e-300", "much", ""):
        said = refused(["model", option, text])
        assert f"argument {option}: a number from 0.001 to 1e12, not {text!r}" in said


@pytest.mark.parametrize("line, words", [
    ("traffic --seq-len 1024 0", "--seq-len"),
    ("traffic --seq-len", "--seq-len"),
    ("traffic --dtype int8", "--dtype: one of fp64, fp32, fp16, bf16, fp8, not 'int8'"),
    ("model --dtype fp64", "--dtype: one of fp32, fp16, bf16, fp8, not 'fp64'"),
    ("model --device h300", "--device: one of v100-sxm2, t4,"),
    ("model --device", "--device"),
    ("equivalence --seed -1", "--seed: a whole number from 0"),
    ("equivalence --seed 0.5", "--seed: a whole number from 0"),
    ("equivalence --seq-len 4097", "--seq-len: a whole number from 1 to 4,096"),
    ("equivalence --head-dim 1025", "--head-dim: a whole number from 1 to 1,024"),
    ("equivalence --seq-len 4096 --block-q 1 --block-kv 1", "--block-q: with --block-kv at least"),
    ("equivalence --plot x.png", "--plot"),
    ("devices --plot x.png", "--plot"),
    ("devices --no-causal", "--no-causal"),
    ("traffic --seq 1024", "--seq"),
    ("model --nonsense", "--nonsense"),
    ("model --seq-q 1", "both seq_q and seq_kv"),
    ("model --seq-len 8 --seq-q 1 --seq-kv 8", "seq_len=8 and seq_q=1"),
    ("model --seq-q 1 --seq-kv 8", "seq_q=1 and seq_kv=8 needs align: 'top_left'"),
    ("model --align middle", "--align: top_left, bottom_right or a whole number, not 'middle'"),
    ("model --align 0.5", "--align: top_left"),
    ("model --kv-heads 5", "kv_heads divides heads; got kv_heads=5, heads=32"),
    ("traffic --kv-heads 5", "kv_heads divides heads; got kv_heads=5, heads=32"),
    ("model --window 4095", "--window: expected 2 arguments"),
    ("traffic --window -1 0", "--window: a whole number from 0 to 10**18, not '-1'"),
    ("nonsense", "nonsense"),
    ("--json", "--json"),
])
def test_bad_lines(refused, line, words):
    assert words in refused(line)


def test_bad_input_in_one_line(refused):
    assert "int\\n8" in refused(["traffic", "--dtype", "int\n8"])
    assert "--what is" in refused(["traffic", "--what\nis"])


@pytest.mark.parametrize("line, option", [
    ("--device tpuv5e", "--sram-kib"),
    ("--device tpuv5e --dtype fp8 --sram-kib 9", "--tflops"),
    ("--device v100-sxm2 --dtype fp8", "--tflops"),
    ("--dtype fp32", "--tflops"),
])
def test_figures_the_catalogue_lacks(refused, value, line, option):
    assert f"argument {option}: a number is needed here" in refused(f"model {line}")
    value(f"model {line} {option} 100")


# Files.

@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", ["", " --json"])
def test_out_holds_what_is_printed(run, tmp_path, command, form):
    file = tmp_path / "report"
    assert run(f"{command}{form} --out {file}") == ""
    assert file.read_text() == run(f"{command}{form}")
    assert os.listdir(tmp_path) == ["report"]


def test_out_like_any_new_file(run, tmp_path):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    old = os.umask(0o026)
    try:
        plain.write_text("")
        run(f"devices --out {ours}")
    finally:
        os.umask(old)
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_out_replaces_in_one_step(run, tmp_path):
    file = tmp_path / "report"
    file.write_text("old")
    with open(file) as reader:  # who has opened the old one reads it to its end
        run(f"devices --out {file}")
        assert reader.read() == "old"
    assert "h100-sxm" in file.read_text()


def test_out_follows_links(run, tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    run(f"devices --out {link}")
    assert link.is_symlink() and "h100-sxm" in real.read_text()


def test_out_here(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("devices --out report")
    assert os.listdir() == ["report"]


@pytest.mark.parametrize("place", [
    "", ".", "folder", "folder/", "new/", "none/report", "file/report", "loop",
    "/dev/null", "x" * 300, "nul\0l",
])
def test_out_impossible(refused, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "loop").symlink_to("folder")
    before = sorted(tmp_path.rglob("*"))
    said = refused(["devices", "--out", place])
    assert "argument --out: " in said and repr(place) in said
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.skipif(ROOT_USER, reason="root may write anywhere")
def test_out_protected(refused, tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o444)
    assert "write-protected" in refused(f"devices --out {file}")
    tmp_path.chmod(0o555)
    try:
        assert "--out" in refused(f"devices --out {tmp_path}/new")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["replace", "write"])
def test_failure_leaves_the_old_file(tmp_path, monkeypatch, capsys, fault, step):
    file, picture = tmp_path / "report", tmp_path / "roof.png"
    file.write_text("old"), picture.write_text("old")

    def fail(*args):
        if step == "write":  # the second file, half of it
            Path(args[0]).touch()
        raise fault

    if step == "replace":
        monkeypatch.setattr("flashlit.cli.os.replace", fail)
    else:
        write = Path.write_bytes
        monkeypatch.setattr("flashlit.cli.Path.write_bytes",
                            lambda p, data: fail(p) if b"PNG" in data[:4] else write(p, data))
    status = main(["traffic", "--out", str(file), "--plot", str(picture)])
    err = capsys.readouterr().err
    if isinstance(fault, OSError):
        assert status == 2 and len(err.splitlines()) == 1 and "No space left" in err
    else:
        assert (status, err) == (130, "")
    assert file.read_text() == picture.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["report", "roof.png"]


# Pictures.

@pytest.mark.parametrize("line", [
    "traffic", "traffic --seq-len 1 --heads 1 --head-dim 1",
    f"traffic --seq-len {10**18} 3 {10**9}",
    "model", f"model --seq-len {10**18}", "model --seq-len 1",
])
@pytest.mark.parametrize("suffix", ["png", "svg", "PNG"])
def test_plot(run, tmp_path, line, suffix):
    file = tmp_path / f"picture.{suffix}"
    assert run(f"{line} --plot {file}") == run(line)
    data = file.read_bytes()
    if suffix == "svg":
        assert ElementTree.fromstring(data).tag.endswith("svg")
    else:
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
        assert int.from_bytes(data[16:20], "big") > 1000  # pixels across
    assert os.listdir(tmp_path) == [file.name]


@pytest.mark.parametrize("name", ["roof.pdf", "roof", "png", "roof.png/", ""])
def test_plot_of_another_kind(refused, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for command in ("traffic", "model"):
        said = refused([command, "--plot", name])
        assert f"--plot: a file that ends in .png or .svg, not {name!r}" in said
    assert os.listdir() == []


def test_plot_impossible(refused, tmp_path):
    out = tmp_path / "report"
    out.write_text("old")
    assert "--plot" in refused(f"traffic --out {out} --plot {tmp_path}/none/roof.png")
    (tmp_path / "roof.png").mkdir()
    assert "--plot" in refused(f"traffic --out {out} --plot {tmp_path}/roof.png")
    assert out.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["report", "roof.png"]


def test_plot_is_not_out(refused, tmp_path):
    file = tmp_path / "roof.svg"
    assert "--plot" in refused(f"traffic --out {file} --plot {tmp_path}/./roof.svg")
    assert os.listdir(tmp_path) == []


def test_plot_without_matplotlib(tmp_path):
    file = tmp_path / "roof.png"
    code = ("import sys; sys.modules['matplotlib'] = None; from flashlit.cli import main; "
            f"sys.exit(main(['model', '--plot', {str(file)!r}]))")
    done = shell(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "--plot" in done.stderr and "pip install 'flashlit[plot]'" in done.stderr
    assert not file.exists()


def test_matplotlib_only_to_plot():
    lines = [c.split() for c in (*COMMANDS, "model --json")]
    code = ("import sys; from flashlit.cli import main; "
            f"assert not any(map(main, {lines})); assert 'matplotlib' not in sys.modules")
    assert shell(sys.executable, "-c", code).stderr == ""


# Processes.

@pytest.mark.parametrize("program", [PYTHON_M, SCRIPT], ids=["python -m", "script"])
def test_program(run, program):
    done = shell(*program, "traffic", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("traffic --json")
    assert shell(*program, "--version").stdout == f"flashlit {__version__}\n"

    done = shell(*program, "traffic", "--block", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("flashlit traffic: ")


def test_help(run):
    text = run("")
    assert text == run("--help") and all(command in text for command in COMMANDS)
    for command in COMMANDS:
        assert "--json" in run(f"{command} --help")
    assert "--plot" in run("model --help") and "--plot" not in run("devices --help")


@pytest.mark.skipif(os.name != "posix", reason="pipes as POSIX has them")
@pytest.mark.parametrize("line", ["model --json", "devices", "--help", "--version"])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_reader_leaves(line, buffered):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*PYTHON_M, *line.split()], stdout=writer, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": buffered}, timeout=60,
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode in (0, 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PYTHON_M, "devices"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    said = b"flashlit: standard output: No space left on device\n"
    assert done.stderr == said


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_interrupt():
    line = "equivalence --seq-len 4096 --block-q 8 --block-kv 8".split()
    code = ("import signal, sys; from flashlit.cli import main; "
            "signal.signal(signal.SIGINT, signal.default_int_handler); "
            f"print('ready', flush=True); sys.exit(main({line}))")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_ascii_terminal():
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    for words in (["equivalence"], ["model", "--seq-len", "512", "--batch", "1"]):
        done = shell(*PYTHON_M, *words, env=env)
        assert (done.returncode, done.stderr) == (0, "")
