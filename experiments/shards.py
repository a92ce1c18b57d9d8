"""Clipping and AdamW on this process's shards of a model, as FSDP2 makes them, as plain tensors.

An operation on sharded tensors costs the host what many launches do: of a step of `mamba2` 1.3b 60 ms, and 31 on shards.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .parallel import Team


class AdamW(torch.optim.AdamW):
    """torch's, for parameters that may be sharded. Its state is sharded as they are."""

    def _init_group(self, group: dict, *lists: list[Tensor]) -> bool:
        """What a step of the group reads and writes, into lists of tensors."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(get_shard, tensors)
        return has_complex


@torch.no_grad()
def clip_gradient(parameters: Iterable[nn.Parameter], most: float, team: Team) -> Tensor:
    """Scales the gradient to a norm of at most `most`, none for 0; returns its norm before, a number on the device."""
    parameters = list(parameters)
    if not any(isinstance(p, DTensor) for p in parameters):
        return nn.utils.clip_grad_norm_(parameters, most or math.inf)
    shards = [get_shard(p.grad) for p in parameters if p.grad is not None]
    norm = team.sum_over(nn.utils.get_total_norm(shards).square()).sqrt()
    if most:
        torch._foreach_mul_(shards, (most / (norm + 1e-6)).clamp(max=1))  # as torch clips
    return norm


def get_shard(t: Tensor) -> Tensor:
    """This process's part of a tensor that is sharded; all of another."""
    return t.to_local() if isinstance(t, DTensor) else t
