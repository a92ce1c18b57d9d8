"""Where dB and dC are summed over the heads of a group, as the split of the heads among programs has it.

Where groups are few, several programs share the heads of each: every split multiplies its own dCB into its own part of dB and
dC, equation (32), and the parts are added in fixed order.
"""

import torch
from torch import Tensor

from ssd.kernels.arguments import output
from ssd.kernels.sum_parts import sum_first


def allocate_splits(like: Tensor, into: Tensor | None, splits: int) -> Tensor:
    """(splits, *like.shape): where each split of the heads leaves its sum; of one split, the gradient itself."""
    if splits == 1:
        return output(like, into)[None]
    return torch.empty(splits, *like.shape, device=like.device, dtype=torch.float32)


def keep_contiguous(into: Tensor | None) -> Tensor | None:
    """The place that was asked for, if kernels that write contiguous gradients can write there."""
    return into if into is not None and into.is_contiguous() else None


def add_splits(parts: Tensor, like: Tensor, into: Tensor | None) -> Tensor:
    """The gradient, from its parts."""
    if parts.shape[0] == 1:
        return parts[0]
    return sum_first(parts, output(like, into))
