"""What the README says is true: its example, its figure, its map; and one version stands everywhere."""
import json
import re
from pathlib import Path

import flashlit

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"


def example():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    return code


def test_the_example_runs(capsys):
    assert len(example().splitlines()) == 5
    exec(example(), {})
    assert "compute-bound" in capsys.readouterr().out


def test_the_front_page_runs_the_same_example():
    cells = json.loads((ROOT / "nbs/index.ipynb").read_text())["cells"]
    assert example().strip() in ["".join(cell["source"]).strip() for cell in cells]


def test_the_figure_shows_the_models_numbers():
    call = flashlit.Problem(8192, batch=8, heads=32, causal=True)
    best = flashlit.estimate(call, flashlit.DEVICES["seed"])
    svg = (ROOT / "book/_static/traffic.svg").read_text()
    gb = [f"{x / 1e9:.1f}" for x in (best.naive_bytes, 2 * best.score_bytes, best.tiled_bytes)]
    ms = [f"{t * 1e3:.1f}" for t in (best.naive_time, best.tiled_time)]
    call = ["8,192", "8", "32", "128", "16"]
    text = " ".join(re.findall(r"<text[^>]*>(.*?)</text>", svg))
    assert sorted(re.findall(NUMBER, text)) == sorted([*call, *gb, "3,350", "990", *ms])
    (told,) = re.findall(r"<desc[^>]*>(.*?)</desc>", svg)
    assert re.findall(NUMBER, told) == gb
    (alt,) = re.findall(r"!\[(.*?)\]", README)
    assert re.findall(NUMBER, alt) == [gb[0], gb[2]]

    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="38"', svg)]
    bars = (best.tiled_bytes, 2 * best.score_bytes, best.tiled_bytes)
    assert widths == [round(540 * b / best.naive_bytes, 1) for b in bars]


def test_the_map_names_every_notebook():
    named = set(re.findall(r"`(nbs/\w+\.ipynb)`", README))
    assert named == {f"nbs/{p.name}" for p in (ROOT / "nbs").glob("*.ipynb")}


def test_one_version():
    def stated(file, pattern):
        return re.search(pattern, (ROOT / file).read_text(), re.M)[1]

    assert {
        stated("settings.ini", r"^version = (.*)$"),
        stated("CITATION.cff", r"^version: (.*)$"),
        stated("CHANGELOG.md", r"^## \[(\d.*?)\]"),
    } == {flashlit.__version__}


def test_every_target_that_is_called_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    callers = [ROOT / ".ci/run", *ROOT.glob(".github/workflows/*.yml"), ROOT / "CONTRIBUTING.md"]
    lines = "\n".join(p.read_text() for p in callers)
    called = re.findall(r"^\s*(?:- run: )?make (?:PY=\S+ )?([a-z]+)$", lines, re.M)
    called += re.findall(r"`make (?:PY=\S+ )?([a-z]+)`", lines)
    assert called and set(called) <= targets
