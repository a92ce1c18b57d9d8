"""How sequences are cut: nothing left out, nothing empty, and as many segments as a GPU has room for."""

from itertools import product

import pytest

from persistent.schedule import resident_blocks, segmented, whole

H200 = resident_blocks(132, 4)


@pytest.mark.parametrize("seqlen, programs", product((1, 64, 65, 333, 4096, 65536), (1, 3, 80, 128, 320, 1000)))
def test_every_token_has_one_segment(seqlen, programs):
    s = segmented(seqlen, 64, programs, H200)
    assert (s.nsegments - 1) * s.segment < seqlen <= s.nsegments * s.segment
    assert s.npieces * s.piece == (s.nsegments - 1) * s.segment
    assert s.nsegments == 1 or s.piece % 64 == 0


def test_a_full_gpu_takes_sequences_whole():
    assert segmented(4096, 64, 2 * H200, H200) == segmented(4096, 64, 512, H200) == whole(4096)
    assert whole(4096).segment == 4096 and whole(4096).npieces == 0


def test_one_block_of_tokens_is_never_cut():
    assert segmented(64, 64, 1, H200) == whole(64)


@pytest.mark.parametrize("seqlen, programs, nsegments", [(4096, 128, 2), (65536, 80, 3), (4096, 320, 4), (2048, 192, 1)])
def test_segments_of_models(seqlen, programs, nsegments):
    """8b-b1; 2.7b-64k; 2.7b-b4, whose second round would be a fifth full; 130m-b8."""
    assert segmented(seqlen, 64, programs, H200).nsegments == nsegments


def test_wide_blocks_have_an_sm_each():
    assert resident_blocks(132, 8) == 132 and resident_blocks(132, 4) == 264
