"""Mamba-1's selective scan for the workloads whose published models have it, by the name of a variant."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ssd.block import selective_scan_fn
from ssd.block.selective_scan import compute_in_torch

_NAMES = ("auto", "torch", "mamba_ssm")
_STEPS = (0.001, 0.1)  # at the start


def choose_scan(variant: str) -> Callable[..., Tensor]:
    """What computes y of u, delta, A, B, C, D, z and delta_bias, as `ssd.block.selective_scan_fn` takes them, with softplus.

    Args:
        variant: "auto" for ours, "torch" for its torch form, "mamba_ssm" for upstream's CUDA kernel.

    Raises:
        ValueError: another variant, for this scan is no SSD.
        ImportError: upstream's is not installed, or not built.
    """
    if variant not in _NAMES:
        raise ValueError(f"--variant: got {variant!r}, expected {', '.join(_NAMES)} with --mixer mamba1, which has no SSD")
    if variant == "torch":
        return _torch
    if variant == "mamba_ssm":
        import selective_scan_cuda  # noqa: F401 - what mamba_ssm's function calls
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn as theirs

        return partial(theirs, delta_softplus=True)
    return partial(selective_scan_fn, delta_softplus=True)


def draw_step_bias(count: int) -> Tensor:
    """(count,) biases whose softplus is log-uniform between two bounds, as arXiv:2312.00752 draws them."""
    steps = torch.empty(count).uniform_(*map(math.log, _STEPS)).exp()
    return steps + torch.log(-torch.expm1(-steps))


def _torch(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
           delta_bias: Tensor | None = None) -> Tensor:
    B, C = (t if t.dim() == 4 else t.unsqueeze(1) for t in (B, C))
    return compute_in_torch(u, delta, A, B, C, D, z, delta_bias, True)[0]
