"""One token of the selective state-space recurrence, for decoding: Mamba-1's and Mamba-2's.

Names, order and meaning are those of `mamba_ssm`'s `selective_state_update` (mamba_ssm/ops/triton/selective_state_update.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.arguments import contiguous
from ..runtime.custom_ops import are_plain, define_inference_op, wants_gradient
from .arguments import check_apart, check_dtype, check_interpretable, check_rows, takes_kernels
from .kernels.state_update import state_update

_AXES = {
    "state": ("rows", "nheads", "dim", "dstate"),
    "x": ("batch", "nheads", "dim"),
    "dt": ("batch", "nheads", "dim"),
    "A": ("nheads", "dim", "dstate"),
    "B": ("batch", "ngroups", "dstate"),
    "C": ("batch", "ngroups", "dstate"),
    "D": ("nheads", "dim"),
    "z": ("batch", "nheads", "dim"),
    "dt_bias": ("nheads", "dim"),
}
_OPTIONAL = ("D", "z", "dt_bias")


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """Takes the state one token further, in place, and returns that token's output (docs/block.md, equations U1 to U4).

    For inference: a backward through the output raises. All arithmetic is fp32 (fp64 for fp64 x); the output comes from the
    state before it is rounded to its dtype. CPU tensors and fp64 take the torch form; with TRITON_INTERPRET=1, CPU tensors take
    the interpreted kernel.

    Args:
        state: (batch, nheads, dim, dstate), or (batch, dim, dstate) for one head, fp16, bf16, fp32 or fp64; overwritten. Any
            strides, here and, with 0 included, below; any floating dtype for each.
        x: (batch, nheads, dim). With one head every argument may lack its axis of heads or groups.
        dt: shape of x; the step before dt_bias and softplus.
        A: (nheads, dim, dstate), the decay rate per unit step, <= 0 in a stable model. Where A, dt and dt_bias are numbers of a
            head that strides of 0 repeat, their exponential is taken once.
        B, C: (batch, ngroups, dstate); nheads a multiple of ngroups, consecutive heads share a group.
        D: (nheads, dim), the skip connection.
        z: shape of x; the output is multiplied by silu(z).
        dt_bias: (nheads, dim).
        dt_softplus: apply softplus to dt + dt_bias.
        state_batch_indices: (batch,) int32 or int64, the row of `state` that each row of x takes further, each at most once;
            `state` may then have any number of rows. A negative one marks padding: no state changes and the output is 0.
            An index beyond the last row raises on the CPU, and counts as padding on a GPU, where nobody looks.

    Returns:
        Shape of x as `state` has axes, dtype of x, contiguous.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted, before the state is touched.
    """
    given = dict(zip(_AXES, (state, x, dt, A, B, C, D, z, dt_bias), strict=True))
    tensors = [_add_heads(name, t) for name, t in given.items()]
    _check_sizes(given, tensors, state_batch_indices)
    if not isinstance(dt_softplus, bool):
        raise TypeError(f"dt_softplus: got {dt_softplus!r}, expected True or False")
    plain = not wants_gradient(tensors) and are_plain((*tensors, state_batch_indices))
    out = (_update if plain else _OP)(*tensors, dt_softplus, state_batch_indices)
    return out if state.dim() == 4 else out.squeeze(1)


def compute_in_torch(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
                     dt_bias: Tensor | None, dt_softplus: bool, state_batch_indices: Tensor | None) -> Tensor:
    """(U1) to (U4) in torch with the kernel's rounding points. Every tensor has its axis of heads or groups."""
    if state_batch_indices is not None:
        live = state_batch_indices >= 0
        rows, out = state[state_batch_indices[live]], x.new_zeros(x.shape)
        out[live] = compute_in_torch(rows, x[live], dt[live], A, B[live], C[live], D, None if z is None else z[live], dt_bias,
                               dt_softplus, None)
        state[state_batch_indices[live]] = rows
        return out
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    before, x_p, step, rate = (t.to(compute) for t in (state, x, dt, A))
    B, C = (t.to(compute).repeat_interleave(state.shape[1] // B.shape[1], 1)[:, :, None] for t in (B, C))  # [b, h, 1, n]
    if dt_bias is not None:
        step = step + dt_bias.to(compute)
    if dt_softplus:
        step = F.softplus(step)
    after = before * (step[..., None] * rate).exp() + (step * x_p)[..., None] * B
    state.copy_(after)
    y = (after * C).sum(-1)
    if D is not None:
        y = y + D.to(compute) * x_p
    if z is not None:
        y = y * F.silu(z.to(compute))
    return y.to(x.dtype).contiguous()


def _add_heads(name: str, t: Tensor | None) -> Tensor | None:
    """The tensor with its axis of heads or groups, which may be missing."""
    if t is None and name in _OPTIONAL:
        return None
    axes = _AXES[name]
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}, expected a tensor ({', '.join(axes)})")
    check_dtype(name, t)
    check_interpretable(name, t)
    if len(axes) - t.dim() not in (0, 1) or not t.numel():
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected ({', '.join(axes)}), with or without the axis of heads "
                         "or groups, and no size 0")
    return t if t.dim() == len(axes) else t.unsqueeze(0 if axes[0] == "nheads" else 1)


def _check_sizes(given: dict[str, Tensor | None], tensors: list[Tensor | None], state_batch_indices: Tensor | None) -> None:
    state, x, _, _, B = tensors[:5]
    (rows, nheads, dim, dstate), batch, ngroups = state.shape, x.shape[0], B.shape[1]
    sizes = {"rows": rows, "nheads": nheads, "dim": dim, "dstate": dstate, "batch": batch, "ngroups": ngroups}
    if nheads % ngroups:
        raise ValueError(f"B: got ngroups = {ngroups}, expected a divisor of nheads = {nheads}")
    for (name, came), t in zip(given.items(), tensors, strict=True):
        if t is None:
            continue
        expected = tuple([sizes[axis] for axis in _AXES[name]])
        if t.shape != expected:
            raise ValueError(f"{name}: got shape {tuple(came.shape)}, expected ({', '.join(_AXES[name])}) = {expected} to go "
                             f"with state {tuple(given['state'].shape)}")
        if t.device != state.device:
            raise ValueError(f"{name}: got a tensor on {t.device}, expected {state.device}, the device of state")
    check_apart("state", given["state"])
    indices = state_batch_indices
    if indices is None:
        if rows != batch:
            raise ValueError(f"state: got {rows} rows, expected batch = {batch}, or state_batch_indices to name a row for each")
        return
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        came = f"dtype {indices.dtype}" if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"state_batch_indices: got {came}, expected a tensor of torch.int32 or torch.int64")
    if indices.shape != (batch,):
        raise ValueError(f"state_batch_indices: got shape {tuple(indices.shape)}, expected (batch,) = {(batch,)}")
    if indices.device != state.device:
        raise ValueError(f"state_batch_indices: got a tensor on {indices.device}, expected {state.device}, the device of state")


def _update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices) -> Tensor:
    check_rows("state_batch_indices", state_batch_indices, "state", len(state))
    form = state_update if takes_kernels(x) else compute_in_torch
    with torch.no_grad(), torch.cuda.device_of(x):
        out = form(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, contiguous(state_batch_indices))
    torch.autograd.graph.increment_version(state)
    return out


def _update_fake(state, x, *_):
    return x.new_empty(x.shape)


_OP = define_inference_op(
    "selective_state_update",
    "(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool dt_softplus, Tensor? state_batch_indices) -> Tensor",
    _update, _update_fake, instead="ssd.ssd_chunk_scan")
