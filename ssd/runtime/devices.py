"""Facts about the device that a call runs on."""

from __future__ import annotations

from functools import cache

import torch

HOPPER = 9  # compute capability


@cache
def is_hopper(device: torch.device) -> bool:
    """True for a GPU that has Hopper's instructions: TMA, mbarriers and wgmma. AMD GPUs number their capabilities otherwise."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == HOPPER
