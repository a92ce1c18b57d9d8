"""The residual stream with what a block adds to it, and its RMSNorm, docs/block.md, (T7), in one launch: for inference.

Reads residual (..., width), added, of its shape, and weight (width,); all contiguous, fp16, bf16 or fp32. Writes the sum, in
the dtype of residual, and its norm, in that of the weight. A program takes a row, and holds it between its sum of squares and
its scaling. What is added may still lack the factor of the block's gated norm, `Unscaled`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS
from ...runtime.dependent_launch import begin_early, let_next_begin, wait_for_last
from ...runtime.launch import launch
from ...runtime.tuning import next_power_of_2

WIDEST = 32768  # channels
_PER_WARP = 256


class Unscaled(NamedTuple):
    """What a block adds before the factor of its gated norm, r of (N2), which is one number a token: (N9).

    value: (batch, seqlen, width). sums: (batch, seqlen or more, slices) fp32, contiguous, of squares over slices of all
    `channels`.
    """

    value: Tensor
    sums: Tensor
    channels: int
    eps: float

    def scale(self) -> Tensor:
        """value times r, by torch, in the dtype of value."""
        mean = self.sums[:, : self.value.shape[1]].sum(2) / self.channels
        return (self.value * torch.rsqrt(mean + self.eps)[..., None]).to(self.value.dtype)


@triton.jit
def load_factor(sums, rows, eps, seqlen, CHANNELS: tl.constexpr, SLICES: tl.constexpr):
    """r of this program's token. rows: of sums, for each sequence."""
    k, token = tl.arange(0, triton.next_power_of_2(SLICES)), tl.program_id(0)
    at = (token // seqlen * rows + token % seqlen).to(tl.int64) * SLICES + k
    return tl.math.rsqrt(tl.sum(tl.load(sums + at, mask=k < SLICES, other=0.0), 0) / CHANNELS + eps)


@triton.jit(do_not_specialize=COUNTS)
def residual_norm_kernel(residual, added, weight, total, out, eps, sums, rows, factor_eps, seqlen, CHANNELS: tl.constexpr,
                         SLICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    channels = tl.arange(0, BLOCK)
    inside = channels < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + channels
    v = tl.load(residual + at, mask=inside, other=0.0)
    if added is not None:
        o = tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        if sums is not None:
            o *= load_factor(sums, rows, factor_eps, seqlen, CHANNELS, SLICES)
        v = (v.to(tl.float32) + o).to(v.dtype)
        tl.store(total + at, v, mask=inside)
    v = v.to(out.dtype.element_ty).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
    y = v * scale * tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def residual_norm(residual: Tensor, added: Tensor | Unscaled | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the sum, residual itself where nothing is added, and its norm."""
    width = len(weight)
    scaling = None, 0, 0.0, 0, 0, 0
    if isinstance(added, Unscaled):
        added, sums, channels, factor_eps = added
        scaling = sums, sums.shape[1], factor_eps, added.shape[1], channels, sums.shape[2]
    total = residual if added is None else torch.empty_like(residual)
    out = torch.empty(residual.shape, device=residual.device, dtype=weight.dtype)
    block = next_power_of_2(width)
    launch(residual_norm_kernel, residual.numel() // width,
           residual, added, weight, total, out, eps, *scaling, width, block,
           num_warps=min(32, max(1, block // _PER_WARP)), **begin_early(residual.device.index))
    return total, out
