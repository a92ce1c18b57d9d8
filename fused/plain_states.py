"""States and their gradients in plain Triton, in one of two ways.

Walk: a program for each tile of a head's state takes the sequence in sub-chunks, and writes only the states that are asked for.
Chunks: each chunk on its own, then a recurrence over them, through fp32 states in memory. For few heads of a long sequence this
takes less time. `should_walk` chooses.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ssd.baseline.kernels.chunk_scan_dstates import chunk_scan_dstates
from ssd.baseline.kernels.chunk_state import chunk_state
from ssd.baseline.kernels.state_passing import state_passing
from ssd.baseline.kernels.state_passing_bwd import state_passing_bwd
from ssd.kernels.arguments import cdiv
from ssd.runtime.tuning import device_of, is_forced, pick
from ssd.types import SUB_CHUNK, Options, SSDInputs

from .kernels.chunk_state_passing import chunk_state_passing
from .kernels.dstates_passing import dstates_passing
from .time_model import get_time_model

_PROGRAMS_PER_SM = 8
_MOST_BYTES = 1 << 28  # of what chunks write in fp32: above this, saving memory matters more than saving time


def should_walk(i: SSDInputs, kernel: str) -> bool:
    """True when `kernel`, chunk_state_passing or dstates_passing, is expected to take less time than chunks of i.chunk_size on
    their own, or when chunks would take too much memory. While configs of `kernel` are tried out it is always launched, to be
    timed.
    """
    elements = i.batch * i.nheads * i.nchunks * i.headdim * i.dstate
    if is_forced(kernel) or elements * 4 >= _MOST_BYTES:
        return True
    config, device = pick(kernel, i), device_of(i)
    programs = i.batch * i.nheads * cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    model = get_time_model(device.name)
    step = {"chunk_state_passing": model.walk_states_step, "dstates_passing": model.walk_dstates_step}[kernel]
    walk = model.time_plain_walk(step, programs, _PROGRAMS_PER_SM * device.sms, cdiv(i.seqlen, SUB_CHUNK))
    return walk <= model.time_chunks(i.nchunks, elements)


def compute_states(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns prev_states, in i.states_dtype, and final_states (batch, nheads, headdim, dstate) fp32.

    dt, dA_cumsum: of chunks of i.chunk_size.
    """
    if should_walk(i, "chunk_state_passing"):
        return chunk_state_passing(i, dt, dA_cumsum, options)
    return state_passing(i, chunk_state(i, dt, dA_cumsum, options), dA_cumsum)


def compute_dstates(i: SSDInputs, dy: Tensor, dA_cumsum: Tensor, prev_states: Tensor, dfinal_states: Tensor | None,
                    options: Options, into: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns what dstates_passing does, of the sub-chunks of dA_cumsum and prev_states."""
    spans = replace(i, chunk_size=dA_cumsum.shape[-1])
    if should_walk(spans, "dstates_passing"):
        return dstates_passing(i, dy, dA_cumsum, prev_states, dfinal_states, options, into)
    dprev_states = chunk_scan_dstates(spans, dy, dA_cumsum, options)
    return state_passing_bwd(spans, dprev_states, prev_states, dA_cumsum, dfinal_states, into)
