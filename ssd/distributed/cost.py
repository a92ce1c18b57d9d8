"""Bytes and messages that a Mamba-2 mixer's exchanges take: ours, of states, and all-to-alls from tokens to heads.

With all-to-alls, as Megatron-LM has context parallelism, each rank gets all tokens of its share of the heads before the
convolution, and its share of the tokens after the scan. Ranks must then divide heads and groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import Problem
from .exchange import align

_ACCUMULATOR = 4  # bytes of an element of a state, and of a decay


@dataclass(frozen=True)
class Exchange:
    """What one rank receives.

    Attributes:
        messages: collective calls.
        bytes: from other ranks.
    """

    messages: int
    bytes: float


def count_states(p: Problem, ranks: int, width: int = 4) -> tuple[Exchange, Exchange]:
    """Of the forward and of the backward here, without documents. width: of the convolution."""
    state, decay = (p.batch * p.nheads * size * _ACCUMULATOR for size in (p.headdim * p.dstate, 1))
    tokens = p.batch * (p.nheads * p.headdim + 2 * p.ngroups * p.dstate) * (width - 1) * p.itemsize
    present = width - 1  # a byte for each token, whether there is one
    others = ranks - 1
    return (Exchange(2, others * (align(state) + align(decay) + align(tokens) + align(present))),
            Exchange(2, others * (align(state) + tokens)))


def count_all_to_alls(p: Problem, ranks: int) -> Exchange:
    """Of the forward by all-to-alls of z, x, B, C and dt, and of y; the backward's are as many. p: of the whole sequence."""
    inner, group = p.nheads * p.headdim, p.ngroups * p.dstate
    channels = 2 * inner + 2 * group + p.nheads + inner
    return Exchange(2, p.batch * p.seqlen / ranks * (1 - 1 / ranks) * channels * p.itemsize)
