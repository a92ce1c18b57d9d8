"""Sub-chunks are dealt to blocks once each, every run is entered by exactly what lies before it, and the cut pays."""

import random
from itertools import pairwise, product, zip_longest
from unittest.mock import patch

import pytest
import torch

from fused import schedule
from fused.end_to_end import find_ends, list_work, place_blocks
from fused.schedule import choose_two_level_segment, count_resident_blocks, cut_evenly, deal_two_level, keep_whole
from fused.time_model import Cut, get_time_model
from ssd.kernels.arguments import cdiv

RESIDENT = count_resident_blocks(132, 4)
CPU, GPU = torch.device("cpu"), "h200"
WALKS = ("scan_step", "kept_scan_step", "every_state_step", "few_states_step")
SIZES = [(1, 64, 64, 132), (4, 64, 64, 132), (4, 40, 64, 132), (1, 40, 1024, 132), (8, 12, 32, 132), (3, 2, 16, 132),
         (1, 16, 64, 132), (1, 32, 64, 132), (1, 48, 64, 132), (1, 1, 1, 7), (2, 3, 5, 4), (5, 1, 100, 2)]


def list_runs(table: torch.Tensor | None) -> list[list[tuple[int, ...]]]:
    """Runs as a list for each block, without the empty ones that fill up the tables."""
    if table is None:
        return []
    assert table.is_contiguous() and table.dtype == torch.int32
    return [[tuple(run) for run in block if run[2] < run[3]] for block in table.tolist()]


def check(runs: schedule.Runs, batch: int, pairs: int, nsub: int, blocks: int,
          even: bool = True) -> tuple[list[tuple[int, ...]], ...]:
    """Every sub-chunk is walked once, and pieces lie in shares of one length, but for the last, if `even`. Returns the runs in
    the order in which blocks take them, and the pieces.
    """
    sequences, shares = list_runs(runs.sequences), list_runs(runs.pieces)
    assert len(sequences) <= blocks and len(shares) <= blocks
    turns = [run for turn in zip_longest(*sequences) for run in turn if run]
    walked = sorted((b, pair, c) for b, pair, first, last, *_ in turns for c in range(first, last))
    assert walked == list(product(range(batch), range(pairs), range(nsub)))
    pieces = [piece for share in shares for piece in share]
    assert [piece[4] for piece in pieces] == list(range(runs.npieces)) and (runs.pieces is None) == (not pieces)
    lengths = [sum(last - first for _, _, first, last, *_ in share) for share in shares]
    assert not even or (all(length == lengths[0] for length in lengths[:-1]) and lengths[-1:] <= lengths[:1])
    return turns, pieces


def check_deal(batch: int, pairs: int, nsub: int, blocks: int, walk: str, cut: bool) -> bool:
    """Whole sequences go first, then first segments, unless these lie end to end; each is entered by exactly the pieces before
    it. Whether any is cut.
    """
    runs, rest = schedule.deal(batch, pairs, nsub, blocks, GPU, walk, cut, 1, CPU), batch * pairs % blocks
    even = not (cut and rest and schedule._choose_cut(get_time_model(GPU), walk, rest, nsub, blocks).end_to_end)
    turns, pieces = check(runs, batch, pairs, nsub, blocks, even)
    order = [(last - first < nsub, first, b, pair) for b, pair, first, last, *_ in turns]
    assert (order == sorted(order) or not even) and (cut or not pieces)
    for b, pair, first, _, piece, npieces in turns:
        spans = [span for *owner, start, end, _, _ in pieces[piece : piece + npieces] if owner == [b, pair]
                 for span in [(start, end)]]
        assert len(spans) == npieces and [0, *[end for _, end in spans]] == [*[start for start, _ in spans], first]
    return runs.npieces > 0


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("cut", (True, False))
@pytest.mark.parametrize(("batch", "pairs", "nsub", "blocks"), SIZES)
def test_what_is_dealt(batch, pairs, nsub, blocks, walk, cut):
    check_deal(batch, pairs, nsub, blocks, walk, cut)


def test_random_sizes():
    draw = random.Random(0)
    cuts = [check_deal(draw.choice((1, 1, 2, 3, 8)), draw.choice((1, 2, 3, 12, 40)), draw.choice((1, 2, 5, 16, 64, 100)),
                       draw.choice((1, 4, 7, 66, 132, 200)), draw.choice(WALKS), draw.random() < 0.9) for _ in range(300)]
    assert sum(cuts) > 40


@pytest.mark.parametrize(("batch", "pairs", "nsub", "blocks"), [
    (2, 24, 64, 132), (1, 3, 10, 7), (3, 2, 9, 4), (5, 7, 16, 32), (4, 40, 128, 132)])
def test_end_to_end(batch, pairs, nsub, blocks):
    """Each run is entered by exactly what lies before it, a piece for each. Behind whole sequences all have as much to do."""
    each = cdiv(batch * pairs % blocks * nsub, blocks)
    with patch.object(schedule, "_choose_cut", lambda *_: Cut(each, None)):
        runs = schedule.deal(batch, pairs, nsub, blocks, GPU, "scan_step", True, 2, CPU)
    whole, pieces = batch * pairs // blocks * blocks, {piece[4]: piece for of in list_runs(runs.pieces) for piece in of}
    dealt = [[run for run in of if run[3] - run[2] < nsub] for of in list_runs(runs.sequences)]
    in_order = sorted((sorted(of) for of in dealt), key=lambda of: of or [(batch,)])
    walked = [(b * pairs + pair, c) for of in in_order for b, pair, first, last, *_ in of for c in range(first, last)]
    assert walked == list(product(range(whole, batch * pairs), range(nsub)))
    begins = [[run[2] == 0 for run in of] for of in dealt]
    assert begins == sorted((sorted(of, reverse=True) for of in begins), key=lambda of: not any(of)), "these wait for nothing"
    lengths = [sum(last - first for _, _, first, last, *_ in of) for of in dealt]
    assert not whole or max(lengths) == each
    all_steps = [sum(last - first for _, _, first, last, *_ in of) for of in list_runs(runs.sequences)]
    assert not whole or max(all_steps) == whole // blocks * nsub + each
    assert len(pieces) == runs.npieces == 2 * sum(run[2] > 0 for of in dealt for run in of)
    assert len(runs.pieces) <= blocks
    for b, pair, first, _, piece, npieces in (run for of in dealt for run in of if run[2]):
        for part in range(2):
            spans = [pieces[2 * n + part][:4] for n in range(piece, piece + npieces)]
            assert {span[:2] for span in spans} == {(b, 2 * pair + part)}
            assert [0, *[end for *_, end in spans]] == [*[start for _, _, start, _ in spans], first]


def test_blocks_end_together():
    """Sooner than with equal shares; of 48 sequences of 64 sub-chunks by 5 %. Blocks that wait for the pass have less to do."""
    def time_blocks(starts, total, nsub, blocks):
        return max(find_ends(list_work(starts, total, nsub), blocks))

    draw = random.Random(0)
    for _ in range(200):
        sequences, nsub, blocks = draw.randint(1, 131), draw.randint(1, 200), draw.choice((7, 66, 132))
        places, total = place_blocks(sequences, nsub, blocks), sequences * nsub
        assert places[0] == 0 and len(places) <= blocks and all(a < b for a, b in pairwise([*places, total]))
        equal = sorted({round(k * total / min(blocks, total)) for k in range(min(blocks, total))})
        assert time_blocks(places, total, nsub, blocks) <= time_blocks(equal, total, nsub, blocks) + 1e-9
    places, equal = place_blocks(48, 64, 132), range(0, 48 * 64, 24)
    assert time_blocks(places, 48 * 64, 64, 132) < 0.95 * time_blocks([*equal], 48 * 64, 64, 132)
    work = list_work(places, 48 * 64, 64)
    assert max(of.work for of in work if of.waits) < min(of.work for of in work if not of.waits)


def test_random_sizes_in_two_levels():
    """Pairs run fastest, then segments."""
    draw = random.Random(0)
    for _ in range(60):
        batch, pairs, nsub, every = (draw.randint(1, most) for most in (5, 10, 40, 8))
        blocks = draw.choice((None, 1, 5, 132, 10_000))
        turns, _ = check(deal_two_level(batch, pairs, nsub, every, blocks, CPU), batch, pairs, nsub, blocks or 1 << 20)
        order = [(b, first, pair) for b, pair, first, *_ in turns]
        assert order == sorted(order) and all(last == min(first + every, nsub) for _, _, first, last, *_ in turns)


def test_cuts_where_it_pays():
    def deal(*sizes):
        return schedule.deal(*sizes, 132, GPU, "scan_step", True, 1, CPU)

    assert deal(3, 96, 32).npieces > 0  # two rounds, and 24 sequences of which a third round would not be worth it
    assert deal(1, 64, 64).npieces > 0  # 64 blocks would leave 68 SMs idle
    assert deal(4, 64, 64).npieces == 0  # two rounds, the second nearly full
    longest = max(sum(last - first for _, _, first, last, *_ in of) for of in list_runs(deal(4, 40, 64).sequences))
    assert longest == 64 + 14  # the 28 left over end to end, 13 or 14 sub-chunks a block


def test_spans_are_as_long_as_fill_the_gpu():
    assert choose_two_level_segment(64, 32, 132, GPU) == 8  # two rounds instead of four
    assert choose_two_level_segment(12, 32, 132, GPU) == 4  # one round of 96 blocks; 8 would leave 84 SMs idle
    assert choose_two_level_segment(2, 4, 132, GPU) == 2


@pytest.mark.parametrize("seqlen, programs", [*product((1, 64, 65, 333, 4096, 65536), (1, 3, 80, 128, 320, 1000))])
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


def test_pieces_of_parts():
    """Where a state goes in two parts, each piece is walked for both, one after the other."""
    whole, parts = (schedule.deal(1, 16, 64, 132, GPU, "scan_step", True, n, CPU) for n in (1, 2))
    assert torch.equal(whole.sequences, parts.sequences) and parts.npieces == 2 * whole.npieces > 0
    expected = [(b, 2 * pair + part, first, last, 2 * piece + part, 0)
                for of in list_runs(whole.pieces) for b, pair, first, last, piece, _ in of for part in range(2)]
    assert [run for of in list_runs(parts.pieces) for run in of] == expected
