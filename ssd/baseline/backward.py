"""The baseline's backward: two of the forward's stages again, or four where the states between chunks were not kept, then
nine kernels (bmm_bwd twice), ten with a gate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.arguments import fit_to_tiles
from ..kernels.chunk_cumsum import chunk_cumsum
from ..kernels.chunk_cumsum_bwd import chunk_cumsum_bwd
from ..types import SSDGrads, SSDSaved
from .kernels.bmm_bwd import bmm_bwd_dB, bmm_bwd_dC
from .kernels.bmm_chunk import bmm_chunk
from .kernels.chunk_scan_chunk_state_dx import chunk_scan_chunk_state_dx
from .kernels.chunk_scan_dC import chunk_scan_dC
from .kernels.chunk_scan_dCB import chunk_scan_dCB
from .kernels.chunk_scan_dstates import chunk_scan_dstates
from .kernels.chunk_scan_dz import chunk_scan_dz
from .kernels.chunk_state import chunk_state
from .kernels.chunk_state_dB import chunk_state_dB
from .kernels.ddA_cumsum import ddA_cumsum
from .kernels.state_passing import state_passing
from .kernels.state_passing_bwd import state_passing_bwd


def backward(saved: SSDSaved, dout: Tensor, dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    """Gradients of every input that is present; dout has the shape and dtype of x, any strides."""
    i, options = saved.inputs, saved.options
    dout = fit_to_tiles(dout)
    with torch.cuda.device_of(i.x):
        arrivals = i.A.new_empty(i.nheads, dtype=torch.int32)
        dt, dA_cumsum = chunk_cumsum(i, arrivals=arrivals)
        if saved.prev_states is None:
            prev_states, _ = state_passing(i, chunk_state(i, dt, dA_cumsum, options), dA_cumsum)
        else:
            prev_states = saved.prev_states[:, :: i.chunk_size // saved.states_every].contiguous()
        CB = bmm_chunk(i, options)

        dz, dy = (None, dout) if i.z is None else chunk_scan_dz(saved, dout, into.dz)
        dstates, dinitial_states, s_tiles = state_passing_bwd(
            i, chunk_scan_dstates(i, dy, dA_cumsum, options), prev_states, dA_cumsum, dfinal_states, into.dinitial_states)
        dx, u_v_x, q, dD = chunk_scan_chunk_state_dx(i, CB, dt, dA_cumsum, dstates, dy, options, into.dx)
        dB_states = chunk_state_dB(i, dt, dA_cumsum, dstates, options)
        dC_states, r_tiles = chunk_scan_dC(i, dy, dA_cumsum, prev_states, options)
        dCB = chunk_scan_dCB(i, dt, dA_cumsum, dy, options)
        dB = bmm_bwd_dB(i, dCB, dB_states, options, into.dB)
        dC = bmm_bwd_dC(i, dCB, dC_states, options, into.dC)
        row, col_tiles = ddA_cumsum(i, dt, dA_cumsum, dy, CB, options)
        ddt, dA, ddt_bias, _ = chunk_cumsum_bwd(i, u_v_x, r_tiles, q, s_tiles, row, col_tiles, arrivals, into.ddt)
    return SSDGrads(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states)
