"""Inputs such as a Mamba-2 layer feeds to the operator."""

import math

import torch
from torch import Tensor

from .shapes import ITEMSIZES, Shape

DTYPES = dict(zip(ITEMSIZES, (torch.bfloat16, torch.float16, torch.float32), strict=True))


def make_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0,
                requires_grad: bool = False) -> dict[str, Tensor | bool]:
    """Keyword arguments of `ssd_chunk_scan` but its chunk size, distributed as at a Mamba-2 layer's initialisation.

    x, B, C (and z, if gated) ~ N(0, 1) and dt ~ N(0, 1/4), contiguous and of `dtype`; in fp32 A ~ -U(1, 16), D = 1 and dt_bias
    such that the step softplus(dt_bias) is log-uniform in [0.001, 0.1].
    """
    rng = torch.Generator(device).manual_seed(seed)
    b, l, h, p, n, g = shape.sizes.values()

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=device)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(h, generator=rng, device=device)

    step = uniform(math.log(0.001), math.log(0.1)).exp()
    tensors = {
        "x": normal(b, l, h, p).to(dtype),
        "dt": (0.5 * normal(b, l, h)).to(dtype),
        "A": -uniform(1, 16),
        "B": normal(b, l, g, n).to(dtype),
        "C": normal(b, l, g, n).to(dtype),
        "D": torch.ones(h, device=device),
        "dt_bias": step + torch.log(-torch.expm1(-step)),  # the inverse of softplus
    }
    if shape.gated:
        tensors["z"] = normal(b, l, h, p).to(dtype)
    return {name: t.requires_grad_(requires_grad) for name, t in tensors.items()} | {"dt_softplus": True}
