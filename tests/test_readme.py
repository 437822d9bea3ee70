"""What the README says is true: its example runs, its figure and its map agree with the code."""
import re
from pathlib import Path

import flashlit

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.splitlines()) == 5
    exec(code, {})
    assert "compute" in capsys.readouterr().out


def test_the_figure_shows_the_models_numbers():
    call = flashlit.Problem(8192, batch=8, heads=32, causal=True)
    best = flashlit.estimate(call, flashlit.DEVICES["seed"])
    svg = (ROOT / "book/_static/traffic.svg").read_text()
    for gb in (best.naive_bytes, best.tiled_bytes, 2 * best.score_bytes):
        assert f"{gb / 1e9:.1f} GB" in svg
    for seconds in (best.naive_time, best.tiled_time):
        assert f"{seconds * 1e3:.1f} ms" in svg
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="38"', svg)]
    scale = 540 / best.naive_bytes
    bars = [best.tiled_bytes, 2 * best.score_bytes, best.tiled_bytes]
    assert widths == [round(b * scale, 1) for b in bars]


def test_the_map_names_every_notebook():
    named = set(re.findall(r"`(nbs/\w+\.ipynb)`", README))
    assert named == {f"nbs/{p.name}" for p in (ROOT / "nbs").glob("*.ipynb")}
