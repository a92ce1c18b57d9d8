"""The operator on one rank's part of a sequence (docs/context-parallel.md).

Forward: every rank computes what its part does to the state that passes through it (`part_state`), all ranks exchange this,
each combines what the ranks before it sent into the state that enters its part, and scans. Where no documents are, the scan
starts before the state is there, and waits where it reads it. Backward: the same from the other end, with the gradient of the
state, before the operator's own backward, which runs once as on one GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..api import ssd_chunk_scan
from ..block.arguments import check_tensor, takes_kernels
from ..documents import number_documents
from ..registry import is_peer, list_candidates
from ..runtime import value_checks
from ..runtime.custom_ops import are_plain, differentiate_once, wants_gradient
from ..runtime.late import deliver_late
from ..types import Options, SSDInputs
from .exchange import INITIAL_STATES, EarlyMessage, Message, check_alike, find_place, gather
from .part_state import compute_end, compute_start

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class _Place:
    """Where a part is, how its sums over tokens are computed, and whether launches alone will read the state that enters."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    in_torch: bool
    launches_alone: bool
    options: Options


def scan_part(i: SSDInputs, return_final_states: bool, variant: str, options: Options | None, group: dist.ProcessGroup):
    """`ssd_chunk_scan` of this rank's tokens; the arguments and results are documented there.

    i: checked but for its documents, which are as the caller gave them.
    """
    rank, ranks = find_place(group)
    if torch.compiler.is_compiling():
        raise ValueError("context_group: got a group under torch.compile, expected a call outside of what is compiled")
    if is_peer(variant):
        raise ValueError(f"variant: got {variant!r} with context_group, expected one of this project's")
    if i.cu_seqlens is not None and i.seq_idx is None and (return_final_states or i.initial_states is not None):
        name = "return_final_states" if return_final_states else "initial_states"
        raise ValueError(f"{name}: got it with cu_seqlens and context_group, expected seq_idx in its place: documents have no "
                         "states of their own here")
    if ranks == 1:
        return _scan(i, return_final_states, variant, options)
    _check_alike(i, variant, options, group, rank, _find_error(i))
    in_torch = variant == "torch" or not takes_kernels(i.x) or (variant == "auto" and not i.x.is_cuda)
    launches_alone = not in_torch and variant in ("auto", *list_candidates())  # a variant of the user's may use torch
    place = _Place(group, rank, ranks, in_torch, launches_alone, options or Options())
    with torch.no_grad():
        i = replace(i, seq_idx=_find_documents(i, place), cu_seqlens=None)
        i, decays, bring, release = _enter(i, place)
    trains = wants_gradient(i.tensors[:9])
    try:
        with deliver_late(i.initial_states if rank else None, bring) if bring else nullcontext():
            results = _scan(i, return_final_states or trains, variant, options)
    finally:
        release()  # after an error too: what was received may not be freed before it has all arrived
    if not (return_final_states or trains):
        return results
    out, final_states = results
    if trains:
        decays = decays.clone()  # or all that was received would be kept for the backward
        out, final_states = _Leave.apply(out, final_states, place, i.settings, not i.reads_out(True), decays, i.z, i.C, i.dt,
                                         i.A, i.dt_bias, i.seq_idx)
    return (out, final_states) if return_final_states else out


def _scan(i: SSDInputs, return_final_states: bool, variant: str, options: Options | None):
    return ssd_chunk_scan(
        i.x, i.dt, i.A, i.B, i.C, i.chunk_size, i.D, i.z, i.dt_bias, i.initial_states, i.seq_idx, i.cu_seqlens, i.dt_softplus,
        i.dt_limit, return_final_states, state_dtype=i.state_dtype, variant=variant, options=options)


def _check_alike(i: SSDInputs, variant: str, options: Options | None, group: dist.ProcessGroup, rank: int,
                 error: Exception | None) -> None:
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    check_alike(group, {
        "function": "ssd_chunk_scan", "device of x": i.x.device.type, "batch": i.batch, "nheads": i.nheads,
        "headdim": i.headdim, "ngroups": i.ngroups, "dstate": i.dstate,
        **{f"dtype of {name}": None if (t := getattr(i, name)) is None else t.dtype for name in names},
        "dimensions of D": None if i.D is None else i.D.dim(),
        "documents": "seq_idx" if i.seq_idx is not None else "cu_seqlens" if i.cu_seqlens is not None else None,
        INITIAL_STATES: rank > 0 and i.initial_states is not None, "chunk_size": i.chunk_size, "dt_softplus": i.dt_softplus,
        "dt_limit": i.dt_limit, "state_dtype": i.state_dtype,
        "variant": variant, "options": options, "a gradient of the inputs": wants_gradient(i.tensors[:9]),
    }, error)


def _find_error(i: SSDInputs) -> Exception | None:
    """What is wrong with the documents, as far as this rank can tell."""
    bounds = i.cu_seqlens
    try:
        if i.seq_idx is not None:
            check_tensor("seq_idx", i.seq_idx, (i.batch, i.seqlen), i.x, _INTEGERS)
        elif bounds is not None:
            if not isinstance(bounds, Tensor):
                raise TypeError(f"cu_seqlens: got {type(bounds).__name__}, expected a tensor of int32 or int64")
            check_tensor("cu_seqlens", bounds, (bounds.numel(),), i.x, _INTEGERS)
            if i.batch != 1:
                raise ValueError(f"cu_seqlens: got batch = {i.batch}, expected batch 1: all documents packed in one row")
    except (TypeError, ValueError) as error:
        return error
    return None


def _find_documents(i: SSDInputs, place: _Place) -> Tensor | None:
    """(batch, seqlen) integers, the document of each token, counted alike on all ranks. Boundaries are compared on the CPU and
    with SSD_CHECK=1: reading them waits for the GPU.
    """
    if i.seq_idx is not None or (bounds := i.cu_seqlens) is None:
        return i.seq_idx
    values = bounds.tolist() if bounds.device.type == "cpu" or value_checks.reads_values() else None
    own = [i.seqlen, zlib.crc32(str(values).encode())]
    (everyone,) = gather(place.group, torch.tensor(own, device=i.x.device))
    lengths, sums = everyone.unbind(1)
    if values is not None:
        if other := (sums != sums[0]).nonzero().flatten().tolist():
            raise ValueError(f"context_group: cu_seqlens: got other boundaries on rank {', '.join(map(str, other))} than on "
                             "rank 0; expected the same on every rank of the group")
        tokens = int(lengths.sum())
        if len(values) < 2 or values[0] != 0 or values[-1] != tokens or values != sorted(values):
            raise ValueError(f"cu_seqlens: got {values}, expected rising numbers from 0 to {tokens}, the tokens of all ranks")
    return number_documents(None, bounds - lengths[: place.rank].sum().to(bounds.dtype), i.seqlen)


def _enter(i: SSDInputs, place: _Place) -> tuple[SSDInputs, Tensor, Callable[[], None] | None, Callable[[], object]]:
    """The inputs with the state that enters, documents numbered from it; the decay of every part, (ranks, batch, nheads); and
    bring, to be called before both are read, None if they are there; and release, to be called after the last launch.

    The decay is 0 of a part that a document begins in.
    """
    initial, bounds = i.initial_states, []
    if i.seq_idx is not None:
        runs = number_documents(i.seq_idx, None, i.seqlen)
        runs = runs - runs[:, :1]
        bounds = [i.seq_idx[:, 0].long(), i.seq_idx[:, -1].long(), runs[:, -1].long()]
        i = replace(i, seq_idx=runs)
    message = compute_end(i, place.in_torch, place.options, *([((3, i.batch), torch.long)] if bounds else []),
                          make=partial(EarlyMessage, place.group))
    end, decay, *documents = message.tensors
    if documents:
        torch.stack(bounds, out=documents[0])
    if initial is not None:
        carried = decay * ((bounds[0] == 0) & (bounds[2] == 0))[:, None] if bounds else decay
        end += carried[..., None, None] * initial

    state = torch.empty_like(end)
    (ends, decays, *documents), wait, release = message.send()
    if documents:
        wait()
        first, last, begun = documents[0].unbind(1)  # [ranks, batch]
        continues = torch.cat([first[:1] == 0, first[1:] == last[:-1]])
        decays = decays * (continues & (begun == 0))[..., None]
        i = replace(i, seq_idx=runs + (~continues[place.rank]).to(runs.dtype)[:, None])
    if place.rank:
        i = replace(i, initial_states=state)

    def bring() -> None:
        wait()
        if place.rank:
            state.copy_(ends[0])
        for rank in range(1, place.rank):
            torch.addcmul(ends[rank], decays[rank][..., None, None], state, out=state)

    if documents or not place.launches_alone or value_checks.ENABLED or not are_plain(i.tensors):
        bring()
        bring = None
    return i, decays, bring, release


class _Leave(torch.autograd.Function):
    """Out and the state that leaves, as they are; in the backward, adds to the gradient of this state that of later ranks."""

    @staticmethod
    def forward(ctx, out, final_states, place, settings, changeable, decays, *tensors):
        ctx.place, ctx.settings, ctx.shape = place, settings, final_states.shape
        ctx.save_for_backward(decays, *tensors)
        # so that they are no views, which a caller may not change in place; an out that a backward reads nobody may
        ctx.mark_dirty(*[out] * changeable, final_states)
        ctx.set_materialize_grads(False)
        return out, final_states

    @staticmethod
    @differentiate_once
    def backward(ctx, dout, dfinal_states):
        place, (decays, z, C, dt, A, dt_bias, seq_idx) = ctx.place, ctx.saved_tensors
        if place.rank and dout is not None:
            dy = dout
            if z is not None:
                gate = z.to(decays.dtype)
                dy = (dout * gate * gate.sigmoid()).to(dout.dtype)
            i = SSDInputs.of((dy, dt, A, C, C, None, None, dt_bias, None, seq_idx, None), ctx.settings)
            message = compute_start(i, dy, place.in_torch, place.options)
        else:  # no part comes before it, or its outputs are not used
            message = Message(decays.device, (ctx.shape, decays.dtype))
            message.tensors[0].zero_()
        if dfinal_states is not None:
            message.tensors[0].add_(decays[place.rank][..., None, None] * dfinal_states)
        (starts,) = message.gather(place.group)
        if place.rank + 1 < place.ranks:
            later = starts[-1]
            for rank in range(place.ranks - 2, place.rank, -1):
                later = decays[rank][..., None, None] * later + starts[rank]
            dfinal_states = later if dfinal_states is None else dfinal_states + later
        return dout, dfinal_states, *[None] * 10
