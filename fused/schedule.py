"""Which sub-chunks each block of the Hopper kernels walks.

Sequences (one pair of heads of one batch row each) go to the blocks whole, as many rounds as there are. What is left of them
fills no round: each is cut into the same parts, so that a run may begin inside a sequence. All are cut in the same places and
the first parts go first: blocks then walk side by side through neighbouring heads, whose rows share pages of memory. In equal
shares laid end to end they do not, and took a third longer for each sub-chunk (docs/kernel-log.md).

The state that enters a part comes from a pass over those before it, dealt out in equal shares: its pieces. Where that pass
would cost more than it saves, nothing is cut. Walks differ in that: one that writes every state uses up the memory's bandwidth
with 70 blocks, and more of them only wait for each other.

Times are microseconds, fitted to walks of 16 to 224 heads on an H200, which they meet within 10 % (docs/kernel-log.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LAUNCH = 7  # the pass before the parts
PIECE_STEP = 0.9  # a sub-chunk in it
START = 3.5  # of a run: its first tiles
JOIN = 1.5  # to read the end of a piece, which a run does for each one before it
SHORTEST = 4  # sub-chunks that a part or a share has at least
ROUNDS = 3  # of parts, at most
SPAN_START = 3  # time in which a block of the two-level scan finds its state and its first tiles, in sub-chunks
SPANS = (8, 4, 2)  # sub-chunks that a block of the two-level scan may walk; with more it would be the stationary scan
RUN_FIELDS = 6

Run = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Walk:
    """What a sub-chunk of a walk takes.

    Attributes:
        alone: its latency, where few blocks walk.
        shared: its part of the memory's time, for each block that walks.
    """

    alone: float
    shared: float

    def step(self, blocks: int) -> float:
        """Of each of so many blocks side by side."""
        return (self.alone**4 + (self.shared * blocks) ** 4) ** 0.25


SCAN = Walk(2.0, 0.02)  # of the outputs
EVERY_STATE = Walk(0.93, 0.0128)  # of states or their gradients, each written
FEW_STATES = Walk(1.0, 0.0)  # of states, of which few are written


class Runs(NamedTuple):
    """Tables (blocks, nruns, 6) int32 of the runs of each block.

    A run is a row: batch row, pair, first sub-chunk, last (exclusive), first piece, number of pieces. Blocks with fewer runs
    end in empty ones, all zeros. A run of the pieces leaves the piece that it names as its first.
    """

    sequences: Tensor
    pieces: Tensor | None
    npieces: int


def deal(batch: int, pairs: int, nsub: int, blocks: int, walk: Walk, cut: bool, device: torch.device) -> Runs:
    """Deals batch * pairs sequences of nsub sub-chunks to at most `blocks` blocks that run side by side.

    cut: whether sequences may be cut; device: where the tables are. There may be many whole sequences, so torch lists those;
    parts and pieces are a few for each block, so Python does: it is sooner done than torch's threads have met.
    """
    whole = batch * pairs // blocks * blocks
    rest = range(whole, batch * pairs)
    each, share = _cut(len(rest), nsub, blocks, walk) if cut and rest else (nsub, nsub)
    before = range(0, nsub, each)[-1]  # sub-chunks of a sequence that pieces walk
    # Laid end to end, what the pieces walk is cut where a part begins and where a share does.
    end = len(rest) * before
    bounds = sorted({*range(0, end, each), *range(0, end, share)})
    number = {bound: piece for piece, bound in enumerate([*bounds, end])}

    def part(sequence: int, first: int) -> Run:
        start = (sequence - whole) * before
        entering = (number[start], number[start + first] - number[start]) if first else (0, 0)
        return *divmod(sequence, pairs), first, min(first + each, nsub), *entering

    parts = [part(sequence, first) for first in range(0, nsub, each) for sequence in rest]
    sequence = torch.arange(whole, dtype=torch.int32, device=device)
    runs = sequence.new_zeros(whole + len(parts), RUN_FIELDS)
    runs[:whole, 0], runs[:whole, 1], runs[:whole, 3] = sequence // pairs, sequence % pairs, nsub
    if parts:
        runs[whole:] = _table(parts, device)
    if not bounds:
        return Runs(_in_turn(runs, blocks), None, 0)
    shares: list[list[Run]] = [[] for _ in range(0, end, share)]
    for piece, (bound, after) in enumerate(zip(bounds, [*bounds[1:], end], strict=True)):
        first = bound % before
        shares[bound // share].append((*divmod(whole + bound // before, pairs), first, first + after - bound, piece, 0))
    longest = max(map(len, shares))
    filled = [run for of in shares for run in (*of, *[(0,) * RUN_FIELDS] * (longest - len(of)))]
    return Runs(_in_turn(runs, blocks), _table(filled, device).view(-1, longest, RUN_FIELDS), len(bounds))


def span_length(sequences: int, nsub: int, blocks: int) -> int:
    """Sub-chunks of each run of a two-level scan, so that the last of `blocks` blocks side by side is done soonest."""

    def time(each: int) -> int:
        return -(-sequences * -(-nsub // each) // blocks) * (each + SPAN_START)

    return min(SPANS, key=time)


def span_runs(batch: int, pairs: int, nsub: int, every: int, blocks: int | None, device: torch.device) -> Runs:
    """Runs of `every` sub-chunks: one for each block, or in turn to `blocks` of them.

    Pairs run fastest, so that blocks side by side find the B and C of their group in L2.
    """
    starts = torch.arange(0, nsub, every, dtype=torch.int32, device=device)
    runs = starts.new_zeros(batch, len(starts), pairs, RUN_FIELDS)
    runs[..., 0] = torch.arange(batch, device=device)[:, None, None]
    runs[..., 1] = torch.arange(pairs, device=device)
    runs[..., 2] = starts[:, None]
    runs[..., 3] = (starts + every).clamp(max=nsub)[:, None]
    runs = runs.view(-1, RUN_FIELDS)
    return Runs(_in_turn(runs, blocks or len(runs)), None, 0)


def _cut(sequences: int, nsub: int, blocks: int, walk: Walk) -> tuple[int, int]:
    """Sub-chunks of a part of each sequence, nsub to leave them whole, and of a share of the pass before, so that the last
    block is done soonest.
    """

    def time(cut: tuple[int, int]) -> float:
        each, share = cut
        before = -(-nsub // each) - 1  # parts that others follow
        runs = sequences * (before + 1)
        rounds = -(-runs // blocks)
        scan = rounds * (START + each * walk.step(min(runs, blocks)))
        if not before:
            return scan
        straddling = each % share > 0  # shares then end inside a part
        joins = (-(-before * each // share) + straddling) * (rounds + 1) / 2
        return scan + JOIN * joins + LAUNCH + START * (1 + straddling) + PIECE_STEP * share

    most = min(ROUNDS * blocks // sequences, nsub // SHORTEST)
    parts = dict.fromkeys(-(-nsub // parts) for parts in range(2, most + 1))
    cuts = [(each, share) for each in parts for share in _share_lengths(sequences, nsub, each, blocks)]
    return min([(nsub, nsub), *cuts], key=time)


def _share_lengths(sequences: int, nsub: int, each: int, blocks: int) -> tuple[int, ...]:
    """Sub-chunks of equal shares of all parts but the last: with every block at work, and where each part is cut evenly."""
    before = sequences * (-(-nsub // each) - 1)
    shares = [-(-before * each // blocks)]
    if before <= blocks:
        shares.append(-(-each // (blocks // before)))
    return tuple(max(SHORTEST, share) for share in shares)


def _table(runs: list[Run], device: torch.device) -> Tensor:
    """(n, 6) int32, copied without a wait for what the device does."""
    return torch.tensor(runs, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _in_turn(runs: Tensor, blocks: int) -> Tensor:
    """The table in which so many blocks take turns, at most one for each run. runs: (n, 6) int32."""
    blocks = min(blocks, len(runs))
    nruns = -(-len(runs) // blocks)
    if nruns * blocks > len(runs):
        runs = torch.cat((runs, runs.new_zeros(nruns * blocks - len(runs), RUN_FIELDS)))
    return runs.view(nruns, blocks, RUN_FIELDS).transpose(0, 1).contiguous()
