"""The stationary scan alone against the stages that it merges, as a whole and by head: whole sequences, and cut ones."""

from dataclasses import replace

import pytest
import torch

from fused.kernels.chunk_state_passing import segment_states
from fused.schedule import Schedule
from persistent.kernels.stationary_scan import CONFIGS, stationary_scan
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.types import Options
from tests.fused.test_kernels import compute_outputs, compute_states
from tests.fused.test_options import HALF
from tests.stage_values import CASES, Values, assert_stage

OPTIONS = Options()


@pytest.mark.parametrize("nsegments", (1, 2), ids=("whole", "cut"))
@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_stationary_scan(case, dtype, nsegments, device):
    """Outputs are held to those of a state that is never rounded, as here."""
    v = Values.draw(CASES[case], dtype, device)
    i, ends = v.inputs, (None, None)
    block = CONFIGS.pick(i)["BLOCK_M"]
    steps = chunk_cumsum(replace(i, chunk_size=block))
    blocks = -(-i.seqlen // block)
    schedule = Schedule(nsegments, 1, -(-blocks // nsegments) * block)
    if nsegments > 1:
        ends = segment_states(i, *steps, schedule.piece, schedule.npieces, OPTIONS)
    out, y, final_states, prev_states = stationary_scan(i, None, *steps, *ends, schedule, OPTIONS, True, True)
    got = {"out": out, "final_states": final_states, "prev_states": prev_states} | ({} if y is None else {"y": y})

    def stage(at):
        states = compute_states(at)
        at.prev_states = states["prev_states"]
        return states | compute_outputs(at)

    assert_stage(v, got, stage, {name: 1 if name == "final_states" else 2 for name in got})
