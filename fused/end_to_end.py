"""Where sequences that lie end to end are cut for the blocks of a scan, so that the blocks end together.

Blocks in which a sequence begins start beside the state pass, as SMs come free; the others wait for its longest piece. So the
first have more to do than the others, and those of the others are shorter pieces for it. The lengths are found by trial: each
block gets or gives half of what it ends before or after the mean.

Times are in steps of the scan. They were read from clocks in the blocks of Falcon-H1 7B's scan on an H100, whose step took
2.6 us (docs/log/schedule.md, "When blocks begin and end"). Read again from the kernels as they are now, they made no forward
faster ("Pieces that come as tiles do" there), so they stayed.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

_PASS_STEP = 0.375  # a step of the state pass
_PASS_START = 0.65  # the first tiles of a piece, and its end on the way to memory
_LAUNCH = 0.8  # until a block has an SM that the pass leaves free
_WAIT = 1.4  # from the end of the pass to the first step after it, with the state of one piece
_JOIN = 0.4  # each piece more
_LATE_JOIN = 1.25  # each piece of a run that is not its block's first
_TRIALS = 700  # of lengths, of all blocks together
_FEWEST, _MOST = 5, 16  # trials of each


class Block(NamedTuple):
    """What a block has to do.

    Attributes:
        work: steps, and what its runs take to start, in steps.
        waits: whether it starts after the state pass.
        piece: steps of its longest run that another of the sequence follows.
    """

    work: float
    waits: bool
    piece: int


def place_blocks(sequences: int, nsub: int, blocks: int) -> list[int]:
    """Where each block begins, in sub-chunks of all sequences in a row; at most `blocks`, at least one."""
    repeats = gcd(sequences, blocks)
    total = sequences // repeats * nsub
    blocks = min(blocks // repeats, total)
    share = total / blocks
    lengths, best = [share] * blocks, None
    for _ in range(min(_MOST, max(_FEWEST, _TRIALS // blocks))):
        starts = sorted({start for begun in accumulate(lengths[:-1], initial=0.0) if (start := round(begun)) < total})
        work = list_work(starts, total, nsub)
        ends = find_ends(work, blocks)
        if best is None or max(ends) < best[0]:
            best = max(ends), starts
        if len(starts) < blocks:
            break
        mean = sum(ends) / blocks
        lengths = [max(1.0, length + (mean - end) / 2 - 0.75 * max(0.0, of.piece - share))
                   for length, end, of in zip(lengths, ends, work, strict=True)]
        scale = total / sum(lengths)
        lengths = [length * scale for length in lengths]
    return [of * total + start for of in range(repeats) for start in best[1]]


def list_work(starts: list[int], total: int, nsub: int) -> list[Block]:
    """What blocks have to do that begin there, of so many sub-chunks in all."""
    found, before = [], 0  # before: pieces of the sequence so far
    for start, end in pairwise([*starts, total]):
        work, waits, piece = float(end - start), True, 0
        for first in (start, *range((start // nsub + 1) * nsub, end, nsub)):
            if first % nsub == 0:
                before, waits = 0, False
            last = min(end, (first // nsub + 1) * nsub)
            if first % nsub:
                work += _LATE_JOIN * before if last < end else _JOIN * (before - 1)
            if last % nsub:
                before, piece = before + 1, max(piece, last - first)
        found.append(Block(work, waits, piece))
    return found


def find_ends(work: list[Block], blocks: int) -> list[float]:
    """When each block ends, where as many run at once: the longest of those that do not wait has the first free SM."""
    passes = [_PASS_START + _PASS_STEP * of.piece for of in work if of.piece]
    free = sorted([_LAUNCH] * (blocks - len(passes)) + passes)
    ends = [max(passes, default=0.0) + _WAIT + of.work for of in work]
    first = sorted((k for k, of in enumerate(work) if not of.waits), key=lambda k: -work[k].work)
    for k, start in zip(first, free, strict=False):
        ends[k] = start + work[k].work
    return ends
