"""What ranks tell each other: that their parts are of one sequence, and what passes from part to part."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

INITIAL_STATES = "initial_states on a rank that is not the first"  # of a signature: True is refused, since rank 0 has False
_ALIGNMENT = 8  # bytes, of the widest element that is sent
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
_checked: WeakKeyDictionary[dist.ProcessGroup, set[tuple]] = WeakKeyDictionary()


def find_place(group: dist.ProcessGroup) -> tuple[int, int]:
    """This process's rank in the group, and how many ranks it has.

    Raises:
        TypeError, ValueError: it is no group, or not one of this process's.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"context_group: got {type(group).__name__}, expected a torch.distributed.ProcessGroup")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("context_group: got a group without this process, expected one that it is in")
    return rank, dist.get_world_size(group)


def check_alike(group: dist.ProcessGroup, signature: dict[str, object]) -> None:
    """Compares what every rank passes. Ranks speak only of a signature that this group has not had before.

    Raises:
        ValueError: on every rank, naming what differs, with the ranks.
    """
    key, checked = tuple(signature.items()), _checked.setdefault(group, set())
    if key in checked:
        return
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: str(value) for name, value in signature.items()}, group=group)
    for name in signature:
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks.setdefault(theirs.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            got = "; ".join(f"{value} on rank {', '.join(map(str, of))}" for value, of in ranks.items())
            raise ValueError(f"context_group: {name}: got {got}; expected the same on every rank of the group")
    checked.add(key)


def gather(group: dist.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Each tensor of every rank, (ranks, *shape), by one message. Shapes and dtypes are alike on all ranks."""
    order = sorted(range(len(tensors)), key=lambda n: -tensors[n].element_size())  # so that each is aligned
    packed = torch.cat([tensors[n].contiguous().flatten().view(torch.uint8) for n in order])
    if missing := -packed.numel() % _ALIGNMENT:
        packed = torch.nn.functional.pad(packed, (0, missing))
    ranks = dist.get_world_size(group)
    received = packed.new_empty(ranks * packed.numel())
    _all_gather(received, packed, group=group)
    everyone, at, found = received.view(ranks, -1), 0, {}
    for n in order:
        size = tensors[n].nbytes
        found[n] = everyone[:, at : at + size].view(tensors[n].dtype).unflatten(1, tensors[n].shape)
        at += size
    return [found[n] for n in range(len(tensors))]


class GatherWithGradient(torch.autograd.Function):
    """(group, t, *others) -> what `gather` gives. Each rank gets back, and adds up, the gradients of its t from all ranks."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, t: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        everyone = gather(group, t, *others)
        ctx.mark_non_differentiable(*everyone[1:])
        return tuple(everyone)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return None, received.sum(0), *[None] * len(others)
