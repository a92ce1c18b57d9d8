"""How sequences are cut and dealt to blocks: for the kernels on Hopper as tables of runs, for the plain ones by length.

A sequence is one pair of heads of one batch row on Hopper. Sequences go to the blocks whole, in as many rounds as there are.
The rest fills no round, so each sequence of it is cut into the same segments. All are cut in the same places and the first
segments go first: blocks then walk side by side through neighbouring heads, whose rows share pages of memory. In equal shares
laid end to end they do not: walks that write every state took a third longer for each sub-chunk, and are never cut so. A scan
is cut into such shares if it keeps no states, its first state is not late (`ssd.runtime.late`), and the same segments for all
would leave many blocks idle; `end_to_end` finds the shares (docs/log/schedule.md).

The state that enters a segment comes from the state pass, a launch that walks the sub-chunks before it. The pass is dealt out
in equal shares, or where sequences lie end to end by the segments; a piece is what one share has of one segment. Nothing is
cut where the pass would cost more than it saves. A walk that writes every state, for one, uses up the memory's bandwidth with
70 blocks, and more blocks only wait for each other.

`time_model` says how long each cut takes; here the one that takes least is chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.kernels.arguments import cdiv

from .end_to_end import list_work, place_blocks
from .time_model import Cut, Step, TimeModel, get_time_model

SHORTEST = 4  # sub-chunks that a segment or a share has at least
ROUNDS = 3  # of segments, at most
TWO_LEVEL_SEGMENTS = (8, 4, 2)  # sub-chunks that a block of the two-level scan may walk; with more it would be stationary
MOST_SPLITS = 16  # of a group's heads
RUN_FIELDS = 6  # see `Runs`

WARPS_PER_SM = 8  # that run at once: blocks of the plain walks take every register that a thread may have
_WORTH = 0.9  # of the time of whole sequences: a plain cut that saves less is not worth a launch
_MOST_SEGMENTS = 16
_MOST_PIECES = 4  # of a plain segment; the next one starts by reading them all

Run = tuple[int, int, int, int, int, int]
_EMPTY: Run = (0,) * RUN_FIELDS


class Runs(NamedTuple):
    """Tables (blocks, nruns, 6) int32 of the runs of each block.

    A run is a row of six fields: batch row, pair, first sub-chunk, last sub-chunk (exclusive), first piece, number of pieces.
    In `sequences`, a run starts from its pieces joined, if it has any. In `pieces`, field 4 is the index of the piece that the
    run writes, and field 5 is 0. Blocks with fewer runs end in empty ones, all zeros.
    """

    sequences: Tensor
    pieces: Tensor | None
    npieces: int


def deal(batch: int, pairs: int, nsub: int, blocks: int, gpu: str, step: str, cut: bool, parts: int,
         device: torch.device) -> Runs:
    """Deals batch * pairs sequences of nsub sub-chunks to at most `blocks` blocks that run side by side.

    parts: of dstate, that a run of `pieces` has one of, pair * parts + part, and a run of `sequences` all. Pieces are numbered
    likewise: in `sequences` the number of a piece is that of all its parts.
    gpu: whose time model it is; step: the name of a `Step` in it, for what the walk does; cut: whether sequences may be cut;
    device: where the tables are. Torch lists the whole sequences, of which there may be many. Python lists segments and pieces:
    they are few, and Python is done before torch's threads have met.
    """
    whole = batch * pairs // blocks * blocks
    rest = batch * pairs - whole
    chosen = _choose_cut(get_time_model(gpu), step, rest, nsub, blocks) if cut and rest else Cut(nsub, nsub)
    places: list[int] = []  # where each block begins, in all sequences in a row
    if chosen.end_to_end:  # behind whole sequences no block waits for the state pass
        places = list(range(0, rest * nsub, chosen.each)) if whole else place_blocks(rest, nsub, blocks)
    starts = _cut_at(places, rest, nsub) if places else [list(range(0, nsub, chosen.each))] * rest
    # Laid end to end, what the pieces walk is cut where a segment begins and where a share does.
    *begin, end = accumulate((of[-1] for of in starts), initial=0)
    bounds = {begin[n] + start for n, of in enumerate(starts) for start in of[:-1]}
    if chosen.share:
        bounds.update(range(0, end, chosen.share))
    ends = [*sorted(bounds), end]
    number = {bound: piece for piece, bound in enumerate(ends)}

    def make_run(n: int, first: int, last: int) -> Run:
        entering = (number[begin[n]], number[begin[n] + first] - number[begin[n]]) if first else (0, 0)
        return *divmod(whole + n, pairs), first, last, *entering

    cuts = sorted((0 if chosen.end_to_end else first, n, first, last)
                  for n, of in enumerate(starts) for first, last in pairwise([*of, nsub]))
    segments = [make_run(*cut) for _, *cut in cuts]
    if chosen.end_to_end:
        dealt: list[list[Run]] = [[] for _ in places]
        for (_, n, first, _), run in zip(cuts, segments, strict=True):
            dealt[bisect_right(places, n * nsub + first) - 1].append(run)
        # runs that begin a sequence wait for no piece, and the first blocks find SMs that the state pass leaves
        for of in dealt:
            of.sort(key=_waits_for_pieces)
        work = list_work(places, rest * nsub, nsub)
        dealt = [dealt[k] for k in sorted(range(len(dealt)), key=lambda k: (work[k].waits, -work[k].work))]
        dealt += [[]] * (blocks - len(dealt))  # or turns behind whole sequences would be of other blocks
        segments = [run for turn in zip_longest(*dealt, fillvalue=_EMPTY) for run in turn]
    sequence = torch.arange(whole, dtype=torch.int32, device=device)
    runs = sequence.new_zeros(whole + len(segments), RUN_FIELDS)
    runs[:whole, 0], runs[:whole, 1], runs[:whole, 3] = sequence // pairs, sequence % pairs, nsub
    if segments:
        runs[whole:] = _to_table(segments, device)
    if not bounds:
        return Runs(_take_turns(runs, blocks), None, 0)
    shares: list[list[Run]] = [[] for _ in (range(0, end, chosen.share) if chosen.share else bounds)]
    for piece, (bound, after) in enumerate(pairwise(ends)):
        n = bisect_right(begin, bound) - 1
        (b, pair), first, last = divmod(whole + n, pairs), bound - begin[n], after - begin[n]
        shares[bound // chosen.share if chosen.share else piece] += [
            (b, pair * parts + part, first, last, piece * parts + part, 0) for part in range(parts)]
    longest = max(map(len, shares))
    filled = [run for of in shares for run in (*of, *[_EMPTY] * (longest - len(of)))]
    return Runs(_take_turns(runs, blocks), _to_table(filled, device).view(-1, longest, RUN_FIELDS), parts * len(bounds))


def choose_two_level_segment(sequences: int, nsub: int, blocks: int, gpu: str) -> int:
    """Sub-chunks of each run of a two-level scan, so that the last of `blocks` blocks side by side is done soonest."""
    model = get_time_model(gpu)
    return min(TWO_LEVEL_SEGMENTS, key=lambda segment: model.time_two_level(sequences, nsub, blocks, segment))


def deal_two_level(batch: int, pairs: int, nsub: int, segment: int, blocks: int | None, device: torch.device) -> Runs:
    """Deals segments of so many sub-chunks: one to each block, or in turn to `blocks` of them.

    Pairs run fastest, so that blocks side by side find the B and C of their group in L2.
    """
    starts = torch.arange(0, nsub, segment, dtype=torch.int32, device=device)
    runs = starts.new_zeros(batch, len(starts), pairs, RUN_FIELDS)
    runs[..., 0] = torch.arange(batch, device=device)[:, None, None]
    runs[..., 1] = torch.arange(pairs, device=device)
    runs[..., 2] = starts[:, None]
    runs[..., 3] = (starts + segment).clamp(max=nsub)[:, None]
    runs = runs.view(-1, RUN_FIELDS)
    return Runs(_take_turns(runs, blocks or len(runs)), None, 0)


@lru_cache(maxsize=1024)
def choose_splits(tiles: int, heads: int, blocks: int, gpu: str) -> int:
    """Into how many splits the heads of a group are cut so that the last block is done soonest. No split is empty."""
    model = get_time_model(gpu)
    best = min(range(1, min(heads, MOST_SPLITS) + 1), key=lambda splits: model.time_group(tiles, heads, blocks, splits))
    return cdiv(heads, cdiv(heads, best))


@dataclass(frozen=True)
class Schedule:
    """How stationary_scan cuts each sequence. All segments but the last are first walked without their outputs, in pieces.

    Attributes:
        nsegments: segments of a sequence, none empty; all but the last are `segment` tokens long.
        pieces: pieces of a segment. Each block of the state pass walks one: it does less than a block of the scan.
        piece: tokens of a piece.
    """

    nsegments: int
    pieces: int
    piece: int

    @property
    def segment(self) -> int:
        return self.pieces * self.piece

    @property
    def npieces(self) -> int:
        """Pieces of a sequence whose end states must be known: those of all segments but the last."""
        return (self.nsegments - 1) * self.pieces


def count_resident_blocks(sms: int, num_warps: int) -> int:
    """How many blocks of the plain walks run side by side."""
    return sms * max(1, WARPS_PER_SM // num_warps)


def keep_whole(seqlen: int) -> Schedule:
    """Sequences in one segment."""
    return Schedule(1, 1, seqlen)


def cut_evenly(seqlen: int, block: int, programs: int, resident: int, gpu: str) -> Schedule:
    """The cut that is expected to take the least time.

    Args:
        block: tokens of a sub-chunk; a piece is a whole number of them.
        programs: blocks that one segment of every sequence takes.
        resident: how many blocks run side by side.
        gpu: whose time model it is.
    """
    model, nblocks = get_time_model(gpu), cdiv(seqlen, block)

    def time(nsegments: int) -> float:
        return model.time_plain_cut(nsegments, programs, resident)

    wanted = min(range(1, min(nblocks, _MOST_SEGMENTS) + 1), key=time)
    if time(wanted) > _WORTH * time(1):
        return keep_whole(seqlen)
    pieces = max(1, min(_MOST_PIECES, 2 * resident // (programs * (wanted - 1)), nblocks // wanted))
    length = cdiv(nblocks, wanted * pieces)
    return Schedule(cdiv(nblocks, pieces * length), pieces, length * block)


def _choose_cut(model: TimeModel, step: str, sequences: int, nsub: int, blocks: int) -> Cut:
    """The cut with which the last block is done soonest; segments of nsub leave the sequences whole."""
    taken: Step = getattr(model, step)
    most = min(ROUNDS * blocks // sequences, nsub // SHORTEST)
    segments = dict.fromkeys(cdiv(nsub, nsegments) for nsegments in range(2, most + 1))
    cuts = [Cut(segment, share) for segment in segments for share in _list_shares(sequences, nsub, segment, blocks)]
    each = cdiv(sequences * nsub, blocks)
    if step == "scan_step" and SHORTEST <= each < nsub:
        cuts.append(Cut(each, None))
    return min([Cut(nsub, nsub), *cuts], key=lambda cut: model.time_cut(taken, sequences, nsub, blocks, cut))


def _list_shares(sequences: int, nsub: int, segment: int, blocks: int) -> tuple[int, ...]:
    """Sub-chunks of equal shares of all segments but the last: with every block at work, and where each is cut evenly."""
    before = sequences * (cdiv(nsub, segment) - 1)
    shares = [cdiv(before * segment, blocks)]
    if before <= blocks:
        shares.append(cdiv(segment, blocks // before))
    return tuple(max(SHORTEST, share) for share in shares)


def _cut_at(places: list[int], sequences: int, nsub: int) -> list[list[int]]:
    """The first sub-chunk of each segment, of each of the sequences, where blocks begin at these places of all in a row."""
    starts = [[0] for _ in range(sequences)]
    for place in places:
        if place % nsub:
            starts[place // nsub].append(place % nsub)
    return starts


def _waits_for_pieces(run: Run) -> bool:
    """Whether it begins inside a sequence, from pieces joined."""
    return run[5] > 0


def _to_table(runs: list[Run], device: torch.device) -> Tensor:
    """(n, 6) int32, copied without a wait for what the device does."""
    return torch.tensor(runs, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _take_turns(runs: Tensor, blocks: int) -> Tensor:
    """The table in which so many blocks take turns, at most one for each run. runs: (n, 6) int32."""
    blocks = min(blocks, len(runs))
    nruns = cdiv(len(runs), blocks)
    if nruns * blocks > len(runs):
        runs = torch.cat((runs, runs.new_zeros(nruns * blocks - len(runs), RUN_FIELDS)))
    return runs.view(nruns, blocks, RUN_FIELDS).transpose(0, 1).contiguous()
