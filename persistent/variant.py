"""Variant `persistent`: the forward in long-lived thread blocks; the backward as in `fused`."""

from __future__ import annotations

from fused.backward import backward
from fused.variant import has_hopper_backward
from ssd.auto_variant import Measured
from ssd.baseline.variant import VARIANT as BASELINE
from ssd.registry import Variant

from .forward import choose_states_every, forward


def _rank(call: Measured, on_hopper: bool) -> int | None:
    """First on Hopper; no forward to try elsewhere; a backward in plain Triton is that of `fused`, and comes after it."""
    if call.mode == "bwd":
        return 2 if has_hopper_backward(call, on_hopper) else -2
    return 2 if on_hopper else None


VARIANT = Variant("persistent", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "low_precision_CB", "fuse_bmm", "stationary", "segments", "gluon",
                           "save_states", "fuse_backward", "split_backward", "replay"),
                  states_every=choose_states_every, rank=_rank)
