"""Attention kernels, derived, run, counted and forecast.

`attention`, `flash_attention`, `decode_attention` and `flash_attention_vjp` compute,
`HBM` and `Meter` count, `Problem` and the functions of it give the same counts in closed
form, and `estimate` turns them into time on one of the `DEVICES`. `flashlit.testing`
judges other people's kernels. Each module is a chapter of the book, `nbs/` in the
repository.
"""

from flashlit.backward import flash_attention_vjp
from flashlit.decode import decode_attention
from flashlit.fast import flash_attention
from flashlit.hbm import HBM, Meter
from flashlit.model import Estimate, estimate, profile, verdict
from flashlit.naive import attention
from flashlit.online import merge
from flashlit.roofline import DEVICES, Device
from flashlit.scores import Band, pairs
from flashlit.traffic import (
    Problem,
    compulsory_bytes,
    flash_bytes,
    flops,
    standard_bytes,
)
from flashlit.variants import alibi_bias, alibi_slopes, tile_counts

__version__ = "0.1.0"
