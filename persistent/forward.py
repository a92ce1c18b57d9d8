"""The persistent forward: one pass over the tokens after chunk_cumsum and, where sequences are cut, one for the states."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fused import hopper
from fused.hopper_backward import drop_unread_interval
from fused.kernels.bmm_chunk_scan import bmm_chunk_scan
from fused.kernels.chunk_state_passing import chunk_state_passing, segment_states
from fused.schedule import Schedule, count_resident_blocks, cut_evenly, keep_whole
from ssd.baseline.kernels.bmm_chunk import bmm_chunk
from ssd.baseline.kernels.chunk_state import varlen_states
from ssd.kernels.arguments import cdiv
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.runtime.tuning import device_of, pick
from ssd.types import Options, SSDInputs, SSDSaved

from .kernels.stationary_scan import stationary_scan


def forward(inputs: SSDInputs, options: Options, save: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    """Returns out (shape and dtype of x), final_states (batch, nheads, headdim, dstate) fp32, and, if `save`, what a backward
    needs.
    """
    keep = inputs.keeps_states(options, save) and choose_states_every(inputs, options) is not None
    keep = keep and not (inputs.asks_for_states_alone(options, save) and writes_states(inputs, options))
    if not hopper.can_run(hopper.cannot_run(inputs, options, keep), "persistent"):
        return _run_plain(inputs, options, save, keep)
    if options.stationary:
        return hopper.run_stationary(inputs, options, save, keep)
    return hopper.run_two_level(inputs, options, save, keep, blocks=device_of(inputs).sms)


def takes_documents(inputs: SSDInputs, options: Options) -> bool:
    """Whether `forward` takes these documents with states as they are."""
    return options.stationary and hopper.cannot_run(inputs, options, False) is None


def name_forward(inputs: SSDInputs, options: Options, keeps: bool) -> str:
    """As `Variant.kernels`. GPUs that are not Hopper have a name of their own: operands pass through registers beside the state
    there, so that Hopper's times do not predict theirs.
    """
    if not hopper.is_hopper(inputs.x.device):
        return "persistent off Hopper"
    return "persistent" if hopper.cannot_run(inputs, options, keeps) else "persistent on Hopper"


def choose_states_every(inputs: SSDInputs, options: Options) -> int | None:
    """As `Variant.states_every`."""
    every = inputs.chunk_size if hopper.cannot_run(inputs, options, True) else hopper.states_every(inputs, options)
    return drop_unread_interval(inputs, options, every)


def writes_states(inputs: SSDInputs, options: Options) -> bool:
    """As `Variant.writes_states`."""
    return hopper.writes_asked_states(inputs, options, False) and hopper.cannot_run(inputs, options, False) is None


def _run_plain(i: SSDInputs, options: Options, save: bool, keep: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    """In plain Triton, on any GPU."""
    scan = _run_stationary if options.stationary else _run_chunk_by_chunk
    with torch.cuda.device_of(i.x):
        out, y, final_states, prev_states = scan(i, options, save, keep)
        ends = None if i.cu_seqlens is None else varlen_states(i, *chunk_cumsum(i), prev_states, options)
    return out, final_states, SSDSaved(i, options, y, ends, prev_states if keep else None, out=out)


def _run_stationary(i: SSDInputs, options: Options, save: bool,
                    keep: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    steps, CB = _prepare_sub_chunks(i, "stationary_scan", options)
    cut, ends = _make_schedule(i, options), (None, None)
    if cut.nsegments > 1:
        ends = segment_states(i, *steps, cut.piece, cut.npieces, options)
    return stationary_scan(i, CB, *steps, *ends, cut, options, save, keep or i.cu_seqlens is not None)


def _run_chunk_by_chunk(i: SSDInputs, options: Options, save: bool, keep: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    steps, CB = _prepare_sub_chunks(i, "bmm_chunk_scan", options)
    prev_states, final_states = chunk_state_passing(i, *steps, options)
    config, device = pick("bmm_chunk_scan", i), device_of(i)
    programs = count_resident_blocks(device.sms, config.num_warps)
    out, y = bmm_chunk_scan(i, CB, *steps, prev_states, options, save, programs)
    return out, y, final_states, prev_states


def _prepare_sub_chunks(i: SSDInputs, kernel: str, options: Options) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """(dt, dA_cumsum) by the sub-chunks of a kernel, and their CB where it is to be in memory."""
    blocks = replace(i, chunk_size=pick(kernel, i)["BLOCK_M"])
    CB = None
    if not options.fuse_bmm:
        CB = bmm_chunk(blocks, options, i.x.dtype if options.low_precision_CB else torch.float32)
    return chunk_cumsum(blocks), CB


def _make_schedule(i: SSDInputs, options: Options) -> Schedule:
    if not options.segments:
        return keep_whole(i.seqlen)
    config, device = pick("stationary_scan", i), device_of(i)
    programs = cdiv(i.headdim, config["BLOCK_P"]) * i.nheads * i.batch
    resident = count_resident_blocks(device.sms, config.num_warps)
    return cut_evenly(i.seqlen, config["BLOCK_M"], programs, resident, device.name)
