"""Sub-chunks are dealt to blocks once each, every run is entered by exactly what lies before it, and the cut pays."""

import random
from itertools import product
from typing import NamedTuple

import pytest
import torch

from fused import schedule
from fused.schedule import choose_two_level_segment, count_resident_blocks, cut_evenly, deal_two_level, keep_whole
from fused.time_model import get_time_model

RESIDENT = count_resident_blocks(132, 4)
CPU, GPU = torch.device("cpu"), "h200"
SCAN, EVERY_STATE, FEW_STATES = "scan_step", "every_state_step", "few_states_step"
SIZES = [(1, 64, 64, 132), (4, 64, 64, 132), (4, 40, 64, 132), (1, 40, 1024, 132), (8, 12, 32, 132), (3, 2, 16, 132),
         (1, 16, 64, 132), (1, 32, 64, 132), (1, 48, 64, 132), (1, 1, 1, 7), (2, 3, 5, 4), (5, 1, 100, 2)]


class Listed(NamedTuple):
    """Runs as a list for each block, without the empty ones that fill up the tables."""

    sequences: list[list[tuple[int, ...]]]
    pieces: list[list[tuple[int, ...]]]
    npieces: int


def listed(table: torch.Tensor | None) -> list[list[tuple[int, ...]]]:
    return [] if table is None else [[tuple(run) for run in block if run[2] < run[3]] for block in table.tolist()]


def deal(batch, pairs, nsub, blocks, walk, cut=True) -> Listed:
    runs = schedule.deal(batch, pairs, nsub, blocks, GPU, walk, cut, CPU)
    return Listed(listed(runs.sequences), listed(runs.pieces), runs.npieces)


WALKS = pytest.mark.parametrize("walk", (SCAN, EVERY_STATE, FEW_STATES), ids=("scan", "every_state", "few_states"))


@WALKS
@pytest.mark.parametrize("cut", (True, False))
@pytest.mark.parametrize(("batch", "pairs", "nsub", "blocks"), SIZES)
def test_every_sub_chunk_once(batch, pairs, nsub, blocks, walk, cut):
    runs = deal(batch, pairs, nsub, blocks, walk, cut)
    assert len(runs.sequences) <= blocks and len(runs.pieces) <= blocks
    walked = sorted((b, pair, c) for of in runs.sequences for b, pair, first, last, _, _ in of for c in range(first, last))
    assert walked == [(b, pair, c) for b in range(batch) for pair in range(pairs) for c in range(nsub)]
    if not cut:
        assert runs.npieces == 0 and not runs.pieces


@WALKS
@pytest.mark.parametrize(("batch", "pairs", "nsub", "blocks"), SIZES)
def test_pieces_lead_up_to_their_run(batch, pairs, nsub, blocks, walk):
    runs = deal(batch, pairs, nsub, blocks, walk)
    pieces = sorted((piece, (b, pair), (first, last)) for of in runs.pieces for b, pair, first, last, piece, _ in of)
    assert [piece for piece, _, _ in pieces] == list(range(runs.npieces))
    for of in runs.sequences:
        for b, pair, first, _, piece, npieces in of:
            spans = [span for _, owner, span in pieces[piece : piece + npieces] if owner == (b, pair)]
            assert len(spans) == npieces
            assert [0, *[last for _, last in spans]] == [*[first for first, _ in spans], first]


def test_cuts_where_it_pays():
    assert deal(3, 96, 32, 132, SCAN).npieces > 0  # two rounds, and 24 sequences of which a third round would not be worth it
    assert deal(1, 64, 64, 132, SCAN).npieces > 0  # 64 blocks would leave 68 SMs idle
    assert deal(4, 64, 64, 132, SCAN).npieces == 0  # two rounds, the second nearly full
    longest = max(sum(last - first for _, _, first, last, _, _ in of) for of in deal(4, 40, 64, 132, SCAN).sequences)
    assert longest == 64 + 64 // 4  # the 28 left over in 4 parts on 112 blocks


def test_spans_are_as_long_as_fill_the_gpu():
    assert choose_two_level_segment(64, 32, 132, GPU) == 8  # two rounds instead of four
    assert choose_two_level_segment(12, 32, 132, GPU) == 4  # one round of 96 blocks; 8 would leave 84 SMs idle
    assert choose_two_level_segment(2, 4, 132, GPU) == 2


def tabled(blocks: list[list[tuple[int, ...]]]) -> torch.Tensor:
    """Lists of runs as a table, the shorter ones filled up with empty runs."""
    longest = max(map(len, blocks))
    return torch.tensor([[*runs, *[(0,) * 6] * (longest - len(runs))] for runs in blocks], dtype=torch.int32)


def deal_slowly(batch, pairs, nsub, blocks, walk, cut) -> Listed:
    """One sub-chunk of the pieces after the other."""
    whole = batch * pairs // blocks * blocks
    rest = range(whole, batch * pairs)
    each, share = schedule._choose_cut(get_time_model(GPU), walk, len(rest), nsub, blocks) if cut and rest else (nsub, nsub)
    parts = [(sequence, first) for first in range(0, nsub, each) for sequence in rest]
    walked = [(sequence, c) for sequence in rest for c in range(range(0, nsub, each)[-1])]  # all but the last part
    starts = [k for k, (_, c) in enumerate(walked) if c % each == 0 or k % share == 0]
    pieces = [[] for _ in range(-(-len(walked) // share))]
    for piece, (start, end) in enumerate(zip(starts, [*starts, len(walked)][1:], strict=True)):
        sequence, first = walked[start]
        pieces[start // share].append((*divmod(sequence, pairs), first, first + end - start, piece, 0))

    def run(sequence, first, last):
        before = [n for n, k in enumerate(starts) if walked[k][0] == sequence and walked[k][1] < first]
        return *divmod(sequence, pairs), first, last, min(before, default=0), len(before)

    runs = [run(sequence, 0, nsub) for sequence in range(whole)]
    runs += [run(sequence, first, min(first + each, nsub)) for sequence, first in parts]
    return Listed([runs[block::blocks] for block in range(min(blocks, len(runs)))], pieces, len(starts))


def test_tables_of_random_sizes():
    """To the entry what one run after the other comes to."""
    draw, cuts = random.Random(0), 0
    for _ in range(400):
        settings = (draw.choice((1, 1, 2, 3, 8, 40)), draw.choice((1, 2, 3, 12, 40)), draw.choice((1, 2, 5, 16, 64, 100, 333)),
                    draw.choice((1, 4, 7, 66, 132, 200)), draw.choice((SCAN, EVERY_STATE, FEW_STATES)), draw.random() < 0.9)
        wanted, got = deal_slowly(*settings), schedule.deal(*settings[:4], GPU, *settings[4:], CPU)
        assert got.sequences.is_contiguous() and got.sequences.dtype == torch.int32
        assert torch.equal(got.sequences, tabled(wanted.sequences)) and got.npieces == wanted.npieces
        assert (got.pieces is None) == (not wanted.npieces)
        if wanted.npieces:
            cuts += 1
            assert got.pieces.is_contiguous() and torch.equal(got.pieces, tabled(wanted.pieces))
    assert cuts > 50


def test_tables_of_spans_of_random_sizes():
    draw = random.Random(0)
    for _ in range(200):
        batch, pairs, nsub, every = (draw.randint(1, most) for most in (9, 20, 70, 8))
        blocks = draw.choice((None, 1, 5, 132, 10_000))
        runs = [(b, pair, first, min(first + every, nsub), 0, 0)
                for b in range(batch) for first in range(0, nsub, every) for pair in range(pairs)]
        side_by_side = min(blocks or len(runs), len(runs))
        wanted = tabled([runs[block::side_by_side] for block in range(side_by_side)])
        got = deal_two_level(batch, pairs, nsub, every, blocks, CPU).sequences
        assert got.is_contiguous() and got.dtype == torch.int32 and torch.equal(got, wanted)


@pytest.mark.parametrize("seqlen, programs", product((1, 64, 65, 333, 4096, 65536), (1, 3, 80, 128, 320, 1000)))
def test_every_token_has_one_segment(seqlen, programs):
    s = cut_evenly(seqlen, 64, programs, RESIDENT, GPU)
    assert (s.nsegments - 1) * s.segment < seqlen <= s.nsegments * s.segment
    assert s.npieces * s.piece == (s.nsegments - 1) * s.segment
    assert s.nsegments == 1 or s.piece % 64 == 0


def test_a_full_gpu_takes_sequences_whole():
    assert cut_evenly(4096, 64, 2 * RESIDENT, RESIDENT, GPU) == cut_evenly(4096, 64, 512, RESIDENT, GPU) == keep_whole(4096)
    assert keep_whole(4096).segment == 4096 and keep_whole(4096).npieces == 0


@pytest.mark.parametrize("seqlen, programs, nsegments", [(4096, 128, 2), (65536, 80, 3), (4096, 320, 4), (2048, 192, 1)])
def test_segments_of_models(seqlen, programs, nsegments):
    """8b-b1; 2.7b-64k; 2.7b-b4, whose second round would be a fifth full; 130m-b8."""
    assert cut_evenly(seqlen, 64, programs, RESIDENT, GPU).nsegments == nsegments
