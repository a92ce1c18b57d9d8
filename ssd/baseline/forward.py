"""The baseline's forward: five launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.chunk_cumsum import chunk_cumsum
from ..types import Options, SSDInputs, SSDSaved
from .kernels.bmm_chunk import bmm_chunk
from .kernels.chunk_scan import chunk_scan
from .kernels.chunk_state import chunk_state, varlen_states
from .kernels.state_passing import state_passing


def forward(inputs: SSDInputs, options: Options, save: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    """Returns out (shape and dtype of x), final_states (batch, nheads, headdim, dstate) fp32, and, if `save`, what a backward
    needs.
    """
    with torch.cuda.device_of(inputs.x):
        dt, dA_cumsum = chunk_cumsum(inputs)
        # the fp32 states, the largest intermediate, are not held beyond the stage that reads them
        prev_states, final_states = state_passing(inputs, chunk_state(inputs, dt, dA_cumsum, options), dA_cumsum)
        CB = bmm_chunk(inputs, options)
        out, y = chunk_scan(inputs, CB, dt, dA_cumsum, prev_states, options, save)
        ends = None if inputs.cu_seqlens is None else varlen_states(inputs, dt, dA_cumsum, prev_states, options)
    kept = prev_states if inputs.keeps_states(options, save) else None
    return out, final_states, SSDSaved(inputs, options, y, ends, kept, out=out)
