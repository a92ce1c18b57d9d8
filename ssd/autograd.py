"""The operator as torch sees it: two custom ops with fake forms, and the gradient that joins them.

Everything inside an op is opaque to torch.compile, so variants launch what they like. An absent output is an empty tensor,
since an op's outputs are fixed in number.
"""

from __future__ import annotations

from ast import literal_eval
from dataclasses import fields
from functools import lru_cache

import torch
from torch import Tensor

from .registry import resolve
from .types import Options, SSDGrads, SSDInputs, SSDSaved

_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor? seq_idx, Tensor? cu_seqlens, int chunk_size, bool dt_softplus, float dt_min, float dt_max, "
    "ScalarType? state_dtype, str variant, str options"
)
_N_TENSORS, _N_INPUTS = 9, 18  # differentiable inputs come first

torch.library.define(
    "ssd::chunk_scan", f"({_INPUTS}, bool save) -> (Tensor out, Tensor final_states, Tensor varlen_states, Tensor y)"
)
torch.library.define(
    "ssd::chunk_scan_bwd",
    f"({_INPUTS}, Tensor? y, Tensor? dout, Tensor? dfinal_states) -> ({', '.join(['Tensor'] * _N_TENSORS)})",
)


def chunk_scan(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_limit,
               state_dtype, variant: str, options: Options, save: bool):
    """Arguments as `api.ssd_chunk_scan` checked them. Returns out, final_states, varlen_states.

    save: whether a backward may follow, so that what it needs must be kept.
    """
    return torch.ops.ssd.chunk_scan(
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, chunk_size, dt_softplus, *dt_limit, state_dtype,
        variant, _encode(options), save)[:3]


_OPTION_NAMES = tuple(f.name for f in fields(Options))


def _encode(options: Options) -> str:
    """Options as a string, which an op's schema allows; in terms that torch.compile can trace."""
    return ",".join([f"{name}={getattr(options, name)!r}" for name in _OPTION_NAMES])


@lru_cache
def _decode(text: str) -> Options:
    return Options(**{name: literal_eval(value) for name, value in (item.split("=") for item in text.split(","))})


def _unpack(args: tuple) -> tuple[SSDInputs, str, Options]:
    (x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, chunk_size, dt_softplus, dt_min, dt_max, state_dtype,
     variant, options) = args
    inputs = SSDInputs(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
                       (dt_min, dt_max), state_dtype)
    return inputs, variant, _decode(options)


def _or_empty(t: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if t is None else t


@torch.library.impl("ssd::chunk_scan", "default")
def _forward(*args):
    *args, save = args
    inputs, name, options = _unpack(args)
    out, final_states, saved = resolve(name, inputs).forward(inputs, options)
    y = saved.y if save else None
    return out, final_states, _or_empty(saved.varlen_states, out), _or_empty(y, out)


@torch.library.register_fake("ssd::chunk_scan")
def _forward_fake(*args):
    *args, save = args
    inputs, _, _ = _unpack(args)
    x, sizes = inputs.x, (inputs.nheads, inputs.headdim, inputs.dstate)
    out = x.new_empty(x.shape)
    accumulator = _accumulator(x)
    final_states = x.new_empty((inputs.batch, *sizes), dtype=accumulator)
    ndocs = () if inputs.cu_seqlens is None else (inputs.cu_seqlens.shape[0] - 1, *sizes)
    varlen_states = x.new_empty(ndocs, dtype=accumulator) if ndocs else x.new_empty(0)
    return out, final_states, varlen_states, x.new_empty(x.shape if save and inputs.z is not None else 0)


@torch.library.impl("ssd::chunk_scan_bwd", "default")
def _backward(*args):
    *args, y, dout, dfinal_states = args
    inputs, name, options = _unpack(args)
    if dout is None:
        dout = torch.zeros_like(inputs.x)
    grads = resolve(name, inputs).backward(SSDSaved(inputs, options, y), dout, dfinal_states, SSDGrads())
    return tuple(_or_empty(g, inputs.x) for g in _in_order(grads))


@torch.library.register_fake("ssd::chunk_scan_bwd")
def _backward_fake(*args):
    inputs, _, _ = _unpack(args[:_N_INPUTS])
    x, accumulator = inputs.x, _accumulator(inputs.x)

    def like(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return x.new_empty(0) if t is None else t.new_empty(t.shape, dtype=dtype or t.dtype)

    i = inputs
    return (like(x), like(i.dt), like(i.A, accumulator), like(i.B), like(i.C), like(i.D, accumulator), like(i.z),
            like(i.dt_bias, accumulator), like(i.initial_states, accumulator))


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _in_order(g: SSDGrads) -> tuple[Tensor | None, ...]:
    return g.dx, g.ddt, g.dA, g.dB, g.dC, g.dD, g.dz, g.ddt_bias, g.dinitial_states


class _ChunkScan(torch.autograd.Function):
    """Joins the two ops. torch.library.register_autograd would do it too, at 120 us of Python a call (torch 2.13)."""

    @staticmethod
    def forward(ctx, *args):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = torch.ops.ssd.chunk_scan(*args)
        varlen_states, y = outputs[2:]
        ctx.save_for_backward(*args[: _N_TENSORS + 2], y)
        ctx.settings = args[_N_TENSORS + 2 : _N_INPUTS]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(varlen_states, y)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable  # the second derivative is not there: better an error than a gradient short
    def backward(ctx, dout, dfinal_states, _dvarlen_states, _dy):
        *tensors, y = ctx.saved_tensors
        if dout is None and dfinal_states is None:
            return (None,) * (_N_INPUTS + 1)
        grads = torch.ops.ssd.chunk_scan_bwd(*tensors, *ctx.settings, y, dout, dfinal_states)
        grads = [None if t is None else g.to(t.dtype) for t, g in zip(tensors[:_N_TENSORS], grads, strict=True)]
        return (*grads, *[None] * (_N_INPUTS + 1 - _N_TENSORS))


_library = torch.library.Library("ssd", "FRAGMENT")  # kept: its registrations live as long as it does
_library.impl("chunk_scan", lambda *args: _ChunkScan.apply(*args), "Autograd")
