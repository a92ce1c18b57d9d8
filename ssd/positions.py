"""States at positions: after every so many tokens, from those that a forward leaves between chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import is_peer
from .types import SSDInputs, count_between


def check_states_every(every: int, chunk_size: int, cu_seqlens: object, context_group: object, variant: str) -> None:
    """Refuses a `return_states_every` that is no multiple of the chunk size, and what it does not go with."""
    if every < 1 or every % chunk_size:
        raise ValueError(f"return_states_every: got {every}, expected a multiple of chunk_size = {chunk_size}")
    for name, given in (("cu_seqlens", cu_seqlens), ("context_group", context_group)):
        if given is not None:
            raise ValueError(f"return_states_every: got {every} with {name}, expected no {name}")
    if is_peer(variant):
        raise ValueError(f"return_states_every: got {every} with variant {variant!r}, expected a variant of this project")


def take_states(i: SSDInputs, prev_states: Tensor, final_states: Tensor) -> Tensor:
    """The states after each `i.return_states_every` tokens, (batch, nslots, nheads, headdim, dstate); a copy, so that those
    between them are not held. prev_states: as `SSDSaved.prev_states`.
    """
    step = i.return_states_every // count_between(i, prev_states)
    inside, last = prev_states[:, step::step], ()
    if i.seqlen % i.return_states_every == 0:
        last = (final_states.detach()[:, None].to(prev_states.dtype),)
    return torch.cat((inside.detach(), *last), 1)
