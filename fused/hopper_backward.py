"""The backward on Hopper, which `fused` and `persistent` take where the inputs allow:

    chunk_cumsum, hopper_states backwards for the gradients of the states and, where the forward kept none, forwards for the
    states (after hopper_pieces where sequences are cut), hopper_group (above a dstate of 128 the kernels of `span_backward`),
    chunk_cumsum_bwd; with a gate chunk_scan_dz before them, where a group's heads are shared out to several blocks sum_parts of
    dB and of dC after them, and with a D of two dimensions channel_skip last.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ssd.baseline.kernels.chunk_scan_dz import chunk_scan_dz
from ssd.kernels.arguments import cdiv, contiguous, fit_to_tiles, output
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.kernels.chunk_cumsum_bwd import chunk_cumsum_bwd
from ssd.kernels.document_blocks import document_blocks
from ssd.kernels.sum_parts import settle
from ssd.runtime.tuning import Device, current_device
from ssd.types import Options, SSDGrads, SSDInputs, SSDSaved

from . import hopper
from .hopper import (
    BLOCK_M,
    describe,
    describe_document_states,
    describe_inputs,
    describe_states,
    get_width,
    is_describable,
    make_runs,
    runs_wide,
    tokens_between_states,
)
from .kernels.channel_skip import channel_skip
from .kernels.head_sums import add_splits, allocate_splits, keep_contiguous
from .schedule import choose_splits
from .span_backward import run_spans

_RARELY = 8  # sub-chunks between the states that are written where only the last is wanted


def can_run(i: SSDInputs, options: Options) -> bool:
    """Whether these kernels take the inputs; that they do not is said to the logger, once for each reason."""
    return hopper.can_run(cannot_run(i, options), "fused and persistent (backward)")


def drop_unread_interval(i: SSDInputs, options: Options, every: int) -> int | None:
    """`every`, or None where nobody would read such states: none are asked for, and the backward that runs can use none.

    The backward here reads one for each sub-chunk or span, in the dtype of x; the others any, but none of documents with
    states.
    """
    runs = options.fuse_backward and cannot_run(i, options) is None
    unread = not _can_read(i, every) if runs else i.has_document_states
    return None if unread and i.return_states_every is None else every


def takes_documents(i: SSDInputs, options: Options) -> bool:
    """Whether `backward` takes these documents with states as they are."""
    return options.fuse_backward and cannot_run(i, options) is None


def cannot_run(i: SSDInputs, options: Options) -> str | None:
    """As `hopper.cannot_run`, of the backward."""
    return hopper.cannot_run(i, options, keeps=False)


def backward(saved: SSDSaved, dout: Tensor, dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    """As `Variant.backward`."""
    i = saved.inputs
    with torch.cuda.device_of(i.x):
        dout = fit_to_tiles(dout)
        dz, dy = (None, dout) if i.z is None else chunk_scan_dz(saved, dout, into.dz)
        cut = replace(i, chunk_size=tokens_between_states(i), D=None if i.has_D_of_channels else i.D)
        arrivals = i.A.new_empty(i.nheads, dtype=torch.int32)
        blocks = document_blocks(i) if i.has_document_states else None
        (x, B), (dy, C) = (describe_inputs(*of, rows=cut.chunk_size) for of in ((i.x, i.B), (dy, i.C)))
        dt, dA_cumsum = chunk_cumsum(cut, apart=True, arrivals=arrivals, blocks=blocks, lets_next=True)
        H, G, dinitial_states = _compute_states(saved, (x, B, dy, C), dt, dA_cumsum, dfinal_states, into.dinitial_states,
                                                blocks)
        descriptors = x, dy, B, C
        device = current_device(i.x.device.index)
        dx = output(i.x, into.dx if into.dx is not None and is_describable(into.dx) else None)
        if runs_wide(i):
            gradients = run_spans(cut, descriptors, dx, H, G, dt, dA_cumsum, arrivals, device, into)
        else:
            gradients = _run_group(cut, descriptors, dx, H, G, dt, dA_cumsum, arrivals, device, into, blocks)
        dB, dC, ddt, dA, ddt_bias, dD = gradients
        if i.has_D_of_channels:
            dD = channel_skip(x.base, dy.base, i.D, dx)
        if dinitial_states is not None:
            dinitial_states = settle(dinitial_states, into.dinitial_states)
        dx, dB, dC = settle(dx, into.dx), settle(dB, into.dB), settle(dC, into.dC)
    return SSDGrads(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states)


def _run_group(i: SSDInputs, descriptors: tuple, dx: Tensor, H: Tensor, G: Tensor, dt: Tensor, dA_cumsum: Tensor,
               arrivals: Tensor, device: Device, into: SSDGrads, blocks: Tensor | None) -> tuple[Tensor | None, ...]:
    """As `run_spans`, by sub-chunks, which are the chunks of these inputs."""
    from .kernels.hopper.group import hopper_group

    splits = choose_splits(i.batch * dt.shape[2] * i.ngroups, i.nheads // i.ngroups, device.sms, device.name)
    dB_parts = allocate_splits(i.B, keep_contiguous(into.dB), splits)
    dC_parts = allocate_splits(i.C, keep_contiguous(into.dC), splits)
    sums = hopper_group(i, *descriptors, describe_states(H), describe_states(G), describe(dx), dt, dA_cumsum, dB_parts,
                        dC_parts, device.sms, blocks, dx)
    no_parts = dt.new_empty(0, *dt.shape)  # of r, which is in the sums of outputs
    of_steps = chunk_cumsum_bwd(i, sums.step, no_parts, sums.state, sums.s[..., None], sums.output, sums.pair[None], arrivals,
                                into.ddt, None if i.D is None else sums.skip, blocks)
    return add_splits(dB_parts, i.B, into.dB), add_splits(dC_parts, i.C, into.dC), *of_steps


def compute_last_state(i: SSDInputs, options: Options) -> Tensor:
    """The state after the last token, (batch, nheads, headdim, dstate) fp32; of those before it, few are in memory."""
    from .kernels.hopper.states import hopper_states

    with torch.cuda.device_of(i.x):
        tokens, sizes = describe_inputs(i.x, i.B), (i.nheads, i.headdim, i.dstate)
        dt, dA_cumsum = chunk_cumsum(replace(i, chunk_size=BLOCK_M), apart=True, lets_next=True)
        kept = dt.new_empty(i.batch, cdiv(dt.shape[2], _RARELY), *sizes, dtype=i.x.dtype)
        last = dt.new_empty(i.batch, *sizes)
        starts = contiguous(i.initial_states), None  # before the state pass: nothing may come between that and the walk
        runs, *entering = make_runs(i, i.batch, tokens, dt, dA_cumsum, i.batch, options, "few_states_step")
        hopper_states(i, tokens, describe_states(kept), dt, dA_cumsum, runs, starts, *entering, last, i.batch,
                      _RARELY * BLOCK_M)
    return last


def _compute_states(saved: SSDSaved, tokens: tuple, dt: Tensor, dA_cumsum: Tensor, dfinal_states: Tensor | None,
                    into: Tensor | None, blocks: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The state before each sub-chunk or span, as dt has them, and the gradient of that after it, (batch, nsub, nheads,
    headdim, dstate), of kept states perhaps more; and dinitial_states (None without initial_states).

    tokens: descriptors of x, B, dy, C. blocks: of documents.
    """
    from .kernels.hopper.states import hopper_states

    i, nsub, kept = saved.inputs, dt.shape[2], saved.prev_states
    reads = kept is not None and _can_read(i, saved.states_every)
    forwards = 0 if reads else i.batch  # rows of walks; those after them are of gradients
    rows = forwards + i.batch
    starts = None if reads else contiguous(i.initial_states), contiguous(dfinal_states)
    dinitial_states = None
    if i.initial_states is not None:
        place = keep_contiguous(into)
        takes = place is None or blocks is None or is_describable(place)
        dinitial_states = output(i.initial_states, place if takes else None, torch.float32)
    states = torch.empty(rows, nsub, i.nheads, i.headdim, i.dstate, device=dt.device, dtype=i.x.dtype)
    given, to = starts, dinitial_states  # before the state pass, likewise
    if blocks is not None:
        given, to = tuple(map(describe_document_states, starts)), describe_document_states(to, get_width(i.dstate) // 2)
    runs, *entering = make_runs(i, rows, tokens, dt, dA_cumsum, forwards, saved.options, "every_state_step", blocks=blocks,
                                starts=starts)
    hopper_states(i, tokens, describe_states(states), dt, dA_cumsum, runs, given, *entering, to, forwards, dt.shape[3], blocks)
    return kept if reads else states[:forwards], states[forwards:], dinitial_states


def _can_read(i: SSDInputs, every: int) -> bool:
    """Whether states that a forward kept every so many tokens are of use: one for each sub-chunk or span, in the dtype of x."""
    return every in (BLOCK_M, tokens_between_states(i)) and i.states_dtype == i.x.dtype
