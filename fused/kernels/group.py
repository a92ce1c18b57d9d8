"""What the group loops share: a program takes a sub-chunk of BLOCK_M tokens and loops over heads of a group, in order.

B, C and the products of the two are the group's, loaded once; sums over the heads stay in registers. Where groups are few,
SPLITS programs share the heads of each: every split multiplies its own dCB into its own part of dB and dC, equation (32), and
the parts are added in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import output
from ssd.kernels.sum_parts import sum_first


@triton.jit
def load_states(states, offs_p, offs_n, HEADDIM: tl.constexpr, DSTATE: tl.constexpr):
    """Rows offs_p of a contiguous state (headdim, dstate): [P, N], 0 outside."""
    inside = (offs_p < HEADDIM)[:, None] & (offs_n < DSTATE)[None, :]
    return tl.load(states + offs_p[:, None] * DSTATE + offs_n[None, :], mask=inside, other=0.0)


@triton.jit
def store_tokens(t, strides, token, offs_m, offs_c, seqlen, values, WIDTH: tl.constexpr):
    """`values` [M, C] to where `walk.load_tokens` would read them."""
    inside = (offs_m < seqlen - token)[:, None] & (offs_c < WIDTH)[None, :]
    at = offs_m[:, None] * strides[1] + offs_c[None, :] * strides[3]
    tl.store(t + tl.cast(token, tl.int64) * strides[1] + at, values.to(t.dtype.element_ty), mask=inside)


def parts_of(like: Tensor, into: Tensor | None, splits: int) -> Tensor:
    """(splits, *like.shape): where each split of the heads leaves its sum; of one split, the gradient itself."""
    if splits == 1:
        return output(like, into)[None]
    return torch.empty(splits, *like.shape, device=like.device, dtype=torch.float32)


def summed(parts: Tensor, like: Tensor, into: Tensor | None) -> Tensor:
    """The gradient, from its parts."""
    if parts.shape[0] == 1:
        return parts[0]
    if into is not None and not into.is_contiguous():
        return into.copy_(parts.sum(0))
    return sum_first(parts, output(like, into))
