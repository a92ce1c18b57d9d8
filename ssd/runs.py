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

LAUNCH = 7  # the pass before the parts
PIECE_STEP = 0.9  # a sub-chunk in it
START = 3.5  # of a run: its first tiles
JOIN = 1.5  # to read the end of a piece, which a run does for each one before it
SHORTEST = 4  # sub-chunks that a part or a share has at least
ROUNDS = 3  # of parts, at most
SPAN_START = 3  # time in which a block of the two-level scan finds its state and its first tiles, in sub-chunks
SPANS = (8, 4, 2)  # sub-chunks that a block of the two-level scan may walk; with more it would be the stationary scan
RUN_FIELDS = 6

Span = tuple[int, int, int]  # sequence, first sub-chunk, last sub-chunk (exclusive)
Run = tuple[int, int, int, int, int, int]  # batch row, pair, first, last, first piece, number of pieces


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


@dataclass(frozen=True)
class Runs:
    """Runs of each block. A run of the pieces leaves the piece that it names as its first."""

    sequences: tuple[tuple[Run, ...], ...]
    pieces: tuple[tuple[Run, ...], ...] = ()
    npieces: int = 0


def deal(batch: int, pairs: int, nsub: int, blocks: int, walk: Walk, cut: bool = True) -> Runs:
    """Deals batch * pairs sequences of nsub sub-chunks to at most `blocks` blocks that run side by side."""
    count = batch * pairs
    whole = count // blocks * blocks
    rest = range(whole, count)
    each, share = _cut(len(rest), nsub, blocks, walk) if cut and rest else (nsub, nsub)
    parts = [(sequence, first, min(first + each, nsub)) for first in range(0, nsub, each) for sequence in rest]
    pieces = _shares(sorted(part for part in parts if part[2] < nsub), share)
    starts = [(sequence, first) for share in pieces for sequence, first, _ in share]

    def run(span: Span) -> Run:
        sequence, first, last = span
        entering = [k for k, (owner, begin) in enumerate(starts) if owner == sequence and begin < first] if first else []
        return (*divmod(sequence, pairs), first, last, entering[0] if entering else 0, len(entering))

    spans = [[(sequence, 0, nsub) for sequence in range(block, whole, blocks)] + parts[block::blocks]
             for block in range(blocks)]
    number = iter(range(len(starts)))
    left = [tuple((*divmod(sequence, pairs), first, last, next(number), 0) for sequence, first, last in share)
            for share in pieces]
    return Runs(tuple(tuple(map(run, of)) for of in spans if of), tuple(left), len(starts))


def span_length(sequences: int, nsub: int, blocks: int) -> int:
    """Sub-chunks of each run of a two-level scan, so that the last of `blocks` blocks side by side is done soonest."""

    def time(each: int) -> int:
        return -(-sequences * -(-nsub // each) // blocks) * (each + SPAN_START)

    return min(SPANS, key=time)


def span_runs(batch: int, pairs: int, nsub: int, every: int, blocks: int | None) -> tuple[tuple[Run, ...], ...]:
    """Runs of `every` sub-chunks: one for each block, or in turn to `blocks` of them.

    Pairs run fastest, so that blocks side by side find the B and C of their group in L2.
    """
    runs = [(b, pair, first, min(first + every, nsub), 0, 0)
            for b in range(batch) for first in range(0, nsub, every) for pair in range(pairs)]
    blocks = min(blocks or len(runs), len(runs))
    return tuple(tuple(runs[block::blocks]) for block in range(blocks))


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
    parts = (-(-nsub // parts) for parts in range(2, most + 1))
    cuts = [(each, share) for each in parts for share in _share_lengths(sequences, nsub, each, blocks)]
    return min([(nsub, nsub), *cuts], key=time)


def _share_lengths(sequences: int, nsub: int, each: int, blocks: int) -> tuple[int, ...]:
    """Sub-chunks of equal shares of all parts but the last: with every block at work, and where each part is cut evenly."""
    before = sequences * (-(-nsub // each) - 1)
    shares = [-(-before * each // blocks)]
    if before <= blocks:
        shares.append(-(-each // (blocks // before)))
    return tuple(max(SHORTEST, share) for share in shares)


def _shares(spans: list[Span], each: int) -> list[list[Span]]:
    """The spans laid end to end and cut into shares of `each` sub-chunks."""
    shares: list[list[Span]] = [[]]
    room = each
    for sequence, first, last in spans:
        while first < last:
            if not room:
                shares.append([])
                room = each
            taken = min(room, last - first)
            shares[-1].append((sequence, first, first + taken))
            first, room = first + taken, room - taken
    return shares if spans else []
