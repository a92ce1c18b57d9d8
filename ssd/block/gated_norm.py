"""The RMSNorm between a Mamba-2 block's SSD and its output projection: by groups of channels, with a SiLU gate.

Names, order and meaning are those of `mamba_ssm`'s `rmsnorm_fn` and `RMSNorm` (mamba_ssm/ops/triton/layernorm_gated.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..api import take_int
from ..kernels.arguments import contiguous
from ..runtime.custom_ops import DifferentiableOp
from ..types import FP32_LARGEST
from .arguments import check_number, check_tensor, takes_kernels
from .kernels.gated_norm import WIDEST_GROUP, gated_norm, gated_norm_bwd


def rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """norm(x) * silu(z), or norm(x * silu(z)) (docs/block.md, equations N1 to N4), differentiable in every tensor.

    norm(v) = v / sqrt(mean(v^2) + eps) * weight + bias, with the mean over each group of consecutive channels, in fp32.

    CPU tensors and fp64 take the torch form; with TRITON_INTERPRET=1, CPU tensors take the interpreted kernels.

    Args:
        x: (..., width), fp16, bf16, fp32 or fp64. Read in place if its channels are contiguous and one stride leads from row to
            row, as in a slice of a packed projection; else copied.
        weight: (width,), any floating dtype.
        bias: (width,).
        z: shape of x, any floating dtype, laid out by itself.
        eps: what is added to the mean square.
        group_size: channels that share a mean square, a divisor of width, at most 32768 in a kernel. None: all of them.
        norm_before_gate: gate what was normalised. False: normalise what was gated.

    Returns:
        Shape and dtype of x, contiguous. Gradients are the same bits in every run on one kind of GPU.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """
    tensors = (x, weight, bias, z)
    group_size = check_norm(*tensors, eps, group_size, norm_before_gate)
    settings = (float(eps), group_size, norm_before_gate)
    if not takes_kernels(x):
        return compute_in_torch(*tensors, *settings)
    return _RMS_NORM_GATED(tensors, settings)[0]


class RMSNormGated(nn.Module):
    """`rms_norm_gated` with a weight of its own and no bias, named as in `mamba_ssm`'s `RMSNorm`."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, norm_before_gate: bool = True,
                 device=None, dtype=None):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return rms_norm_gated(x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate)


def compute_in_torch(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, eps: float, group_size: int,
                     norm_before_gate: bool) -> Tensor:
    """(N1) to (N4) in torch with the kernels' rounding points: fp32 (fp64 for fp64) up to the result."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    gate = None if z is None else F.silu(z.to(compute))
    v = x.to(compute)
    if z is not None and not norm_before_gate:
        v = v * gate
    groups = v.unflatten(-1, (-1, group_size))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    if z is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype).contiguous()


def check_eps(name: str, eps: object) -> None:
    """Refuses what is no number from 0 to the largest of fp32."""
    check_number(name, eps)
    if not 0 <= eps <= FP32_LARGEST:
        raise ValueError(f"{name}: got {eps!r}, expected a finite number of at least 0")


def check_norm(x, weight, bias, z, eps, group_size, norm_before_gate) -> int:
    """Checks of the norm's arguments; returns the size of a group."""
    if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] < 1:
        came = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise (ValueError if isinstance(x, Tensor) else TypeError)(f"x: got {came}, expected a tensor (..., width), width >= 1")
    width = x.shape[-1]
    for name, t, shape in (("x", x, x.shape), ("weight", weight, (width,)), ("bias", bias, (width,)), ("z", z, x.shape)):
        if t is not None or name not in ("bias", "z"):
            check_tensor(name, t, tuple(shape), x)
    check_eps("eps", eps)
    if not isinstance(norm_before_gate, bool):
        raise TypeError(f"norm_before_gate: got {norm_before_gate!r}, expected True or False")
    # in torch.jit.trace, sizes of a shape are tensors
    group_size = take_int("group_size", width if group_size is None else group_size)
    if group_size < 1 or width % group_size:
        raise ValueError(f"group_size: got {group_size}, expected a divisor of the width, {width}")
    if group_size > WIDEST_GROUP and takes_kernels(x):
        raise ValueError(f"group_size: got {group_size} channels, expected at most {WIDEST_GROUP}, as many as a kernel takes")
    return group_size


def make_rows(t: Tensor | None) -> Tensor | None:
    """(rows, width) with contiguous channels: the same memory where it can be."""
    if t is None:
        return None
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 else t.contiguous()


def _forward(x, weight, bias, z, eps, group_size, norm_before_gate) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(x):
        return gated_norm(make_rows(x), weight.contiguous(), contiguous(bias), make_rows(z), eps,
                          group_size, norm_before_gate, x.shape)


def _forward_fake(x, weight, bias, z, eps, group_size, norm_before_gate):
    width = x.shape[-1]
    return x.new_empty(x.shape), x.new_empty((x.numel() // width, width // group_size), dtype=torch.float32)


def _backward(x, weight, bias, z, rstd, dout, eps, group_size, norm_before_gate) -> tuple[Tensor | None, ...]:
    with torch.cuda.device_of(x):
        dx, dweight, dbias, dz = gated_norm_bwd(
            make_rows(dout), make_rows(x), weight.contiguous(), contiguous(bias), make_rows(z), rstd,
            group_size, norm_before_gate)
    return dx.view(x.shape), dweight, dbias, None if z is None else dz.view(x.shape)


_RMS_NORM_GATED = DifferentiableOp(
    "rms_norm_gated", "Tensor x, Tensor weight, Tensor? bias, Tensor? z", "float eps, int group_size, bool norm_before_gate",
    outputs=("out",), kept=("rstd",), forward=_forward, fake=_forward_fake, backward=_backward)
