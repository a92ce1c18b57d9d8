"""What ranks tell each other: that their parts are of one sequence, and what passes from part to part."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.custom_ops import differentiate_once
from ..runtime.value_checks import reads_values
from .peers import find_window, gather_objects

INITIAL_STATES = "initial_states on a rank that is not the first"  # of a signature: True is refused, since rank 0 has False
_ALIGNMENT = 16  # bytes: what lets a kernel read and write four fp32 at once
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
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


def align(size: int) -> int:
    """The bytes that a tensor of `size` bytes takes in a message."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def check_alike(group: dist.ProcessGroup, signature: dict[str, object], error: Exception | None = None) -> None:
    """Compares what every rank passes. Ranks speak only of a signature that this group has not had before, or, with
    SSD_CHECK=1, of each.

    error: what this rank has found wrong with its own arguments.

    Raises:
        ValueError: on every rank, naming what differs, with the ranks.
        Exception: `error`, if every rank has found the same, or this rank alone has in a call that is not compared.
    """
    key, checked = tuple(signature.items()), _checked.setdefault(group, set())
    if key not in checked or reads_values():
        _compare(gather_objects(group, {name: str(value) for name, value in (signature | {"an error": error}).items()}))
    if error is not None:
        raise error
    checked.add(key)


def _compare(everyone: list[dict[str, str]]) -> None:
    for name in everyone[0]:
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks.setdefault(theirs.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            got = "; ".join(f"{value} on rank {', '.join(map(str, of))}" for value, of in ranks.items())
            raise ValueError(f"context_group: {name}: got {got}; expected the same on every rank of the group")


class Message:
    """What each rank sends at once: contiguous tensors of these shapes and dtypes, which are alike on all ranks.

    Attributes:
        tensors: to be written before the message is sent. They lie in the memory that is sent.
    """

    def __init__(self, device: torch.device, *forms: tuple[tuple[int, ...], torch.dtype]):
        self._forms = forms
        self._buffer = self._new_buffer(sum(map(_count_bytes, forms)), device)
        self.tensors = [t[0] for t in self._split(self._buffer[None])]

    def _new_buffer(self, nbytes: int, device: torch.device) -> Tensor:
        return torch.empty(nbytes, device=device, dtype=torch.uint8)

    def gather(self, group: dist.ProcessGroup) -> list[Tensor]:
        """Each tensor of every rank, (ranks, *shape)."""
        received = self._make_room(group)
        all_gather(received, self._buffer, group=group)
        return self._split(received.view(-1, self._buffer.numel()))

    def _make_room(self, group: dist.ProcessGroup) -> Tensor:
        return self._buffer.new_empty(dist.get_world_size(group) * self._buffer.numel())

    def _split(self, buffers: Tensor) -> list[Tensor]:
        """The tensors in buffers, [ranks, bytes]."""
        parts = buffers.split([_count_bytes(form) for form in self._forms], 1)
        return [part[:, : prod(shape) * dtype.itemsize].view(dtype).unflatten(1, shape)
                for part, (shape, dtype) in zip(parts, self._forms, strict=True)]


class EarlyMessage(Message):
    """A message that is on its way while something else is launched. One of a group at a time."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *forms: tuple[tuple[int, ...], torch.dtype]):
        self._group = group
        super().__init__(device, *forms)

    def _new_buffer(self, nbytes: int, device: torch.device) -> Tensor:
        self._window = find_window(self._group, nbytes, device)
        return super()._new_buffer(nbytes, device) if self._window is None else self._window.open(nbytes)

    def send(self) -> tuple[list[Tensor], Callable[[], object], Callable[[], object]]:
        """Each tensor of every rank, (ranks, *shape); and what to call before they are read, and at the end."""
        received = self._make_room(self._group)
        if self._window is None:
            wait = release = all_gather(received, self._buffer, group=self._group, async_op=True).wait
        else:
            wait, release = self._window.send(received.view(-1, self._buffer.numel()))
        return self._split(received.view(-1, self._buffer.numel())), wait, release


def _count_bytes(form: tuple[tuple[int, ...], torch.dtype]) -> int:
    return align(prod(form[0]) * form[1].itemsize)


def gather(group: dist.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Each tensor of every rank, (ranks, *shape), by one message. Shapes and dtypes are alike on all ranks."""
    message = Message(tensors[0].device, *((t.shape, t.dtype) for t in tensors))
    for sent, t in zip(message.tensors, tensors, strict=True):
        sent.copy_(t)
    return message.gather(group)


class GatherWithGradient(torch.autograd.Function):
    """(group, t, *others) -> what `gather` gives. Each rank gets back, and adds up, the gradients of its t from all ranks."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, t: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        everyone = gather(group, t, *others)
        ctx.mark_non_differentiable(*everyone[1:])
        return tuple(everyone)

    @staticmethod
    @differentiate_once
    def backward(ctx, grad: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return None, received.sum(0), *[None] * len(others)
