"""Bytes and messages as they are counted: against what is sent, and against figures of Megatron-LM's layer."""

import pytest

from ssd.cost import Problem
from ssd.distributed.cost import count_all_to_alls, count_states
from tests.distributed.rank_calls import count_exchanges

MIXER = Problem(1, 65536, 128, 64, 128, 8, 256)  # of the 8B hybrid


@pytest.mark.parametrize("ranks, states_mb, all_to_all_mb", [(2, 4.3, 877), (8, 30, 384)])
def test_figures_of_the_8b_mixer(ranks, states_mb, all_to_all_mb):
    forward, _ = count_states(MIXER, ranks)
    assert forward.bytes / 1e6 == pytest.approx(states_mb, rel=0.02)
    assert count_all_to_alls(MIXER, ranks).bytes / 1e6 == pytest.approx(all_to_all_mb, rel=0.002)


@pytest.mark.parametrize("size", (2, 3))
def test_what_a_block_sends(size, ranks):
    block = {"d_model": 8, "d_state": 8, "headdim": 4, "ngroups": 2, "chunk_size": 16}
    problem = Problem(1, 5 * size, 4, 4, 8, 2, 16, itemsize=4)
    expected = [(counted.messages, counted.bytes) for counted in count_states(problem, size)]
    assert ranks.run(size, count_exchanges, block, 5) == [expected] * size
