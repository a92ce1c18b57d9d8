"""Whether plain kernels walk: a program for each tile of a head's state takes the sequence in sub-chunks, and only the states
that are asked for go to memory. Where heads are few and sequences long, chunks on their own and a recurrence over them take
less time, though they write every chunk's part in fp32 and read it again. (Persistent blocks that take chunks in turn walk.)
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

from .kernels.walk_dstates import walk_dstates
from .kernels.walk_states import chunk_states

# Microseconds on an H200, of walks and chunks of 5 to 512 heads and 196 to 19,328 tokens in 16 bits (docs/kernel-log.md).
_STEP = {"walk_states": 0.8, "walk_dstates": 1.9}  # a sub-chunk of a walk
_PROGRAMS_PER_SM = 8
_LAUNCH = 8  # what is one launch more, and its beginning and end
_RECURRENCE = 0.15  # a chunk of the recurrence
_BYTES = 10  # for each element of the states: written and read in fp32, written in 16 bits
_BYTES_PER_US = 3.3e6
_MOST_BYTES = 1 << 28  # of what chunks write in fp32: beyond, memory runs out sooner than a launch counts


def worth_walking(i: SSDInputs, kernel: str) -> bool:
    """Whether `kernel`, walk_states or walk_dstates, is expected to take less time than chunks of i.chunk_size on their own, or
    those too much memory. While configs of `kernel` are tried out it is always launched, so that they have a time.
    """
    elements = i.batch * i.nheads * i.nchunks * i.headdim * i.dstate
    if is_forced(kernel) or elements * 4 >= _MOST_BYTES:
        return True
    config = pick(kernel, i)
    programs = i.batch * i.nheads * cdiv(i.headdim, config["BLOCK_P"]) * cdiv(i.dstate, config["BLOCK_N"])
    walk = cdiv(programs, _PROGRAMS_PER_SM * device_of(i).sms) * cdiv(i.seqlen, SUB_CHUNK) * _STEP[kernel]
    return walk <= _LAUNCH + i.nchunks * _RECURRENCE + elements * _BYTES / _BYTES_PER_US


def states(i: SSDInputs, dt: Tensor, dA_cumsum: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns prev_states, in i.states_dtype, and final_states (batch, nheads, headdim, dstate) fp32.

    dt, dA_cumsum: of chunks of i.chunk_size.
    """
    if worth_walking(i, "walk_states"):
        return chunk_states(i, dt, dA_cumsum, options)
    return state_passing(i, chunk_state(i, dt, dA_cumsum, options), dA_cumsum)


def dstates(i: SSDInputs, dy: Tensor, dA_cumsum: Tensor, prev_states: Tensor, dfinal_states: Tensor | None, options: Options,
            into: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns what walk_dstates does, of the sub-chunks of dA_cumsum and prev_states."""
    spans = replace(i, chunk_size=dA_cumsum.shape[-1])
    if worth_walking(spans, "walk_dstates"):
        return walk_dstates(i, dy, dA_cumsum, prev_states, dfinal_states, options, into)
    dprev_states = chunk_scan_dstates(spans, dy, dA_cumsum, options)
    return state_passing_bwd(spans, dprev_states, prev_states, dA_cumsum, dfinal_states, into)
