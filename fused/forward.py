"""The fused forward, in plain Triton three launches: chunk_cumsum, chunk_state_passing, bmm_chunk_scan.

Where heads are few and the sequence long, chunk_state and state_passing run in place of the second. `Options` take it apart.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ssd.baseline.kernels.bmm_chunk import bmm_chunk
from ssd.baseline.kernels.chunk_state import chunk_state, varlen_states
from ssd.baseline.kernels.state_passing import state_passing
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.runtime.tuning import pick
from ssd.types import Options, SSDInputs, SSDSaved

from . import hopper
from .hopper_backward import drop_unread_interval
from .kernels.bmm_chunk_scan import bmm_chunk_scan
from .kernels.bmm_chunk_scan_rows import bmm_chunk_scan_rows
from .kernels.chunk_state_passing import chunk_state_passing
from .plain_states import should_walk


def forward(i: SSDInputs, options: Options, save: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    """Returns out (shape and dtype of x), final_states (batch, nheads, headdim, dstate) fp32, and, if `save`, what a backward
    needs.
    """
    keep = i.keeps_states(options, save) and choose_states_every(i, options) is not None
    keep = keep and not (i.asks_for_states_alone(options, save) and writes_states(i, options))
    if hopper.can_run(_explain_no_hopper(i, options, keep), "fused"):
        return hopper.run_two_level(i, options, save, keep)
    return _run_plain(i, options, save, keep)


def choose_states_every(i: SSDInputs, options: Options) -> int | None:
    """As `Variant.states_every`."""
    every = i.chunk_size if _explain_no_hopper(i, options, True) else hopper.states_every(i, options)
    return drop_unread_interval(i, options, every)


def writes_states(i: SSDInputs, options: Options) -> bool:
    """As `Variant.writes_states`."""
    return hopper.writes_asked_states(i, options, False) and _explain_no_hopper(i, options, False) is None


def name_forward(i: SSDInputs, options: Options, keeps: bool) -> str:
    """As `Variant.kernels`."""
    return "fused" if _explain_no_hopper(i, options, keeps) else "fused on Hopper"


def _explain_no_hopper(i: SSDInputs, options: Options, keeps: bool) -> str | None:
    if not (options.two_level and options.fuse_states):
        return "options.two_level and fuse_states cannot be off in it"
    return hopper.cannot_run(i, options, keeps)


def _run_plain(i: SSDInputs, options: Options, save: bool, keep: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    """In plain Triton, on any GPU."""
    # what the scan's products span: sub-chunks, or whole chunks
    spans = replace(i, chunk_size=pick("bmm_chunk_scan", i)["BLOCK_M"]) if options.two_level else i
    with torch.cuda.device_of(i.x):
        walks = options.fuse_states and should_walk(i, "chunk_state_passing")
        steps = by_chunk = chunk_cumsum(spans)
        if spans.chunk_size < i.chunk_size and (i.cu_seqlens is not None or not walks):
            by_chunk = chunk_cumsum(i)
        if walks:
            prev_states, final_states = chunk_state_passing(i, *steps, options)
        else:
            prev_states, final_states = state_passing(i, chunk_state(i, *by_chunk, options), by_chunk[1])
        CB = None
        if not options.fuse_bmm:
            CB = bmm_chunk(spans, options, i.x.dtype if options.low_precision_CB else torch.float32)
        scan = bmm_chunk_scan if options.two_level else bmm_chunk_scan_rows
        out, y = scan(i, CB, *steps, prev_states, options, save)
        ends = None if i.cu_seqlens is None else varlen_states(i, *by_chunk, prev_states, options)
    return out, final_states, SSDSaved(i, options, y, ends, prev_states if keep else None, out=out)
