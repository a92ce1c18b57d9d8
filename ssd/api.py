"""ssd_chunk_scan: the one public function of the operator, and all of its validation."""

from __future__ import annotations

import math
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .autograd import chunk_scan
from .documents import check_bounds, check_numbers, number_documents
from .options import check_options
from .positions import check_states_every, take_states
from .registry import check_known, get_variant, is_peer
from .runtime import value_checks
from .runtime.custom_ops import are_plain, wants_gradient
from .types import DTYPES, FP32_LARGEST, Options, SSDInputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

LARGEST_CHUNK, SMALLEST_CHUNK = 256, 16
_DEVICES = ("cpu", "cuda")  # that "auto" and the kernels know
_OPTIONAL = ("D", "z", "dt_bias", "initial_states")
# Said with a wrong shape: x of another order of axes makes dt the first to differ, and dstate is not in the shape of x.
_AXES = {"dt": "(batch, seqlen, nheads) = ", "initial_states": "(batch, nheads, headdim, dstate), or with cu_seqlens alone "
                                                               "(ndocs, nheads, headdim, dstate), = "}
_DEFAULT = Options()


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
    variant: str = "auto",
    options: Options | None = None,
    context_group: ProcessGroup | None = None,
    return_states_every: int | None = None,
):
    """Mamba-2's chunked selective scan (docs/ssd.md, equations 1 to 5), differentiable in every floating-point input.

    Names, order and meaning are those of `mamba_ssm`'s `mamba_chunk_scan_combined`; those from `variant` on are ours.

    Args:
        x: (batch, seqlen, nheads, headdim), fp16, bf16 or fp32 (fp64 too with variant "torch"); matrix products take their
            operands in this dtype. Any strides. What is not finite here, or in dt, B or C, may also reach tokens before it in
            its chunk, and later documents.
        dt: (batch, seqlen, nheads), any floating dtype; the step before bias, softplus and clamp, applied in that order.
        A: (nheads,), the decay rate per unit step; must be <= 0 (checked with SSD_CHECK=1 alone: it waits for the device).
        B, C: (batch, seqlen, ngroups, dstate); nheads a multiple of ngroups, consecutive heads share a group.
        chunk_size: tokens per chunk, a power of two from 16 to 256. Changes speed and rounding, not the result.
        D: (nheads,) or (nheads, headdim), the skip connection.
        z: shape of x; the output is multiplied by silu(z), with z at least 2^-64 in size. Do not change the output in place
            before the backward, which reads it, but in fp16.
        dt_bias: (nheads,).
        initial_states: (batch, nheads, headdim, dstate). With seq_idx they reach a leading document 0 only. With cu_seqlens
            alone (ndocs, nheads, headdim, dstate): each document starts from its own.
        seq_idx: (batch, seqlen) int32 or int64, the document of each token. A new document begins wherever the value changes.
        cu_seqlens: (ndocs + 1,) int32 or int64, from 0 to seqlen, batch 1: the documents' boundaries, rising; two alike leave a
            document empty. Implies seq_idx if that is absent. Values are checked on the CPU only; on a GPU, one beyond
            seqlen counts as seqlen.
        dt_softplus: apply softplus to dt + dt_bias.
        dt_limit: (min, max) that the step is clamped to, 0 <= min <= max, min finite.
        return_final_states: also return the state after the last token; with cu_seqlens alone, after the last token of each
            document. An empty one has the state that it starts from.
        return_varlen_states: also return the state at the end of each document of cu_seqlens (no gradient), as `mamba_ssm`.
        state_dtype: dtype of the states kept between chunks; C's dtype unless given. fp32 costs bandwidth and adds accuracy.
            On fp64 x it is the dtype of the states that return_states_every returns, and of no others.
        variant: one of `ssd.variant_names()`, or "auto", which chooses by device and sizes, and tells the logger "ssd".
        options: switches of the kernels, see `ssd.Options`.
        context_group: the ranks that a sequence is cut over, each of which passes its own tokens (docs/context-parallel.md).
        return_states_every: also return the states after every so many tokens, a multiple of chunk_size, as prefix caches want
            them (no gradient). docs/drop-in.md says what it costs. Not with cu_seqlens, context_group or another project's
            variant.

    Returns:
        out, shape and dtype of x; then, if asked for, final_states (batch or ndocs, nheads, headdim, dstate) fp32; then, if
        asked for, varlen_states (ndocs, nheads, headdim, dstate) fp32 (both fp64 for fp64 x); then, if asked for, states
        (batch, seqlen // return_states_every, nheads, headdim, dstate) in state_dtype (C's dtype unless given): states[:, k] is
        the state after (k + 1) * return_states_every tokens, with seq_idx that of the document there. A tuple when more than
        out is returned.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted, before anything is launched.
    """
    options, inputs = take_inputs(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
        return_final_states, return_varlen_states, state_dtype, variant, options, context_group, return_states_every)
    if context_group is not None:
        from .distributed import scan_part  # here, so that others do not import torch.distributed

        return scan_part(inputs, return_final_states, variant, options, context_group)
    if is_peer(variant):
        peer = get_variant(variant)
        if reason := peer.supports(inputs):
            raise ValueError(f"variant {variant!r} cannot run these inputs: {reason}")
        out, final_states = peer.apply(inputs)
        varlen_states = states = prev_states = None
    else:
        save = wants_gradient((x, dt, A, B, C, D, z, dt_bias, initial_states))
        out, final_states, varlen_states, states, prev_states = chunk_scan(inputs, variant, options, save)
    if inputs.has_document_states and return_varlen_states:
        varlen_states = final_states.detach().clone()
    if return_states_every is not None and prev_states is not None and prev_states.numel():
        states = take_states(inputs, prev_states, final_states)
    if value_checks.ENABLED:
        value_checks.check_outputs((out, final_states, varlen_states, states))
    results = (out,)
    if return_final_states:
        results += (final_states,)
    if return_varlen_states:
        results += (varlen_states,)
    if return_states_every is not None:
        results += (states,)
    return results if len(results) > 1 else out


def take_inputs(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit,
                return_final_states, return_varlen_states, state_dtype, variant, options, context_group=None,
                return_states_every=None) -> tuple[Options | None, SSDInputs]:
    """Options and inputs of a call of `ssd_chunk_scan`, checked, and as kernels take them but with a context_group."""
    alone = cu_seqlens if seq_idx is None else None
    check_tensors(x, dt, A, B, C, D, z, dt_bias, initial_states, variant, alone)
    chunk_size = take_int("chunk_size", chunk_size)
    flags = {"dt_softplus": dt_softplus, "return_final_states": return_final_states,
             "return_varlen_states": return_varlen_states}
    check_settings(chunk_size, flags, dt_limit, state_dtype, variant, options)
    if value_checks.ENABLED:
        value_checks.check_inputs({"A": A, "x": x, "dt": dt, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias,
                                   "initial_states": initial_states})
    # a bound that fp32 cannot hold bounds nothing
    dt_limit = (float(dt_limit[0]), float(dt_limit[1]) if dt_limit[1] <= FP32_LARGEST else math.inf)
    if return_states_every is not None:
        return_states_every = take_int("return_states_every", return_states_every)
        check_states_every(return_states_every, chunk_size, cu_seqlens, context_group, variant)
    if context_group is not None:
        if return_varlen_states:
            raise ValueError("return_varlen_states: got True with context_group, expected False")
        return options, SSDInputs(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
                                  dt_limit, state_dtype)
    if seq_idx is not None or cu_seqlens is not None or return_varlen_states:
        _check_documents(x, seq_idx, cu_seqlens, return_varlen_states)
        if seq_idx is None and (initial_states is not None or return_final_states):
            cu_seqlens = cu_seqlens.to(torch.int32).contiguous()  # alone: each document has states of its own
        else:
            seq_idx = number_documents(seq_idx, cu_seqlens, x.shape[1])
            cu_seqlens = cu_seqlens.to(torch.int32).contiguous() if return_varlen_states else None
    options = options or _DEFAULT
    if state_dtype is None and not options.low_precision_states:
        state_dtype = torch.float32
    return options, SSDInputs(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
                              dt_limit, state_dtype, return_states_every)


def check_tensors(x, dt, A, B, C, D, z, dt_bias, initial_states, variant, cu_seqlens) -> None:
    """One pass that compares; what it finds wrong goes to `_refuse`, so that a good call pays for no message.

    cu_seqlens: of documents with states of their own, not checked yet.
    """
    for name, t, shape in (("x", x, "(batch, seqlen, nheads, headdim)"), ("B", B, "(batch, seqlen, ngroups, dstate)")):
        if not isinstance(t, Tensor) or t.layout != torch.strided or t.dtype not in DTYPES or t.dim() != 4:
            _refuse(name, t, shape, x)
    x_shape, B_shape, device = x.shape, B.shape, x.device
    batch, seqlen, nheads, headdim = x_shape
    ngroups, dstate = B_shape[2], B_shape[3]
    if min(x_shape) < 1 or min(B_shape) < 1:
        raise ValueError(f"x, B: got shapes {tuple(x_shape)}, {tuple(B_shape)}, expected every size to be at least 1")
    if nheads % ngroups:
        raise ValueError(f"B: got ngroups = {ngroups}, expected a divisor of nheads = {nheads}")
    if device.type not in _DEVICES and variant != "torch" and are_plain((x,)):  # what is only traced may be on any
        raise ValueError(f"x: got a tensor on {device}, expected one on {' or '.join(_DEVICES)}")
    per_head, group_shape = (nheads,), (batch, seqlen, ngroups, dstate)
    nstates = cu_seqlens.shape[0] - 1 if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 < len(cu_seqlens) else batch
    for name, t, shape in (
        ("dt", dt, (batch, seqlen, nheads)),
        ("A", A, per_head),
        ("B", B, group_shape),
        ("C", C, group_shape),
        ("D", D, (nheads, headdim) if isinstance(D, Tensor) and D.dim() == 2 else per_head),
        ("z", z, x_shape),
        ("dt_bias", dt_bias, per_head),
        ("initial_states", initial_states, (nstates, nheads, headdim, dstate)),
    ):
        if t is None and name in _OPTIONAL:
            continue
        if not isinstance(t, Tensor) or t.shape != shape or t.dtype not in DTYPES or t.device != device:
            _refuse(name, t, tuple(shape), x)


def _refuse(name: str, t: object, shape: str | tuple[int, ...], x: Tensor) -> NoReturn:
    """Raises for a tensor that is not what `check_tensors` compares it with."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}, expected a tensor of shape {shape}")
    if t.layout != torch.strided:
        raise TypeError(f"{name}: got a tensor of layout {t.layout}, expected a plain one of shape {shape}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name}: got dtype {t.dtype}, expected a floating-point dtype of {', '.join(map(str, DTYPES))}")
    if t.dim() != (4 if isinstance(shape, str) else len(shape)):
        raise ValueError(f"{name}: got {t.dim()} dimensions, shape {tuple(t.shape)}, expected {shape}")
    if tuple(t.shape) != shape:
        also = f" or {(x.shape[2], x.shape[3])}" if name == "D" else ""
        beside = ", the shape of B" if name == "C" else f" to go with x {tuple(x.shape)}"
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {_AXES.get(name, '')}{shape}{also}{beside}")
    raise ValueError(f"{name}: got a tensor on {t.device}, expected {x.device}, the device of x")


def take_int(name: str, value: object) -> int:
    """The int that it is, or stands for, as one of numpy's does; True and False are none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return index(None if isinstance(value, bool) else value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, expected an int") from None


def check_flags(flags: Mapping[str, object]) -> None:
    """Refuses, by its name, what is not True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")


def check_pair(name: str, pair: object) -> None:
    """Refuses what is not two numbers."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(is_real, pair)):
        raise TypeError(f"{name}: got {pair!r}, expected two numbers (min, max)")


def check_settings(chunk_size: int, flags: Mapping[str, object], dt_limit, state_dtype, variant, options) -> None:
    """flags: arguments that are True or False, by name."""
    check_flags(flags)
    if not SMALLEST_CHUNK <= chunk_size <= LARGEST_CHUNK or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size: got {chunk_size}, expected a power of two from {SMALLEST_CHUNK} to {LARGEST_CHUNK}")
    check_pair("dt_limit", dt_limit)
    if not (0 <= dt_limit[0] <= dt_limit[1] and dt_limit[0] <= FP32_LARGEST):
        raise ValueError(f"dt_limit: got {tuple(dt_limit)}, expected 0 <= min <= max, min finite, also in fp32")
    if state_dtype is not None and state_dtype not in DTYPES:
        raise TypeError(f"state_dtype: got {state_dtype!r}, expected None or one of {', '.join(map(str, DTYPES))}")
    if variant != "auto":
        check_known(variant)
    check_options(options)


def is_real(v: object) -> bool:
    return type(v) is float or (isinstance(v, Real) and not isinstance(v, bool))  # the second takes a microsecond


def _check_documents(x, seq_idx, cu_seqlens, return_varlen_states) -> None:
    if seq_idx is not None:
        check_numbers("seq_idx", seq_idx, x)
    if seq_idx is not None and seq_idx.shape != x.shape[:2]:
        raise ValueError(f"seq_idx: got shape {tuple(seq_idx.shape)}, expected (batch, seqlen) = {tuple(x.shape[:2])}")
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, x, x.shape[1])
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("return_varlen_states: got True without cu_seqlens, expected cu_seqlens to give the boundaries")
