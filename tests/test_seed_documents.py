"""Every figure of the two seed documents, at the precision in which it is printed.

tests/data holds copies without the keys `node` and `compute_ms`. Numbers are read
as text, so that the digits after the point say what to round ours to.
"""
import json
import random
from pathlib import Path

import numpy as np
import pytest

from flashlit import (
    DEVICES, HBM, Meter, Problem, attention, compulsory_bytes, flash_attention,
    flash_bytes, standard_bytes,
)
from flashlit.model import report

DATA = Path(__file__).parent / "data"


class Printed(str):
    """A number with a decimal point, as it was written."""

    def shows(self, x):
        """Whether this is how x is written, to that many digits."""
        digits, _, power = self.partition("e")
        decimals = len(digits.partition(".")[2]) - int(power or 0)
        return type(x) is float and round(x, decimals) == float(self)


def leaves(tree, path=()):
    """path -> value, for everything in a document that holds nothing else."""
    if not isinstance(tree, (dict, list, tuple)):
        return {path: tree}
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {p: x for key, part in parts for p, x in leaves(part, (*path, key)).items()}


def document(number):
    text = (DATA / f"seed_{number}.json").read_text(encoding="utf-8")
    return json.loads(text, parse_float=Printed)


class Noted(HBM):
    """Metered memory that keeps how many elements each load had."""

    def __init__(self, *args):
        super().__init__(*args)
        self.loads = []

    def __getitem__(self, key):
        tile = super().__getitem__(key)
        self.loads.append(tile.shape)
        return tile


def inputs(n, d):
    """q, k and v, row by row, from the generator that the document's rows fit."""
    draw = random.Random(42).uniform
    return np.reshape([draw(-0.8, 0.8) for _ in range(3 * n * d)], (3, n, d))


def run(kernel, **options):
    """The output, elements of S and P written, and the loads of Q and of K."""
    meter = Meter()
    q, k, v = (Noted(x, meter, name) for x, name in zip(inputs(64, 16), "QKV"))
    o = kernel(q, k, v, causal=True, **options)[:, :]
    beside = meter.written["S"] + meter.written["P"]
    assert meter.written.total() == beside + o.nbytes
    return o, beside // o.itemsize, q.loads, k.loads


def equivalence():
    """What stands under `equivalence_check`, metered."""
    naive, written, _, _ = run(attention)
    tiled, written_tiled, q, k = run(flash_attention, block_q=16, block_kv=16)
    return {
        "seq_len": naive.shape[0],
        "head_dim": naive.shape[1],
        "block_q": q[0][0],
        "block_kv": k[0][0],
        "max_abs_diff": np.abs(naive - tiled).max().item(),
        "standard_materialized_elements": written,
        "flash_materialized_hbm_elements": written_tiled,
        "flash_sram_tile_elements": max(r for r, _ in q) * max(r for r, _ in k),
        "flash_tiles_visited": len(k),
        "sample_row0_first4": tiled[0, :4].tolist(),
        "sample_last_row_first4": tiled[-1, :4].tolist(),
    }


def traffic(n):
    """A row of `hbm_traffic_sweep`: MB, 2-byte elements, 128 x 128 tiles."""
    p = Problem(n, heads=32, head_dim=128, causal=True, block_q=128, block_kv=128)
    standard, once = standard_bytes(p, causal="dense"), compulsory_bytes(p)
    return {
        "seq_len": p.seq_q,
        "num_heads": p.heads,
        "head_dim": p.head_dim,
        "standard_qkv_o_mb": once / 1e6,
        "standard_nxn_matrix_hbm_mb": (standard - once) / 1e6,
        "standard_total_hbm_mb": standard / 1e6,
        "tiled_logical_access_mb_no_cache_reuse": flash_bytes(p) / 1e6,
        "qkvo_compulsory_bytes_mb": once / 1e6,
        "num_q_blocks": -(-n // p.block_q),
    }


SWEEP = (1024, 4096, 16384, 32768)
SEED_000 = {"equivalence_check": equivalence(), "hbm_traffic_sweep": [*map(traffic, SWEEP)]}
SEED_001 = report(
    Problem(8192, batch=8, heads=32, head_dim=128, causal=True), DEVICES["seed"]
)
OURS = {"000": SEED_000, "001": SEED_001}
WORDS = {  # said in our own words, or not said at all
    "000": {("execution_mode",), *(("hbm_traffic_sweep", i, "accounting") for i in range(4))},
    "001": {("model",), ("outputs", "verdict")},
}
DIFFERENCE = ("equivalence_check", "max_abs_diff")


@pytest.mark.parametrize("number", OURS)
def test_every_leaf_is_covered(number):
    theirs, ours = leaves(document(number)), leaves(OURS[number])
    assert theirs.keys() - WORDS[number] == ours.keys() - WORDS[number]
    assert all(type(theirs[path]) is str and theirs[path] for path in WORDS[number])
    assert len(theirs) == {"000": 58, "001": 238}[number]


@pytest.mark.parametrize("number", OURS)
def test_every_figure(number):
    ours = leaves(OURS[number])
    for path, stated in leaves(document(number)).items():
        if path in WORDS[number] or path == DIFFERENCE:
            continue
        if isinstance(stated, Printed):
            assert stated.shows(ours[path]), (path, stated, ours[path])
        else:
            assert type(stated) is type(ours[path]), path
            assert stated == ours[path], path


def test_difference():
    # The document's 1.388e-16 is the rounding of one machine's matrix product:
    # another BLAS adds in another order. What holds everywhere is its size.
    stated = document("000")["equivalence_check"]["max_abs_diff"]
    ours = SEED_000["equivalence_check"]["max_abs_diff"]
    assert float(stated) < 1e-15 and ours < 1e-15


def test_first_row_is_the_first_value():
    o = run(flash_attention, block_q=16, block_kv=16)[0]
    assert np.array_equal(o[0], inputs(64, 16)[2, 0])


def test_report_rounds_as_the_document_does():
    stated, ours = leaves(document("001")), leaves(SEED_001)
    for path in stated.keys() - WORDS["001"]:
        if isinstance(stated[path], Printed):
            assert repr(ours[path]) == stated[path], path


def test_words_of_our_own():
    stated = document("001")
    assert SEED_001["model"] and SEED_001["model"] != stated["model"]
    said = SEED_001["outputs"]["verdict"]
    assert said != stated["outputs"]["verdict"]
    for number in ("2.45", "34.36 GB", "17.18 GB", "100 %"):
        assert number in said


def test_printed():
    assert Printed("2.45").shows(2.4531) and not Printed("2.45").shows(2.456)
    assert Printed("17.0").shows(17.04) and not Printed("17.0").shows(17)
    assert Printed("1.388e-16").shows(1.3882e-16)
    assert not Printed("1.388e-16").shows(1.3895e-16)
