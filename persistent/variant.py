"""Variant `persistent`: the forward in long-lived thread blocks; the backward as in `fused`."""

from __future__ import annotations

from fused import hopper, hopper_backward
from fused.backward import backward, name_backward
from ssd.baseline.variant import VARIANT as BASELINE
from ssd.registry import Variant
from ssd.types import Options, SSDInputs

from .forward import choose_states_every, forward, name_forward, takes_documents, writes_states


def _name_kernels(inputs: SSDInputs, options: Options, mode: str, keeps: bool) -> str:
    return name_backward(inputs, options) if mode == "bwd" else name_forward(inputs, options, keeps)


def _takes_documents(inputs: SSDInputs, options: Options, mode: str) -> bool:
    return hopper_backward.takes_documents(inputs, options) if mode == "bwd" else takes_documents(inputs, options)


VARIANT = Variant("persistent", supports=BASELINE.supports, forward=forward, backward=backward,
                  options=("exp2", "low_precision_states", "low_precision_CB", "fuse_bmm", "stationary", "segments", "gluon",
                           "save_states", "fuse_backward", "split_backward", "replay"),
                  states_every=choose_states_every, writes_states=writes_states, kernels=_name_kernels,
                  takes_these=_takes_documents, scan_deferring_norm=hopper.scan_deferring_norm,
                  explain_no_deferred_norm=hopper.explain_no_deferred_norm)
