"""Each plain kernel of the fused variant alone against the stages that it merges, as a whole and by head."""

from dataclasses import replace

import pytest
import torch

from fused.kernels.bmm_chunk_scan import CONFIGS, bmm_chunk_scan
from fused.kernels.bmm_chunk_scan_rows import bmm_chunk_scan_rows
from fused.kernels.chunk_state_passing import chunk_state_passing, refine_states, segment_states
from fused.kernels.dB_dx import dB_dx
from fused.kernels.dC_dCB import dC_dCB
from fused.kernels.dstates_passing import dstates_passing
from ssd import reference_stages as stages
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.types import Options
from tests.fused.test_options import HALF
from tests.inputs import random_like
from tests.stage_values import CASES, Values, assert_stage, join_chunks

OPTIONS = Options()


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=(torch.float32, HALF), ids=str)
def v(request, case, device):
    return Values.draw(case, request.param, device)


def compute_outputs(at):
    """Stages bmm_chunk and chunk_scan, and the gate."""
    y = stages.chunk_scan(stages.bmm_chunk(at.C, at.B), at.x, at.dt, at.dA_cumsum, at.C, at.prev_states, at.D, at.masks,
                          at.precision)
    y = join_chunks(y, at.inputs.seqlen)
    return {"out": y} if at.inputs.z is None else {"y": y, "out": y * torch.nn.functional.silu(at.inputs.z)}


def compute_states(at):
    states = stages.chunk_state(at.x, at.B, at.dt, at.dA_cumsum, at.masks, at.precision)
    return dict(zip(("prev_states", "final_states"),
                    stages.state_passing(states, at.dA_cumsum, at.inputs.initial_states, at.masks), strict=True))


@pytest.mark.parametrize("programs", (None, 3), ids=("a chunk each", "in turn"))
def test_bmm_chunk_scan(v, programs):
    i = v.inputs
    steps = chunk_cumsum(replace(i, chunk_size=CONFIGS.pick(i)["BLOCK_M"]))
    out, y = bmm_chunk_scan(i, None, *steps, v.prev_states, OPTIONS, True, programs)
    got = {"out": out} if y is None else {"y": y, "out": out}
    assert_stage(v, got, compute_outputs, dict.fromkeys(got, 2))


def test_bmm_chunk_scan_rows(v):
    out, y = bmm_chunk_scan_rows(v.inputs, None, v.dt, v.dA_cumsum, v.prev_states, OPTIONS, True)
    got = {"out": out} if y is None else {"y": y, "out": out}
    assert_stage(v, got, compute_outputs, dict.fromkeys(got, 2))


def test_chunk_state_passing(v):
    got = dict(zip(("prev_states", "final_states"), chunk_state_passing(v.inputs, v.dt, v.dA_cumsum, OPTIONS), strict=True))
    assert_stage(v, got, compute_states, {"prev_states": 2, "final_states": 1})


def test_refine_states(v):
    """From every other chunk's state, all in between."""
    got = refine_states(v.inputs, v.dt, v.dA_cumsum, v.prev_states[:, ::2].float(), 2 * v.inputs.chunk_size, OPTIONS)
    assert_stage(v, {"prev_states": got}, lambda at: {"prev_states": compute_states(at)["prev_states"]}, {"prev_states": 2})


def test_segment_states(v):
    """(28): from zeros, a segment leaves its own part and the factor of the state before it."""
    i, n = v.inputs, 2  # chunks are the segments
    ends, factors = segment_states(i, v.dt, v.dA_cumsum, i.chunk_size, n, OPTIONS)

    def stage(at):
        states = stages.chunk_state(at.x, at.B, at.dt, at.dA_cumsum, at.masks, at.precision)
        carried = at.dA_cumsum[..., -1].exp().transpose(1, 2) * at.masks.carry[..., None]
        return {"ends": states[:, :n], "factors": carried[:, :n]}

    assert_stage(v, {"ends": ends, "factors": factors}, stage, {"ends": 2, "factors": 2})


def test_dstates_passing(v):
    dstates, dinitial_states, s_tiles = dstates_passing(v.inputs, v.dy, v.dA_cumsum, v.prev_states, v.dfinal_states, OPTIONS,
                                                        None)
    got = {"dstates": dstates, "s": s_tiles.sum(-1)}
    if dinitial_states is not None:
        got["dinitial_states"] = dinitial_states

    def stage(at):
        dprev_states = stages.chunk_scan_dstates(at.dy, at.C, at.dA_cumsum, at.masks, at.precision)
        found = stages.state_passing_bwd(dprev_states, at.prev_states, at.dA_cumsum, at.dfinal_states, at.masks)
        named = dict(zip(("dstates", "dinitial_states", "s"), found, strict=True))
        return {name: named[name] for name in got}

    assert_stage(v, got, stage, {name: 2 if name == "dstates" else 1 for name in got})


def test_dC_dCB(v):
    i, block = v.inputs, v.inputs.chunk_size
    dC, dCB, net = dC_dCB(i, v.dt, v.dA_cumsum, v.dy, v.prev_states, OPTIONS, None)

    def stage(at):
        dC, r = stages.chunk_scan_dC(at.dy, at.dA_cumsum, at.C, at.prev_states, at.masks, at.precision)
        dCB = stages.chunk_scan_dCB(at.x, at.dt, at.dA_cumsum, at.dy, i.ngroups, at.masks)
        _, dC_pairs = stages.bmm_bwd(at.precision.round(dCB), at.B, at.C)
        pairs = stages.ddA_cumsum(at.x, at.dt, at.dA_cumsum, at.dy, stages.bmm_chunk(at.C, at.B), at.masks)
        return {"dC": join_chunks(dC + dC_pairs, i.seqlen), "dCB": dCB, "net": r + pairs}

    assert dCB.shape[-2:] == (block, block)
    assert_stage(v, {"dC": dC, "dCB": dCB.float().sum(3).to(dCB.dtype), "net": net}, stage, {"dC": 2, "dCB": 2, "net": 1})


def test_dB_dx(v):
    """dCB stands for its one split; above the diagonal it holds zeros, as dC_dCB leaves it."""
    i = v.inputs
    dCB = v.dCB.tril()
    names = ("dx", "dB", "dD", "u_v_x", "q")
    found = dB_dx(i, v.dt, v.dA_cumsum, v.dy, v.dstates, dCB[:, :, :, None].contiguous(), OPTIONS, None, None)

    def stage(at):
        CB = stages.bmm_chunk(at.C, at.B)
        dx, u_v_x, q, dD = stages.chunk_scan_chunk_state_dx(CB, at.x, at.dt, at.dA_cumsum, at.B, at.dstates, at.dy, at.D,
                                                            at.masks, at.precision)
        dB = stages.chunk_state_dB(at.x, at.dt, at.dA_cumsum, at.dstates, i.ngroups, at.masks, at.precision)
        dB = dB + stages.bmm_bwd(at.precision(dCB), at.B, at.C)[0]
        dD = dD if i.D.dim() == 2 else dD.sum(-1)
        return dict(zip(names, (join_chunks(dx, i.seqlen), join_chunks(dB, i.seqlen), dD, u_v_x, q), strict=True))

    assert_stage(v, dict(zip(names, found, strict=True)), stage, dict(zip(names, (2, 2, 0, 1, 1), strict=True)))


def test_a_fault_names_its_heads(device):
    """One head of six off by a ten-thousandth, and no other."""
    v = Values.draw(CASES["plain"], torch.float32, device)
    got = dict(zip(("prev_states", "final_states"), chunk_state_passing(v.inputs, v.dt, v.dA_cumsum, OPTIONS), strict=True))
    got["final_states"] = got["final_states"] * (1 + 1e-4 * (torch.arange(6, device=device) == 2)[:, None, None])
    with pytest.raises(AssertionError, match="final_states, head or group 2: rms") as said:
        assert_stage(v, got, compute_states, {"prev_states": 2, "final_states": 1})
    assert not any(f"group {head}:" in str(said.value) for head in (0, 1, 3, 4, 5)) and "prev_states" not in str(said.value)


def test_gradients_are_noise(device):
    """What stands for gradients is not zero anywhere, or its tests could not fail."""
    v = Values.draw(CASES["plain"], HALF, device)
    assert all(bool((t != 0).float().mean() > 0.9) for t in (v.dstates, v.dCB, v.dy, random_like(v.CB, "another")))
