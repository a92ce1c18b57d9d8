"""Mamba-1's selective scan: a rate for every channel and state, where SSD has one for each head.

Names, order and meaning are those of `mamba_ssm`'s `selective_scan_fn` (mamba_ssm/ops/selective_scan_interface.py), for real A
and for B and C that vary with the token.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.custom_ops import DifferentiableOp, wants_gradient
from ..runtime.toolchain import explain_missing_gluon
from .arguments import check_dtype, check_interpretable, check_tensor, takes_kernels
from .kernels.selective_scan import LARGEST_STATE, chunk_of
from .kernels.selective_scan_bwd import selective_scan_bwd
from .kernels.selective_scan_dispatch import TOKENS, takes_walk
from .kernels.selective_scan_fwd import selective_scan_fwd

if missing := explain_missing_gluon():
    logging.getLogger("ssd").warning("selective_scan runs its scans over pairs, never its walk: %s", missing)
else:
    from .kernels.selective_scan_walk_bwd import selective_scan_walk_bwd
    from .kernels.selective_scan_walk_fwd import selective_scan_walk_fwd


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool | None = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of Mamba-1 (Gu and Dao 2023, section 3), docs/block.md, equations S1 to S12.

    Differentiable in every tensor, through out and last_state; gradients are the same bits in every run on one kind of GPU. All
    arithmetic is fp32 (fp64 for fp64 u). CPU tensors and fp64 take the torch form, which walks token by token; with
    TRITON_INTERPRET=1, CPU tensors take the interpreted kernels.

    Args:
        u: (batch, dim, seqlen), fp16, bf16, fp32 or fp64. Any strides, here and below, but fast where tokens are contiguous.
        delta: shape of u, the step before delta_bias and softplus. Any floating dtype, here and below.
        A: (dim, dstate), dstate at most 256, the decay rate per unit step, <= 0: where states grow, the factors of a row of
            tokens, which are multiplied first, overflow before they do.
        B, C: (batch, ngroups, dstate, seqlen), or (batch, dstate, seqlen) for one group; dim a multiple of ngroups, consecutive
            channels share a group.
        D: (dim,), the skip connection.
        z: shape of u; the output is multiplied by silu(z).
        delta_bias: (dim,).
        delta_softplus: apply softplus to delta + delta_bias.
        return_last_state: also return the state after the last token. None, which MambaVision passes, is False.

    Returns:
        out, shape and dtype of u, contiguous; a tuple of it and last_state (batch, dim, dstate), fp32 (fp64 for fp64 u), if
        that was asked for.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """
    return_last_state = False if return_last_state is None else return_last_state
    B, C = (_add_groups(name, t) for name, t in (("B", B), ("C", C)))
    _check(u, delta, A, B, C, D, z, delta_bias)
    for name, flag in (("delta_softplus", delta_softplus), ("return_last_state", return_last_state)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")
    if not takes_kernels(u):
        out, last_state = compute_in_torch(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    else:
        u, delta, B, C, z = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (u, delta, B, C, z))
        tensors = (u, delta, A, B, C, D, z, delta_bias)  # copied here, once for both ways, and no call that copies is recorded
        save = wants_gradient(tensors)
        out, last_state, _ = _SELECTIVE_SCAN(tensors, (delta_softplus, save), save)
    return (out, last_state) if return_last_state else out


def compute_in_torch(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                     delta_bias: Tensor | None, delta_softplus: bool) -> tuple[Tensor, Tensor]:
    """(S1) to (S4) in torch, token by token, differentiable: fp32 (fp64 for fp64) up to the output. B and C have groups."""
    compute = torch.float64 if u.dtype == torch.float64 else torch.float32
    channels = u.shape[1] // B.shape[1]
    inputs, step, rate = (t.to(compute) for t in (u, delta, A))
    B, C = (t.to(compute).repeat_interleave(channels, 1) for t in (B, C))  # [b, d, n, l]
    if delta_bias is not None:
        step = step + delta_bias.to(compute)[:, None]
    if delta_softplus:
        step = F.softplus(step)
    enters = step * inputs  # once: autograd would keep a whole product for every token
    state, outs = inputs.new_zeros(*u.shape[:2], A.shape[1]), []
    for t in range(u.shape[2]):
        state = (step[..., t, None] * rate).exp() * state + enters[..., t, None] * B[..., t]
        outs.append((state * C[..., t]).sum(-1))
    y = torch.stack(outs, -1)
    if D is not None:
        y = y + D.to(compute)[:, None] * inputs
    if z is not None:
        y = y * F.silu(z.to(compute))
    return y.to(u.dtype), state.clone()  # which a caller may change, and not what the backward reads


def _add_groups(name: str, t: Tensor) -> Tensor:
    """(batch, ngroups, dstate, seqlen); the axis of groups may be missing."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}, expected a tensor (batch, ngroups, dstate, seqlen)")
    if t.dim() not in (3, 4):
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected (batch, ngroups, dstate, seqlen) or (batch, dstate, "
                         "seqlen); one that does not vary with the token can be expanded to that")
    return t if t.dim() == 4 else t.unsqueeze(1)


def _check(u, delta, A, B, C, D, z, delta_bias) -> None:
    if not isinstance(u, Tensor):
        raise TypeError(f"u: got {type(u).__name__}, expected a tensor (batch, dim, seqlen)")
    check_dtype("u", u)
    check_interpretable("u", u)
    if u.dim() != 3 or not u.numel():
        raise ValueError(f"u: got shape {tuple(u.shape)}, expected (batch, dim, seqlen), no size 0")
    batch, dim, seqlen = u.shape
    if not isinstance(A, Tensor):
        raise TypeError(f"A: got {type(A).__name__}, expected a tensor (dim, dstate)")
    if A.is_complex():
        raise TypeError(f"A: got {A.dtype}, expected a real dtype")
    if A.dim() != 2 or not A.numel():
        raise ValueError(f"A: got shape {tuple(A.shape)}, expected (dim, dstate), no size 0")
    dstate, ngroups = A.shape[1], B.shape[1]
    if not ngroups or dim % ngroups:
        raise ValueError(f"B: got ngroups = {ngroups}, expected a divisor of dim = {dim}")
    if takes_kernels(u) and dstate > LARGEST_STATE:
        raise ValueError(f"A: got dstate = {dstate}, expected at most {LARGEST_STATE}, which the kernels have threads for")
    shared = (batch, ngroups, dstate, seqlen)
    shapes = {"delta": u.shape, "A": (dim, dstate), "B": shared, "C": shared, "D": (dim,), "z": u.shape, "delta_bias": (dim,)}
    for (name, shape), t in zip(shapes.items(), (delta, A, B, C, D, z, delta_bias), strict=True):
        if t is not None or name not in ("D", "z", "delta_bias"):
            check_tensor(name, t, tuple(shape), u, beside="u")


def _forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus, save) -> tuple[Tensor, Tensor, Tensor | None]:
    run = selective_scan_walk_fwd if takes_walk(u, B) else selective_scan_fwd
    with torch.cuda.device_of(u):
        return run(u, delta, A, B, C, D, z, delta_bias, delta_softplus, save)


def _forward_fake(u, delta, A, B, C, D, z, delta_bias, delta_softplus, save):
    (batch, dim, seqlen), dstate = u.shape, A.shape[1]
    states = u.new_empty(0)
    if save:  # or a graph would be for one kind of kernel without need
        nchunks = -(-seqlen // (TOKENS if takes_walk(u, B) else chunk_of(seqlen, dstate)))
        states = u.new_empty(batch, nchunks, dim, dstate, dtype=torch.float32)
    return u.new_empty(u.shape), u.new_empty(batch, dim, dstate, dtype=torch.float32), states


def _backward(u, delta, A, B, C, D, z, delta_bias, states, dout, dlast_state, delta_softplus,
              _) -> tuple[Tensor | None, ...]:
    dout = torch.zeros_like(u) if dout is None else dout
    tensors = (u, delta, A, B, C, D, z, delta_bias)
    run = selective_scan_walk_bwd if takes_walk(u, B) else selective_scan_bwd
    with torch.cuda.device_of(u):
        grads = run(*tensors, delta_softplus, states, dout, dlast_state)
    return tuple(g if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True))


def _make_tokens_contiguous(dout: Tensor) -> Tensor:
    """A projection's gradient has none. Copied before the backward, since no call that copies is recorded."""
    return dout if dout.stride(-1) == 1 else dout.contiguous()


_SELECTIVE_SCAN = DifferentiableOp(
    "selective_scan", "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias",
    "bool delta_softplus, bool save", outputs=("out", "last_state"), kept=("states",), forward=_forward, fake=_forward_fake,
    backward=_backward, arrange=_make_tokens_contiguous, any_strides=False)  # what is kept depends on them
