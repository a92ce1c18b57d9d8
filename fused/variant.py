"""Variant `fused`: the forward with merged stages; the backward in group loops."""

from __future__ import annotations

from ssd.auto_variant import Measured
from ssd.baseline.variant import VARIANT as BASELINE
from ssd.registry import Variant

from . import hopper
from .backward import backward
from .forward import choose_states_every, forward


def _rank(call: Measured, on_hopper: bool) -> int:
    """Before the baseline, but for a backward in plain Triton, which is slower at some sizes."""
    return -1 if call.mode == "bwd" and not has_hopper_backward(call, on_hopper) else 1


def has_hopper_backward(call: Measured, on_hopper: bool) -> bool:
    """True when the backward for Hopper takes inputs of these sizes."""
    return on_hopper and hopper.has_tiles(call.itemsize, call.headdim, call.dstate)


VARIANT = Variant("fused", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "fuse_states", "low_precision_CB", "causal_blocks", "fuse_bmm",
                           "two_level", "gluon", "save_states", "fuse_backward", "split_backward", "replay"),
                  states_every=choose_states_every, rank=_rank)
