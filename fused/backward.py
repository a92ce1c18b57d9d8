"""The backward that `fused` and `persistent` share, in sub-chunks. On Hopper, where the inputs allow, hopper_backward; else
chunk_cumsum, chunk_state_passing (from the states that the forward kept, if it did), dstates_passing, dC_dCB, dB_dx and
chunk_cumsum_bwd; with a gate chunk_scan_dz as well. For few heads of a long sequence the baseline's kernels stand in for the
walks. Of large inputs whose states were not kept, either in two halves.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ssd.baseline import backward as baseline
from ssd.baseline.kernels.chunk_scan_dz import chunk_scan_dz
from ssd.kernels.arguments import LONGEST_TILE, fit_to_tiles
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.kernels.chunk_cumsum_bwd import chunk_cumsum_bwd
from ssd.runtime.tuning import pick
from ssd.types import SUB_CHUNK, Options, SSDGrads, SSDInputs, SSDSaved

from . import hopper, hopper_backward
from .kernels.chunk_state_passing import refine_states
from .kernels.dB_dx import dB_dx
from .kernels.dC_dCB import dC_dCB
from .plain_states import compute_dstates, compute_states
from .split_backward import run_in_halves, should_split

_KERNELS = ("dstates_passing", "dC_dCB", "dB_dx")


def backward(saved: SSDSaved, dout: Tensor, dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    """Gradients of every input that is present; dout has the shape and dtype of x, any strides."""
    if not saved.options.fuse_backward:
        return baseline.backward(saved, dout, dfinal_states, into)
    run, last_state, every = _run_group_kernels, _compute_last_state, SUB_CHUNK
    if hopper_backward.can_run(saved.inputs, saved.options):
        run, last_state = hopper_backward.backward, hopper_backward.compute_last_state
        every = hopper.tokens_between_states(saved.inputs)
    if saved.options.split_backward and not saved.inputs.has_document_states and should_split(saved, every):
        return run_in_halves(run, last_state, saved, dout, dfinal_states, into)
    return run(saved, dout, dfinal_states, into)


def name_backward(i: SSDInputs, options: Options) -> str:
    """As `Variant.kernels`, of the variants that share this backward."""
    if not options.fuse_backward:
        return "baseline"
    return "fused" if hopper_backward.cannot_run(i, options) else "fused on Hopper"


def _compute_last_state(i: SSDInputs, options: Options) -> Tensor:
    """The state after the last token, (batch, nheads, headdim, dstate) fp32; of those before it, few are in memory."""
    cut = replace(i, chunk_size=LONGEST_TILE)
    with torch.cuda.device_of(i.x):
        return compute_states(cut, *chunk_cumsum(cut), options)[1]


def _run_group_kernels(saved: SSDSaved, dout: Tensor, dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    i, options = saved.inputs, saved.options
    # as long as the tiles of every kernel here allow
    cut = replace(i, chunk_size=min(pick(kernel, i)["BLOCK_M"] for kernel in _KERNELS))
    dout = fit_to_tiles(dout)
    with torch.cuda.device_of(i.x):
        arrivals = i.A.new_empty(i.nheads, dtype=torch.int32)
        dt, dA_cumsum = chunk_cumsum(cut, arrivals=arrivals)
        prev_states = saved.prev_states
        if prev_states is None:
            prev_states, _ = compute_states(cut, dt, dA_cumsum, options)
        elif cut.chunk_size < saved.states_every:
            prev_states = refine_states(cut, dt, dA_cumsum, prev_states, saved.states_every, options)
        dz, dy = (None, dout) if i.z is None else chunk_scan_dz(saved, dout, into.dz)
        G, dinitial_states, s_tiles = compute_dstates(i, dy, dA_cumsum, prev_states, dfinal_states, options,
                                                      into.dinitial_states)
        dC, dCB, net = dC_dCB(i, dt, dA_cumsum, dy, prev_states, options, into.dC)
        dx, dB, dD, u_v_x, q = dB_dx(i, dt, dA_cumsum, dy, G, dCB, options, into.dx, into.dB)
        no_parts = net.new_empty(0, *net.shape)  # of r and col, which are in net
        ddt, dA, ddt_bias, _ = chunk_cumsum_bwd(cut, u_v_x, no_parts, q, s_tiles, net, no_parts, arrivals, into.ddt)
    return SSDGrads(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states)
