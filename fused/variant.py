"""Variant `fused`: the forward with merged stages; the backward in group loops."""

from __future__ import annotations

from ssd.baseline.variant import VARIANT as BASELINE
from ssd.registry import Variant
from ssd.types import Options, SSDInputs

from . import hopper_backward
from .backward import backward, name_backward
from .forward import choose_states_every, forward, name_forward, writes_states


def _name_kernels(inputs: SSDInputs, options: Options, mode: str, keeps: bool) -> str:
    return name_backward(inputs, options) if mode == "bwd" else name_forward(inputs, options, keeps)


def _takes_documents(inputs: SSDInputs, options: Options, mode: str) -> bool:
    return mode == "bwd" and hopper_backward.takes_documents(inputs, options)


VARIANT = Variant("fused", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "fuse_states", "low_precision_CB", "causal_blocks", "fuse_bmm",
                           "two_level", "gluon", "save_states", "fuse_backward", "split_backward", "replay"),
                  states_every=choose_states_every, writes_states=writes_states, kernels=_name_kernels,
                  takes_these=_takes_documents)
