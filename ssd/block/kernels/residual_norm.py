"""The residual stream with what a block adds to it, and its RMSNorm, docs/block.md, (T7), in one launch: for inference.

Reads residual (..., width), added, of its shape, and weight (width,); all contiguous, fp16, bf16 or fp32. Writes the sum, in
the dtype of residual, and its norm, in that of the weight. A program takes a row, and holds it between its sum of squares and
its scaling.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.dependent_launch import begin_early, let_next_begin, wait_for_last
from ...runtime.launch import launch
from ...runtime.tuning import next_power_of_2

WIDEST = 32768  # channels
_PER_WARP = 256


@triton.jit
def residual_norm_kernel(residual, added, weight, total, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                         EARLY: tl.constexpr):
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    channels = tl.arange(0, BLOCK)
    inside = channels < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + channels
    v = tl.load(residual + at, mask=inside, other=0.0)
    if added is not None:
        v = (v.to(tl.float32) + tl.load(added + at, mask=inside, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(total + at, v, mask=inside)
    v = v.to(out.dtype.element_ty).to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(v * v, 0) / WIDTH + eps)
    y = v * scale * tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


def residual_norm(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the sum, residual itself where nothing is added, and its norm."""
    width = len(weight)
    total = residual if added is None else torch.empty_like(residual)
    out = torch.empty(residual.shape, device=residual.device, dtype=weight.dtype)
    block = next_power_of_2(width)
    launch(residual_norm_kernel, residual.numel() // width, residual, added, weight, total, out, eps, width, block,
           num_warps=min(32, max(1, block // _PER_WARP)), **begin_early(residual.device.index))
    return total, out
