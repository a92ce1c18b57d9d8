"""Which sub-chunks each block of the Hopper kernels walks.

Sequences (one pair of heads of one batch row each) go to the blocks whole, as many rounds as there are. What is left of them
fills no round: each is cut into the same parts, so that a run may begin inside a sequence. All are cut in the same places and
the first parts go first: blocks then walk side by side through neighbouring heads, whose rows share pages of memory. In equal
shares laid end to end they do not, and took a third longer for each sub-chunk (docs/kernel-log.md).

The state that enters a part comes from a pass over those before it, dealt out in equal shares: its pieces. Where that pass
would cost more than it saves, nothing is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

STATE_PASS = 0.5  # time of a sub-chunk in the state pass, against one in the scan
LAUNCH = 4  # time of the additional launch, in sub-chunks of the scan
SHORTEST = 4  # sub-chunks that a part or a share has at least
ROUNDS = 3  # of parts, at most
START = 3  # time in which a block of the scan finds its state and its first tiles, in sub-chunks
SPANS = (8, 4, 2)  # sub-chunks that a block of the two-level scan may walk; with more it would be the stationary scan
RUN_FIELDS = 6

Span = tuple[int, int, int]  # sequence, first sub-chunk, last sub-chunk (exclusive)
Run = tuple[int, int, int, int, int, int]  # batch row, pair, first, last, first piece, number of pieces


@dataclass(frozen=True)
class Runs:
    """Runs of each block. A run of the pieces leaves the piece that it names as its first."""

    sequences: tuple[tuple[Run, ...], ...]
    pieces: tuple[tuple[Run, ...], ...] = ()
    npieces: int = 0


def deal(batch: int, pairs: int, nsub: int, blocks: int, cut: bool = True) -> Runs:
    """Deals batch * pairs sequences of nsub sub-chunks to at most `blocks` blocks that run side by side."""
    count = batch * pairs
    whole = count // blocks * blocks
    rest = range(whole, count)
    each = _part(len(rest), nsub, blocks) if cut and rest else nsub
    parts = [(sequence, first, min(first + each, nsub)) for first in range(0, nsub, each) for sequence in rest]
    pieces = _shares(sorted(part for part in parts if part[2] < nsub), blocks)
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
        return -(-sequences * -(-nsub // each) // blocks) * (each + START)

    return min(SPANS, key=time)


def span_runs(batch: int, pairs: int, nsub: int, every: int, blocks: int | None) -> tuple[tuple[Run, ...], ...]:
    """Runs of `every` sub-chunks: one for each block, or in turn to `blocks` of them.

    Pairs run fastest, so that blocks side by side find the B and C of their group in L2.
    """
    runs = [(b, pair, first, min(first + every, nsub), 0, 0)
            for b in range(batch) for first in range(0, nsub, every) for pair in range(pairs)]
    blocks = min(blocks or len(runs), len(runs))
    return tuple(tuple(runs[block::blocks]) for block in range(blocks))


def _part(sequences: int, nsub: int, blocks: int) -> int:
    """Sub-chunks of a part of each sequence, nsub to leave them whole, so that the last block is done soonest."""

    def time(each: int) -> float:
        parts = -(-nsub // each)
        walked = -(-sequences * parts // blocks) * each
        return walked + LAUNCH + STATE_PASS * -(-sequences * each * (parts - 1) // blocks) if parts > 1 else nsub

    most = min(ROUNDS * blocks // sequences, nsub // SHORTEST)
    return min((-(-nsub // parts) for parts in range(1, max(most, 1) + 1)), key=time)


def _shares(spans: list[Span], blocks: int) -> list[list[Span]]:
    """The spans laid end to end and cut into at most `blocks` equal shares."""
    total = sum(last - first for _, first, last in spans)
    each = max(SHORTEST, -(-total // blocks))
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
    return shares if total else []
