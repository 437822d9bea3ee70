"""The museum cannot rot, planting leaves nothing behind, and the judge names every fault."""
import ast
import json
import re
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from flashlit.museum import DOORS, MUSEUM, ROOMS, Exhibit, changed, faulty, original, plant
from flashlit.testing import CLAUSES, check

each_exhibit = pytest.mark.parametrize("name", MUSEUM)
SOURCE = re.compile(r"([\w.-]+/[\w.-]+)(?:#([1-9]\d*)|@\d+(?:\.\d+)+ \(observed\))")
RIGHT = {(e.kind, e.function, *e.given): e for e in MUSEUM.values()}


def test_the_collection():
    names = [name for room in ROOMS.values() for name in room]
    assert names == [*MUSEUM] and len(names) >= 50
    assert {e.kind for e in MUSEUM.values()} == {*DOORS}
    assert {e.clause for e in MUSEUM.values()} >= {*CLAUSES} - {1, 13}


@each_exhibit
def test_label(name):
    e = MUSEUM[name]
    assert e.name == name and e.clause in CLAUSES and e.note
    assert all(map(SOURCE.fullmatch, e.source.split(", ")))


def test_the_chapter_links_every_source():
    """An item for each exhibit; a numbered report is a link, what was seen in a release is none."""
    notebook = json.loads((Path(__file__).parents[1] / "nbs" / "16_museum.ipynb").read_text())
    text = "".join(next(c for c in notebook["cells"] if c["id"] == "sources")["source"])

    def link(source):
        repo, number = SOURCE.fullmatch(source).groups()
        return f"[{source}](https://github.com/{repo}/issues/{number})" if number else source

    items = [f"- {e.name}: {', '.join(map(link, e.source.split(', ')))}" for e in MUSEUM.values()]
    assert [line for line in text.splitlines() if line.startswith("- ")] == items


@each_exhibit
def test_the_edit_fits(name):
    """`old` stands once in the module, `new` makes another module of it that still parses."""
    e = MUSEUM[name]
    source = (files("flashlit") / f"{e.module}.py").read_text("utf-8")
    assert source.count(e.old) == 1
    assert ast.dump(ast.parse(faulty(e))) != ast.dump(ast.parse(source))
    assert {line[0] for line in changed(e).splitlines()} <= {"-", "+"}


def test_an_edit_that_does_not_fit():
    for old, n in (("no such text", 0), ("return", "[0-9]+")):
        stray = Exhibit("stray", "pairs", 5, "scores", old, "", "a/b#1", "a note")
        with pytest.raises(ValueError, match=f"^stray: its old text stands {n} times in scores.py, not once$"):
            plant(stray)


def test_planting_leaves_nothing_behind():
    e = MUSEUM["always-top-left"]
    x = np.zeros((1, 1)), np.zeros((2, 1)), np.array([[1.0], [3]])
    options = dict(causal=True, align="bottom_right")
    plant(e)  # tempfile and importlib import what they need
    before = original(e), [*sys.path], {*sys.modules}, {*sys.path_importer_cache}
    wrong = plant(e)
    assert (original(e), [*sys.path], {*sys.modules}, {*sys.path_importer_cache}) == before
    assert wrong(*x, **options) == 1 and original(e)(*x, **options) == 2
    again = plant(MUSEUM["window-one-too-wide"])  # of a package of the same name
    assert again(*x, **options) == 2 and wrong(*x, **options) == 1


def test_planting_cleans_up_after_an_import_that_fails():
    broken = Exhibit("broken", "pairs", 5, "scores", "import math", "import no_such", "a/b#1", "a note")
    before = [*sys.path], {*sys.modules}
    with pytest.raises(ModuleNotFoundError):
        plant(broken)
    assert ([*sys.path], {*sys.modules}) == before


@pytest.mark.parametrize("key", RIGHT, ids=" ".join)
def test_the_judge_finds_no_fault_in_the_right_ones(key):
    report = check(original(RIGHT[key]), kind=key[0])
    assert report.ok, str(report)


@each_exhibit
def test_the_judge_names_the_clause(name):
    e = MUSEUM[name]
    report = check(plant(e), kind=e.kind)
    assert e.clause in report.broken, f"{changed(e)}\n{report}"
