"""The operator as torch sees it: one custom op for the forward of every variant, and one for the backward."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

import torch
from torch import Tensor

from .registry import adapt_options, adapt_to_documents, belongs_to_user, find_states_interval, resolve, writes_asked_states
from .runtime.custom_ops import DifferentiableOp, new_like
from .types import INPUT_TENSORS, Options, SSDGrads, SSDInputs, SSDSaved

_OPTIONS = {f.name: f.type for f in fields(Options)}  # bool or int
_NOWHERE = SSDGrads()
_GATE = 6  # where z is in `SSDInputs.tensors`
_ACCUMULATED = 2, 5, 7, 8  # A, D, dt_bias, initial_states, whose gradients are in fp32


def chunk_scan(i: SSDInputs, variant: str, options: Options, save: bool) -> tuple[Tensor | None, ...]:
    """Returns out, final_states, varlen_states, states and prev_states (None or empty if absent) of checked inputs.

    save: whether a backward may follow, so that what it needs must be kept.
    """
    *outputs, _, prev_states = _CHUNK_SCAN(i.tensors, (*i.settings, variant, encode(options), save), save)
    return *outputs, prev_states


def encode(options: Options) -> str:
    """Options as a string, which an op's schema allows; in terms that torch.compile can trace, to which an int is a symbol."""
    return _encode(options) if torch.compiler.is_compiling() else _encode_once(options)


def _encode(options: Options) -> str:
    return ",".join([f"{name}={int(getattr(options, name))}" for name in _OPTIONS])


_encode_once = lru_cache(_encode)


@lru_cache
def _decode(text: str) -> Options:
    return Options(**{name: _OPTIONS[name](int(value)) for name, value in (item.split("=") for item in text.split(","))})


def replays(settings: tuple) -> bool:
    return _decode(settings[-2]).replay


def _unpack(tensors: tuple, settings: tuple) -> tuple[SSDInputs, str, Options, bool]:
    *settings, variant, options, save = settings
    return SSDInputs.of(tensors, settings), variant, _decode(options), save


def forward(*args) -> tuple[Tensor | None, ...]:
    """out, final_states, varlen_states, states, y, prev_states, None where absent. args: tensors and settings of the op."""
    inputs, name, options, save = _unpack(args[:INPUT_TENSORS], args[INPUT_TENSORS:])
    writes = writes_asked_states(name, inputs, options, save)
    if inputs.return_states_every and not writes and find_states_interval(name, inputs, options) is None:
        raise ValueError(f"return_states_every: got {inputs.return_states_every} with variant {name!r}, which leaves no states "
                         "between chunks, expected None")
    options = adapt_options(name, inputs, options)
    variant = resolve(name, inputs, options, "fwd", inputs.keeps_states(options, save) and not writes, writes)
    out, final_states, saved = adapt_to_documents(variant, inputs).forward(inputs, options, save)
    if belongs_to_user(name):
        out, final_states = _fit(out, inputs.x.dtype), _fit(final_states, _get_accumulator(inputs.x))
    return out, final_states, saved.varlen_states, saved.states, saved.y, saved.prev_states


def forward_fake(*args):
    inputs, name, options, save = _unpack(args[:INPUT_TENSORS], args[INPUT_TENSORS:])
    x, sizes = inputs.x, (inputs.nheads, inputs.headdim, inputs.dstate)
    out = x.new_empty(x.shape)
    accumulator = _get_accumulator(x)
    ndocs = 0 if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    nstates, nends = (ndocs, 0) if inputs.has_document_states else (inputs.batch, ndocs)
    final_states = x.new_empty((nstates, *sizes), dtype=accumulator)
    varlen_states = x.new_empty((nends, *sizes) if nends else 0, dtype=accumulator)
    y = x.new_empty(x.shape if inputs.keeps_y(save) else 0)
    writes = writes_asked_states(name, inputs, options, save)
    states = x.new_empty(0)
    if writes:
        states = x.new_empty((inputs.batch, inputs.seqlen // inputs.return_states_every, *sizes), dtype=inputs.states_dtype)
    every = find_states_interval(name, inputs, options) if save or inputs.return_states_every else None
    kept = (inputs.batch, inputs.count_states(every), *sizes) if every and not writes else 0
    prev_states = x.new_empty(kept, dtype=inputs.states_dtype if kept else x.dtype)
    return out, final_states, varlen_states, states, y, prev_states


def backward(*args, into: SSDGrads = _NOWHERE) -> tuple[Tensor | None, ...]:
    """The gradient of each tensor, None where it has none. args: tensors, what was kept, gradients and settings of the op."""
    tensors, (out, y, prev_states, dout, dfinal_states, *settings) = args[:INPUT_TENSORS], args[INPUT_TENSORS:]
    inputs, name, options, _ = _unpack(tensors, settings)
    if dout is None:
        dout = torch.zeros_like(inputs.x)
    y, prev_states = (t if t is not None and t.numel() else None for t in (y, prev_states))
    saved = SSDSaved(inputs, options, y, prev_states=prev_states, out=out)
    variant = resolve(name, inputs, options, "bwd", prev_states is not None)
    g = adapt_to_documents(variant, inputs).backward(saved, dout, dfinal_states, into)
    gradients = g.dx, g.ddt, g.dA, g.dB, g.dC, g.dD, g.dz, g.ddt_bias, g.dinitial_states
    if belongs_to_user(name):
        gradients = map(_fit, gradients, _list_gradient_dtypes(tensors))
    return *gradients, None, None


def _fit(t: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """What a variant of the user's gives, as its op is declared to."""
    return None if t is None else t.to(dtype).contiguous()


def _backward_fake(*tensors):
    return *map(new_like, tensors, _list_gradient_dtypes(tensors)), None, None


def _list_gradient_dtypes(tensors: tuple[Tensor | None, ...]) -> list[torch.dtype | None]:
    """Of all that have gradients, which is all but documents."""
    accumulator = _get_accumulator(tensors[0])
    return [None if t is None else accumulator if k in _ACCUMULATED else t.dtype for k, t in enumerate(tensors[:-2])]


def _get_accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _reads_out(tensors: tuple, settings: tuple) -> bool:
    *settings, _, _, save = settings
    if not save or tensors[_GATE] is None:  # spares most calls the rest
        return False
    return SSDInputs.of(tensors, settings).reads_out(save)


_CHUNK_SCAN = DifferentiableOp(
    "chunk_scan",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor? seq_idx, Tensor? cu_seqlens",
    "int chunk_size, bool dt_softplus, float dt_min, float dt_max, ScalarType? state_dtype, "
    "int? return_states_every, str variant, str options, bool save",
    outputs=("out", "final_states"), extra=("varlen_states", "states"), kept=("y", "prev_states"),
    forward=forward, fake=forward_fake, backward=backward, fake_backward=_backward_fake, replays=replays,
    reads_first=_reads_out)
