"""The operator as torch sees it: two custom ops with fake forms, and the gradient that joins them."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import fields
from functools import lru_cache

import torch
from torch import Tensor

from .registry import heeded, resolve, states_every
from .runtime.custom_ops import all_present, are_plain, below_autograd, launched, or_empty, or_none, register
from .runtime.replay import replayed
from .types import INPUT_TENSORS, Options, SSDGrads, SSDInputs, SSDSaved

_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor? seq_idx, Tensor? cu_seqlens, int chunk_size, bool dt_softplus, float dt_min, float dt_max, "
    "ScalarType? state_dtype, str variant, str options"
)
_N_TENSORS, _N_ARGS, _N_INPUTS = 9, INPUT_TENSORS, 18  # differentiable tensors come first, then the others, then settings
_N_SAVED = _N_ARGS + 4  # tensors that a backward takes

torch.library.define(
    "ssd::chunk_scan",
    f"({_INPUTS}, bool save) -> (Tensor out, Tensor final_states, Tensor varlen_states, Tensor y, Tensor prev_states)",
)
torch.library.define(
    "ssd::chunk_scan_bwd",
    f"({_INPUTS}, Tensor? y, Tensor? prev_states, Tensor? dout, Tensor? dfinal_states) -> "
    f"({', '.join(['Tensor'] * _N_TENSORS)})",
)


def chunk_scan(i: SSDInputs, variant: str, options: Options, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns out, final_states, varlen_states (an absent one is None or empty) of inputs that `api` has checked.

    save: whether a backward may follow, so that what it needs must be kept.
    """
    tensors, settings = i.tensors, (*i.settings, variant)
    if not are_plain(tensors):
        return torch.ops.ssd.chunk_scan(*tensors, *settings, _encode(options), save)[:3]
    if save:
        return _ChunkScan.apply(*tensors, *settings, _encoded(options), save)[:3]
    return replayed(_forward, tensors, (*settings, _encoded(options), save))[:3]


_OPTION_NAMES = tuple(f.name for f in fields(Options))


def _encode(options: Options) -> str:
    """Options as a string, which an op's schema allows; in terms that torch.compile can trace."""
    return ",".join([f"{name}={getattr(options, name)!r}" for name in _OPTION_NAMES])


_encoded = lru_cache(_encode)


@lru_cache
def _decode(text: str) -> Options:
    return Options(**{name: literal_eval(value) for name, value in (item.split("=") for item in text.split(","))})


def _unpack(args: tuple) -> tuple[SSDInputs, str, Options]:
    *settings, variant, options = args[_N_ARGS:]
    return SSDInputs.of(args[:_N_ARGS], settings), variant, _decode(options)


def _forward(*args):
    *args, save = args
    inputs, name, options = _unpack(args)
    out, final_states, saved = resolve(name, inputs, "fwd").forward(inputs, heeded(name, options), save)
    return out, final_states, saved.varlen_states, saved.y, saved.prev_states


@torch.library.register_fake("ssd::chunk_scan")
def _forward_fake(*args):
    *args, save = args
    inputs, name, options = _unpack(args)
    x, sizes = inputs.x, (inputs.nheads, inputs.headdim, inputs.dstate)
    out = x.new_empty(x.shape)
    accumulator = _accumulator(x)
    final_states = x.new_empty((inputs.batch, *sizes), dtype=accumulator)
    ndocs = () if inputs.cu_seqlens is None else (inputs.cu_seqlens.shape[0] - 1, *sizes)
    varlen_states = x.new_empty(ndocs, dtype=accumulator) if ndocs else x.new_empty(0)
    y = x.new_empty(x.shape if save and inputs.z is not None else 0)
    every = states_every(name, inputs, options) if save else None
    states = (inputs.batch, -(-inputs.seqlen // every), *sizes) if every else 0
    return out, final_states, varlen_states, y, x.new_empty(states, dtype=inputs.states_dtype if states else x.dtype)


def _backward(*args):
    tensors, (y, prev_states, dout, dfinal_states), settings = args[:_N_ARGS], args[_N_ARGS:_N_SAVED], args[_N_SAVED:]
    inputs, name, options = _unpack((*tensors, *settings))
    if dout is None:
        dout = torch.zeros_like(inputs.x)
    saved = SSDSaved(inputs, options, or_none(y), prev_states=or_none(prev_states))
    return _in_order(resolve(name, inputs, "bwd").backward(saved, dout, dfinal_states, SSDGrads()))


def _backward_op(*args):
    """`_backward`, with a copy of each result that shares memory with one before it, as those of an op may not."""
    results, taken = [], set()
    tensors, settings, others = args[:_N_ARGS], args[_N_ARGS:_N_INPUTS], args[_N_INPUTS:]
    for t in _backward(*tensors, *others, *settings):
        t = or_empty(t, args[0])
        memory = t.untyped_storage().data_ptr()
        results.append(t.clone() if memory in taken else t)
        taken.add(memory)
    return tuple(results)


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
        tensors, settings = args[:_N_ARGS], args[_N_ARGS:]
        outputs = launched(_forward, below_autograd(torch.ops.ssd.chunk_scan), tensors, settings)
        ctx.save_for_backward(*tensors, *outputs[3:])
        ctx.settings = settings[:-1]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in outputs[2:] if t is not None])
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable  # the second derivative is not there: better an error than a gradient short
    def backward(ctx, dout, dfinal_states, *_):
        if dout is None and dfinal_states is None:
            return (None,) * (_N_INPUTS + 1)
        tensors = (*ctx.saved_tensors, dout, dfinal_states)
        if are_plain(tensors):
            grads = replayed(_backward, tensors, ctx.settings)
        else:
            grads = torch.ops.ssd.chunk_scan_bwd(*tensors[:_N_ARGS], *ctx.settings, *tensors[_N_ARGS:])
        grads = [None if t is None else g if g.dtype == t.dtype else g.to(t.dtype)
                 for t, g in zip(tensors[:_N_TENSORS], grads, strict=True)]
        return (*grads, *[None] * (_N_INPUTS + 1 - _N_TENSORS))


register("chunk_scan", all_present(_forward), all_present(_ChunkScan.apply), _backward_op)
