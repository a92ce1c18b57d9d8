"""The stationary scan alone against the stages that it merges, as a whole and by head: whole sequences, and cut ones."""

from dataclasses import replace

import pytest

from fused.kernels.chunk_state_passing import segment_states
from fused.schedule import Schedule
from persistent.kernels.stationary_scan import CONFIGS, stationary_scan
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.types import Options
from tests.fused.test_kernels import OUTPUTS, STATES
from tests.stage_values import Values, assert_stages, name_results, over_values

OPTIONS = Options()


@over_values
@pytest.mark.parametrize("nsegments", (1, 2), ids=("whole", "cut"))
def test_stationary_scan(nsegments, case, dtype, device):
    """Outputs are held to those of a state that is never rounded, as here."""
    v = Values.draw(case, dtype, device)
    i, ends = v.inputs, (None, None)
    block = CONFIGS.pick(i)["BLOCK_M"]
    steps = chunk_cumsum(replace(i, chunk_size=block))
    schedule = Schedule(nsegments, 1, -(-i.seqlen // block // nsegments) * block)
    if nsegments > 1:
        ends = segment_states(i, *steps, schedule.piece, schedule.npieces, OPTIONS)
    found = stationary_scan(i, None, *steps, *ends, schedule, OPTIONS, True, True)
    assert_stages(v, name_results("out y final_states prev_states", *found), *STATES, *OUTPUTS)
