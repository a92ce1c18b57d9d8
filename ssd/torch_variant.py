"""Variant `torch`: the chunked form in plain torch, with the kernels' rounding points. Any device; also fp64."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import reference
from .reference_stages import Precision, find_y
from .registry import Variant
from .types import Options, SSDGrads, SSDInputs, SSDSaved


def _choose_precision(inputs: SSDInputs) -> Precision:
    if inputs.x.dtype == torch.float64:
        return Precision(torch.float64)
    return Precision(torch.float32, inputs.x.dtype)


def _disable_autocast(inputs: SSDInputs) -> AbstractContextManager:
    """Autocast would round where the kernels do not. Some devices, such as meta, have none."""
    device = inputs.x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _forward(inputs: SSDInputs, options: Options, save: bool) -> tuple[Tensor, Tensor, SSDSaved]:
    precision, dtype = _choose_precision(inputs), inputs.x.dtype
    with _disable_autocast(inputs):
        out, final_states, y = reference.compute_chunked(inputs, precision)
        varlen_states = prev_states = None
        if inputs.cu_seqlens is not None and not inputs.has_document_states:
            varlen_states = reference.varlen_states(inputs, precision)
        if inputs.return_states_every is not None:
            prev_states = reference.compute_prev_states(inputs, precision).to(inputs.states_dtype)
    y = y.to(dtype).contiguous() if inputs.keeps_y(save) else None
    out = _make_whole(out.to(dtype))
    return out, _make_whole(final_states), SSDSaved(inputs, options, y, varlen_states, prev_states, out=out)


def _make_whole(t: Tensor) -> Tensor:
    """t, contiguous and no view, which autograd would not let a caller change in place."""
    return t.clone(memory_format=torch.contiguous_format) if t._is_view() else t.contiguous()


def _find_states_every(inputs: SSDInputs, options: Options) -> int | None:
    """As `Variant.states_every`. The backward reads none, so that none are kept for it."""
    return None if inputs.return_states_every is None else inputs.chunk_size


def _backward(saved: SSDSaved, dout: Tensor, dfinal_states: Tensor | None, into: SSDGrads) -> SSDGrads:
    i = saved.inputs
    precision, y = _choose_precision(i), saved.y
    with _disable_autocast(i):
        if y is None and i.z is not None:
            y = find_y(precision(saved.out), precision(i.z))
        grads = reference.compute_chunked_grads(i, dout, dfinal_states, y, precision)
    placed = {}
    for name in SSDGrads.__dataclass_fields__:
        grad, place, source = getattr(grads, name), getattr(into, name), getattr(i, name[1:])
        if grad is not None:
            keeps_dtype = name in ("dx", "ddt", "dB", "dC", "dz")
            grad = grad.to(source.dtype if keeps_dtype else grad.dtype).contiguous()
            placed[name] = grad if place is None else place.copy_(grad)
    return SSDGrads(**placed)


VARIANT = Variant("torch", supports=lambda inputs: None, forward=_forward, backward=_backward,
                  states_every=_find_states_every, takes_documents=True)
