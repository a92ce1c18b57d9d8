"""What the operator should compute: the recurrence, and the chunked form at any precision, forward and backward.

The recurrence, in fp64, checks the chunked form once. The chunked form then serves twice: in fp64 as the truth, and with the
kernels' rounding points (docs/ssd.md, section 4) as the mirror that bounds a kernel's error.
"""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import torch
from torch import Tensor

from . import reference_stages as stages
from .documents import find_bounds
from .reference_stages import Masks, Precision, into_chunks
from .types import SSDGrads, SSDInputs

_FP64 = Precision(torch.float64)


def recurrence(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """(1) to (5), token by token, in fp64: out (batch, seqlen, nheads, headdim), final_states. Differentiable."""
    i = as_dtype(inputs, torch.float64)
    heads_per_group = i.nheads // i.ngroups
    B, C = (t.repeat_interleave(heads_per_group, 2) for t in (i.B, i.C))
    dt, _ = stages.chunk_cumsum(i.dt, i.A, 1, i.dt_bias, i.dt_softplus, i.dt_limit)
    dt = dt[..., 0].transpose(1, 2)  # [b, l, h]
    state = i.initial_states
    if state is None:
        state = i.x.new_zeros(i.batch, i.nheads, i.headdim, i.dstate)
    before = torch.zeros(i.batch, dtype=torch.int32, device=i.x.device)
    ys = []
    for t in range(i.seqlen):
        if i.seq_idx is not None:
            state = state * (i.seq_idx[:, t] == before)[:, None, None, None]
            before = i.seq_idx[:, t]
        state = (dt[:, t] * i.A).exp()[..., None, None] * state
        state = state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], i.x[:, t], B[:, t])
        ys.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    y = torch.stack(ys, 1)
    if i.D is not None:
        y = y + _per_channel(i.D) * i.x
    return (y if i.z is None else y * torch.nn.functional.silu(i.z)), state


def compute_chunked(inputs: SSDInputs, precision: Precision) -> tuple[Tensor, Tensor, Tensor | None]:
    """The five stages in order: out, final_states and, with z, y before the gate; all in the compute dtype."""
    if inputs.has_document_states:
        return _compute_apart(inputs, precision)
    i, masks, operand = _prepare(inputs, precision)
    dt, dA_cumsum, _, prev_states, final_states = _states(i, masks, operand)
    CB = stages.bmm_chunk(operand.C, operand.B)
    y = stages.chunk_scan(CB, operand.x, dt, dA_cumsum, operand.C, operand.round(prev_states), _per_channel(i.D), masks,
                          precision)
    y = y.flatten(1, 2)[:, : i.seqlen]
    if i.z is None:
        return y, final_states, None
    return y * stages.gate(i.z), final_states, y


def compute_chunked_grads(inputs: SSDInputs, dout: Tensor, dfinal_states: Tensor | None, y: Tensor | None,
                  precision: Precision) -> SSDGrads:
    """The backward's stages in order, the forward's recomputed. y as `compute_chunked` returned it."""
    if inputs.has_document_states:
        return _compute_grads_apart(inputs, dout, dfinal_states, y, precision)
    i, masks, operand = _prepare(inputs, precision)
    dt, dA_cumsum, _, prev_states, _ = _states(i, masks, operand)
    CB = stages.bmm_chunk(operand.C, operand.B)
    dy, dz = precision(dout), None
    if i.z is not None:
        y = precision.round(y) if inputs.keeps_y(True) else stages.find_y(precision.round(y * stages.gate(i.z)), i.z)
        dz, dy = stages.chunk_scan_dz(dy, y, i.z)
    dy = into_chunks(operand.round(dy), i.chunk_size)
    D = _per_channel(i.D)

    dprev_states = stages.chunk_scan_dstates(dy, operand.C, dA_cumsum, masks, precision)
    dstates, dinitial_states, s = stages.state_passing_bwd(
        dprev_states, prev_states, dA_cumsum, None if dfinal_states is None else precision(dfinal_states), masks)
    dstates = operand.round(dstates)
    dx, ddt, q, dD = stages.chunk_scan_chunk_state_dx(CB, operand.x, dt, dA_cumsum, operand.B, dstates, dy, D, masks,
                                                      precision)
    dB = stages.chunk_state_dB(operand.x, dt, dA_cumsum, dstates, i.ngroups, masks, precision)
    dC, r = stages.chunk_scan_dC(dy, dA_cumsum, operand.C, operand.round(prev_states), masks, precision)
    dCB = stages.chunk_scan_dCB(operand.x, dt, dA_cumsum, dy, i.ngroups, masks)
    dB_pairs, dC_pairs = stages.bmm_bwd(operand.round(dCB), operand.B, operand.C)
    pairs = stages.ddA_cumsum(operand.x, dt, dA_cumsum, dy, CB, masks)
    ddt, dA, ddt_bias = stages.chunk_cumsum_bwd(ddt, r, q, s, pairs, dt, i.dt, i.A, i.dt_bias, i.dt_softplus, i.dt_limit)

    def tokens(t: Tensor) -> Tensor:
        return t.flatten(1, 2)[:, : i.seqlen]

    return SSDGrads(
        dx=tokens(dx), ddt=ddt, dA=dA, dB=tokens(dB + dB_pairs), dC=tokens(dC + dC_pairs), dz=dz,
        dD=None if i.D is None else dD if i.D.dim() == 2 else dD.sum(-1),
        ddt_bias=None if i.dt_bias is None else ddt_bias,
        dinitial_states=None if i.initial_states is None else dinitial_states,
    )


def split_documents(inputs: SSDInputs) -> list[tuple[slice, SSDInputs]]:
    """Each document of `cu_seqlens` with its own state, by itself, and which tokens it has: none where it is empty."""
    parts = []
    for d, (start, end) in enumerate(itertools.pairwise(find_bounds(inputs.cu_seqlens, inputs.seqlen).tolist())):
        cut = {name: t[:, start:end] for name in ("x", "dt", "B", "C", "z") if (t := getattr(inputs, name)) is not None}
        state = None if inputs.initial_states is None else inputs.initial_states[d : d + 1]
        parts.append((slice(start, end), replace(inputs, **cut, initial_states=state, cu_seqlens=None)))
    return parts


def _compute_apart(inputs: SSDInputs, precision: Precision) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `compute_chunked`, one document after the other."""
    outs, states, ys = [], [], []
    for _, part in split_documents(inputs):
        if part.seqlen:
            out, state, y = compute_chunked(part, precision)
            outs.append(out)
            ys.append(y)
        elif part.initial_states is None:
            state = inputs.x.new_zeros(1, inputs.nheads, inputs.headdim, inputs.dstate, dtype=precision.compute)
        else:
            state = precision(part.initial_states)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states), None if inputs.z is None else torch.cat(ys, 1)


def _compute_grads_apart(inputs: SSDInputs, dout: Tensor, dfinal_states: Tensor | None, y: Tensor | None,
                         precision: Precision) -> SSDGrads:
    """As `compute_chunked_grads`, one document after the other. An empty one hands the gradient of its state on."""
    if dfinal_states is None:
        ndocs = inputs.cu_seqlens.shape[0] - 1
        dfinal_states = inputs.x.new_zeros(ndocs, inputs.nheads, inputs.headdim, inputs.dstate, dtype=precision.compute)
    parts = []
    for (tokens, part), dfinal in zip(split_documents(inputs), dfinal_states.split(1), strict=True):
        if part.seqlen:
            of = None if y is None else y[:, tokens]
            parts.append(compute_chunked_grads(part, dout[:, tokens], dfinal, of, precision))
        else:
            parts.append(SSDGrads(dinitial_states=None if part.initial_states is None else precision(dfinal)))
    joined = {}
    for f in fields(SSDGrads):
        grads = [grad for part in parts if (grad := getattr(part, f.name)) is not None]
        if grads:
            joined[f.name] = (sum(grads) if f.name in ("dA", "dD", "ddt_bias") else
                              torch.cat(grads, 0 if f.name == "dinitial_states" else 1))
    return SSDGrads(**joined)


def varlen_states(inputs: SSDInputs, precision: Precision) -> Tensor:
    """(11): the state at the end of each document of `cu_seqlens`, (ndocs, nheads, headdim, dstate); 0 if it is empty."""
    ends = inputs.cu_seqlens.clamp(0, inputs.seqlen).tolist()
    result = []
    for start, end in itertools.pairwise(ends):
        if start >= end:
            result.append(torch.zeros(inputs.nheads, inputs.headdim, inputs.dstate, dtype=precision.compute,
                                      device=inputs.x.device))
            continue
        upto = {name: getattr(inputs, name)[:, :end] for name in ("x", "dt", "B", "C")}
        upto["seq_idx"] = None if inputs.seq_idx is None else inputs.seq_idx[:, :end]
        part, masks, operand = _prepare(replace(inputs, z=None, cu_seqlens=None, **upto), precision)
        _, dA_cumsum, states, prev_states, _ = _states(part, masks, operand)
        # the last chunk again, from the state before it as that is stored
        masks = replace(masks, carry=masks.carry[:, -1:])
        result.append(stages.state_passing(states[:, -1:], dA_cumsum[:, :, -1:], prev_states[:, -1], masks)[1][0])
    return torch.stack(result)


def compute_prev_states(inputs: SSDInputs, precision: Precision) -> Tensor:
    """The state before each chunk, (batch, nchunks, nheads, headdim, dstate)."""
    return _states(*_prepare(inputs, precision))[3]


def compute_in_fp64(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """The truth: out and final_states in fp64, from the inputs as they are rounded."""
    return compute_chunked(inputs, _FP64)[:2]


def compute_grads_in_fp64(inputs: SSDInputs, dout: Tensor, dfinal_states: Tensor | None = None) -> SSDGrads:
    """The truth for every gradient, in fp64."""
    y = compute_chunked(inputs, _FP64)[2] if inputs.z is not None else None
    return compute_chunked_grads(inputs, dout, dfinal_states, y, _FP64)


def as_dtype(inputs: SSDInputs, dtype: torch.dtype) -> SSDInputs:
    """The same inputs with every floating-point tensor in `dtype`."""
    floats = {f.name: t.to(dtype) for f in fields(inputs)
              if isinstance(t := getattr(inputs, f.name), Tensor) and t.is_floating_point()}
    return replace(inputs, **floats)


def _per_channel(D: Tensor | None) -> Tensor | None:
    return D if D is None or D.dim() == 2 else D[:, None]


class _Operands:
    """x, B and C in chunks, rounded as operands of matrix products, in the compute dtype."""

    def __init__(self, inputs: SSDInputs, precision: Precision, states_dtype: torch.dtype):
        self.round = precision.round
        self.precision = precision
        self.states_dtype = states_dtype
        self.x, self.B, self.C = (into_chunks(precision.round(t), inputs.chunk_size) for t in (inputs.x, inputs.B, inputs.C))


def _prepare(inputs: SSDInputs, precision: Precision) -> tuple[SSDInputs, Masks, _Operands]:
    i = as_dtype(inputs, precision.compute)
    masks = Masks.of(i.seq_idx, i.batch, i.seqlen, i.chunk_size, precision.compute, i.x.device)
    return i, masks, _Operands(i, precision, inputs.states_dtype)


def _states(i: SSDInputs, masks: Masks, operand: _Operands):
    """dt, dA_cumsum, states, prev_states as stored between the stages, and final_states."""
    dt, dA_cumsum = stages.chunk_cumsum(i.dt, i.A, i.chunk_size, i.dt_bias, i.dt_softplus, i.dt_limit)
    states = stages.chunk_state(operand.x, operand.B, dt, dA_cumsum, masks, operand.precision)
    prev_states, final_states = stages.state_passing(states, dA_cumsum, i.initial_states, masks)
    return dt, dA_cumsum, states, operand.round(prev_states, operand.states_dtype), final_states
