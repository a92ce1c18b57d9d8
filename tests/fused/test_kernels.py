"""Each plain kernel of the fused variant alone against the stages that it merges, as a whole and by head."""

from dataclasses import replace

import pytest
import torch

from fused.kernels.bmm_chunk_scan import CONFIGS, bmm_chunk_scan
from fused.kernels.bmm_chunk_scan_rows import bmm_chunk_scan_rows
from fused.kernels.channel_skip import channel_skip
from fused.kernels.chunk_state_passing import chunk_state_passing, refine_states, segment_states
from fused.kernels.dB_dx import dB_dx
from fused.kernels.dC_dCB import dC_dCB
from fused.kernels.dstates_passing import dstates_passing
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.types import Options
from tests.inputs import HALF, PLAIN, Shape, random_inputs, random_like
from tests.stage_values import Values, assert_stages, name_results, over_values

OPTIONS = Options()


def launch_bmm_chunk_scan(v, programs=None):
    steps = chunk_cumsum(replace(v.inputs, chunk_size=CONFIGS.pick(v.inputs)["BLOCK_M"]))
    return name_results("out y", *bmm_chunk_scan(v.inputs, None, *steps, v.prev_states, OPTIONS, True, programs))


def launch_chunk_state_passing(v):
    return name_results("prev_states final_states", *chunk_state_passing(v.inputs, v.dt, v.dA_cumsum, OPTIONS))


def launch_refine_states(v):
    """From every other chunk's state, all in between."""
    every_other = v.prev_states[:, ::2].float()
    return {"prev_states": refine_states(v.inputs, v.dt, v.dA_cumsum, every_other, 2 * v.inputs.chunk_size, OPTIONS)}


def launch_segment_states(v):
    """(28): from zeros, a segment leaves its own part and the factor of the state before it. Chunks are the segments."""
    return name_results("ends factors", *segment_states(v.inputs, v.dt, v.dA_cumsum, v.inputs.chunk_size, 2, OPTIONS))


def compute_segments(at):
    carried = at.dA_cumsum[..., -1].exp().transpose(1, 2) * at.masks.carry[..., None]
    at.ends, at.factors = at.states[:, :2], carried[:, :2]


def launch_dstates_passing(v):
    found = dstates_passing(v.inputs, v.dy, v.dA_cumsum, v.prev_states, v.dfinal_states, OPTIONS, None)
    return name_results("dstates dinitial_states s", *found[:2], found[2].sum(-1))


def launch_dC_dCB(v):
    dC, dCB, net = dC_dCB(v.inputs, v.dt, v.dA_cumsum, v.dy, v.prev_states, OPTIONS, None)
    assert dCB.shape[-2:] == (v.inputs.chunk_size, v.inputs.chunk_size)
    return {"dC": dC, "dCB": dCB.float().sum(3).to(dCB.dtype), "net": net}


def round_dCB(at):
    at.dCB = at.precision.round(at.dCB)


def add_pairs(at):
    at.dC, at.net = at.dC + at.dC_pairs, at.r + at.row_minus_col


OUTPUTS, STATES = ("bmm_chunk", "chunk_scan"), ("chunk_state", "state_passing")
KERNELS = {  # name: launch, stages
    "bmm_chunk_scan, a chunk each": (launch_bmm_chunk_scan, OUTPUTS),
    "bmm_chunk_scan, in turn": (lambda v: launch_bmm_chunk_scan(v, programs=3), OUTPUTS),
    "bmm_chunk_scan_rows": (lambda v: name_results(
        "out y", *bmm_chunk_scan_rows(v.inputs, None, v.dt, v.dA_cumsum, v.prev_states, OPTIONS, True)), OUTPUTS),
    "chunk_state_passing": (launch_chunk_state_passing, STATES),
    "refine_states": (launch_refine_states, STATES),
    "segment_states": (launch_segment_states, ("chunk_state", compute_segments)),
    "dstates_passing": (launch_dstates_passing, ("chunk_scan_dstates", "state_passing_bwd")),
    "dC_dCB": (launch_dC_dCB, ("chunk_scan_dC", "chunk_scan_dCB", round_dCB, "bmm_bwd", "bmm_chunk", "ddA_cumsum", add_pairs)),
}


@over_values
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel, case, dtype, device):
    v, (launch, merged) = Values.draw(case, dtype, device), KERNELS[kernel]
    assert_stages(v, launch(v), *merged)


@over_values
def test_dB_dx(case, dtype, device):
    """dCB stands for its one split; above the diagonal it holds zeros, as dC_dCB leaves it."""
    v = Values.draw(case, dtype, device)
    dCB = v.dCB.tril()
    found = dB_dx(v.inputs, v.dt, v.dA_cumsum, v.dy, v.dstates, dCB[:, :, :, None].contiguous(), OPTIONS, None, None)

    def add_pairs(at):
        at.dB = at.dB + at.dB_pairs

    assert_stages(v, name_results("dx dB dD u_v_x q", *found), "bmm_chunk", "chunk_scan_chunk_state_dx", "chunk_state_dB",
                  "bmm_bwd", add_pairs, dCB=dCB)


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_channel_skip(dtype, device):
    """(19) of a D with channels, on top of a gradient without it; of tensors in any order of axes."""
    i = random_inputs(Shape(2, 76, 6, 24, 2, 20, 32), replace(PLAIN, D="hp"), dtype, device)
    x, dy, dx = (random_like(i.x, name).to(dtype).transpose(1, axis).contiguous().transpose(1, axis)
                 for name, axis in (("x", 3), ("dy", 2), ("dx", 3)))
    expected = dx.double() + i.D.double() * dy.double()
    dD = channel_skip(x, dy, i.D.mT.contiguous().mT, dx)
    torch.testing.assert_close(dx.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(dD.double(), (dy.double() * x.double()).sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_a_fault_names_its_heads(device):
    """One head of six off by a ten-thousandth, and no other."""
    v = Values.draw("plain", torch.float32, device)
    got = launch_chunk_state_passing(v)
    got["final_states"] = got["final_states"] * (1 + 1e-4 * (torch.arange(6, device=device) == 2)[:, None, None])
    with pytest.raises(AssertionError, match="final_states, head or group 2: rms") as said:
        assert_stages(v, got, *STATES)
    assert not any(f"group {head}:" in str(said.value) for head in (0, 1, 3, 4, 5)) and "prev_states" not in str(said.value)


def test_gradients_are_noise(device):
    """What stands for gradients is not zero anywhere, or its tests could not fail."""
    v = Values.draw("plain", HALF, device)
    assert all(bool((t != 0).float().mean() > 0.9) for t in (v.dstates, v.dCB, v.dy, random_like(v.CB, "another")))
