"""Each kernel of the baseline alone against its stage, so that a fault says which kernel and which head."""

import pytest
import torch

from ssd import reference_stages as stages
from ssd.baseline.kernels.bmm_bwd import bmm_bwd_dB, bmm_bwd_dC
from ssd.baseline.kernels.bmm_chunk import bmm_chunk
from ssd.baseline.kernels.chunk_scan import chunk_scan
from ssd.baseline.kernels.chunk_scan_chunk_state_dx import chunk_scan_chunk_state_dx
from ssd.baseline.kernels.chunk_scan_dC import chunk_scan_dC
from ssd.baseline.kernels.chunk_scan_dCB import chunk_scan_dCB
from ssd.baseline.kernels.chunk_scan_dstates import chunk_scan_dstates
from ssd.baseline.kernels.chunk_scan_dz import chunk_scan_dz
from ssd.baseline.kernels.chunk_state import chunk_state
from ssd.baseline.kernels.chunk_state_dB import chunk_state_dB
from ssd.baseline.kernels.ddA_cumsum import ddA_cumsum
from ssd.baseline.kernels.state_passing import state_passing
from ssd.baseline.kernels.state_passing_bwd import state_passing_bwd
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.kernels.chunk_cumsum_bwd import chunk_cumsum_bwd
from ssd.kernels.sum_parts import sum_first
from ssd.types import Options
from tests.inputs import random_like
from tests.stage_values import CASES, Values, assert_stage, join_chunks, written_pairs

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter's bf16 is wrong
OPTIONS = Options()


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=(torch.float32, HALF), ids=str)
def v(request, case, device):
    return Values.draw(case, request.param, device)


def test_chunk_cumsum(v):
    dt, dA_cumsum = chunk_cumsum(v.inputs)

    def stage(at):
        i = at.inputs
        dt, dA_cumsum = stages.chunk_cumsum(i.dt, i.A, i.chunk_size, i.dt_bias, i.dt_softplus, i.dt_limit)
        return {"dt": dt, "dA_cumsum": dA_cumsum}

    assert_stage(v, {"dt": dt, "dA_cumsum": dA_cumsum}, stage, {"dt": 1, "dA_cumsum": 1})


def test_chunk_state(v):
    got = chunk_state(v.inputs, v.dt, v.dA_cumsum, OPTIONS)
    assert_stage(v, {"states": got}, lambda at: {
        "states": stages.chunk_state(at.x, at.B, at.dt, at.dA_cumsum, at.masks, at.precision)}, {"states": 2})


def test_state_passing(v):
    given = random_like(v.prev_states, "states").float()
    prev_states, final_states = state_passing(v.inputs, given, v.dA_cumsum)

    def stage(at):
        found = stages.state_passing(at.precision(given), at.dA_cumsum, at.inputs.initial_states, at.masks)
        return dict(zip(("prev_states", "final_states"), found, strict=True))

    assert_stage(v, {"prev_states": prev_states, "final_states": final_states}, stage, {"prev_states": 2, "final_states": 1})


def test_bmm_chunk(v):
    read = written_pairs(v.inputs)
    got = bmm_chunk(v.inputs, OPTIONS)
    assert_stage(v, {"CB": torch.where(read, got, 0)}, lambda at: {
        "CB": torch.where(read, stages.bmm_chunk(at.C, at.B), 0)}, {"CB": 2})


def test_chunk_scan(v):
    i = v.inputs
    out, y = chunk_scan(i, v.CB, v.dt, v.dA_cumsum, v.prev_states, OPTIONS, True)

    def stage(at):
        y = stages.chunk_scan(at.CB, at.x, at.dt, at.dA_cumsum, at.C, at.prev_states, at.D, at.masks, at.precision)
        y = join_chunks(y, i.seqlen)
        return {"out": y} if i.z is None else {"y": y, "out": y * torch.nn.functional.silu(at.inputs.z)}

    assert_stage(v, {"out": out} if y is None else {"y": y, "out": out}, stage, {"out": 2} if y is None else {"y": 2, "out": 2})


def test_chunk_scan_dz(device):
    v = Values.draw(CASES["every option"], HALF, device)
    y = random_like(v.inputs.x, "y")
    dz, dy = chunk_scan_dz(v.inputs, v.dy, y, None)

    def stage(at):
        dz, dy = stages.chunk_scan_dz(at.precision(v.dy), at.precision(y), at.inputs.z)
        return {"dz": dz, "dy": dy}

    assert_stage(v, {"dz": dz, "dy": dy}, stage, {"dz": 2, "dy": 2})


def test_chunk_scan_dstates(v):
    got = chunk_scan_dstates(v.inputs, v.dy, v.dA_cumsum, OPTIONS)
    assert_stage(v, {"dprev_states": got}, lambda at: {
        "dprev_states": stages.chunk_scan_dstates(at.dy, at.C, at.dA_cumsum, at.masks, at.precision)}, {"dprev_states": 2})


def test_state_passing_bwd(v):
    given = random_like(v.prev_states, "dprev_states").float()
    dstates, dinitial_states, s_tiles = state_passing_bwd(v.inputs, given, v.prev_states, v.dA_cumsum, v.dfinal_states, None)
    got = {"dstates": dstates, "s": s_tiles.sum(-1)}
    if dinitial_states is not None:
        got["dinitial_states"] = dinitial_states

    def stage(at):
        found = stages.state_passing_bwd(at.precision(given), at.prev_states, at.dA_cumsum, at.dfinal_states, at.masks)
        named = dict(zip(("dstates", "dinitial_states", "s"), found, strict=True))
        return {name: named[name] for name in got}

    assert_stage(v, got, stage, {name: 2 if name == "dstates" else 1 for name in got})


def test_chunk_scan_chunk_state_dx(v):
    i = v.inputs
    found = chunk_scan_chunk_state_dx(i, v.CB, v.dt, v.dA_cumsum, v.dstates, v.dy, OPTIONS, None)
    names = ("dx", "u_v_x", "q", "dD")

    def stage(at):
        dx, u_v_x, q, dD = stages.chunk_scan_chunk_state_dx(at.CB, at.x, at.dt, at.dA_cumsum, at.B, at.dstates, at.dy, at.D,
                                                            at.masks, at.precision)
        dD = dD if i.D.dim() == 2 else dD.sum(-1)
        return dict(zip(names, (join_chunks(dx, i.seqlen), u_v_x, q, dD), strict=True))

    assert_stage(v, dict(zip(names, found, strict=True)), stage, dict(zip(names, (2, 1, 1, 0), strict=True)))


def test_chunk_state_dB(v):
    i = v.inputs
    got = chunk_state_dB(i, v.dt, v.dA_cumsum, v.dstates, OPTIONS).sum(0)
    assert_stage(v, {"dB": got}, lambda at: {"dB": join_chunks(
        stages.chunk_state_dB(at.x, at.dt, at.dA_cumsum, at.dstates, i.ngroups, at.masks, at.precision), i.seqlen)}, {"dB": 2})


def test_chunk_scan_dC(v):
    i = v.inputs
    dC_parts, r_tiles = chunk_scan_dC(i, v.dy, v.dA_cumsum, v.prev_states, OPTIONS)

    def stage(at):
        dC, r = stages.chunk_scan_dC(at.dy, at.dA_cumsum, at.C, at.prev_states, at.masks, at.precision)
        return {"dC": join_chunks(dC, i.seqlen), "r": r}

    assert_stage(v, {"dC": dC_parts.sum(0), "r": r_tiles.sum(0)}, stage, {"dC": 2, "r": 1})


def test_chunk_scan_dCB(v):
    i, read = v.inputs, written_pairs(v.inputs)
    got = chunk_scan_dCB(i, v.dt, v.dA_cumsum, v.dy, OPTIONS)
    assert_stage(v, {"dCB": torch.where(read, got, 0)}, lambda at: {
        "dCB": stages.chunk_scan_dCB(at.x, at.dt, at.dA_cumsum, at.dy, i.ngroups, at.masks)}, {"dCB": 2})


def test_bmm_bwd(v):
    i, read = v.inputs, written_pairs(v.inputs)
    parts = random_like(i.B, "parts").float()[None].repeat(2, 1, 1, 1, 1)
    got = {"dB": bmm_bwd_dB(i, v.dCB, parts, OPTIONS, None), "dC": bmm_bwd_dC(i, v.dCB, parts, OPTIONS, None)}

    def stage(at):
        found = stages.bmm_bwd(torch.where(read, at.dCB, 0), at.B, at.C)
        return {name: join_chunks(t, i.seqlen) + at.precision(parts).sum(0) for name, t in zip(got, found, strict=True)}

    assert_stage(v, got, stage, {"dB": 2, "dC": 2})


def test_ddA_cumsum(v):
    """A tile of rows leaves nothing of the columns behind its last."""
    row, col_tiles = ddA_cumsum(v.inputs, v.dt, v.dA_cumsum, v.dy, v.CB, OPTIONS)
    ends = torch.arange(1, len(col_tiles) + 1, device=row.device) * (row.shape[-1] // len(col_tiles))
    written = torch.arange(row.shape[-1], device=row.device) < ends[:, None]
    col = torch.where(written[:, None, None, None], col_tiles, 0).sum(0)
    assert_stage(v, {"row - col": row - col}, lambda at: {
        "row - col": stages.ddA_cumsum(at.x, at.dt, at.dA_cumsum, at.dy, at.CB, at.masks)}, {"row - col": 1})


def test_chunk_cumsum_bwd(v):
    i = v.inputs
    u_v_x, q, row, r, col = (random_like(v.dt, name) for name in ("u_v_x", "q", "row", "r", "col"))
    # as kernels leave padding; of one sign, since no bound holds a single number that nearly cancels
    u_v_x, q, row, r, col = (torch.where(v.dt != 0, t.abs(), 0) for t in (u_v_x, q, row, r, col / 8))
    u_v_x = -u_v_x
    s = random_like(v.dt[..., 0], "s")
    arrivals = torch.zeros(i.nheads, dtype=torch.int32, device=v.dt.device)
    found = chunk_cumsum_bwd(i, u_v_x, r[None], q, s[..., None], row, col[None], arrivals, None)[:3]
    got = {name: t for name, t in zip(("ddt", "dA", "ddt_bias"), found, strict=True) if t is not None}

    def stage(at):
        wide, j = [at.precision(t) for t in (u_v_x, r, q, s, row - col)], at.inputs
        found = stages.chunk_cumsum_bwd(*wide, at.dt, j.dt, j.A, j.dt_bias, j.dt_softplus, j.dt_limit)
        return dict(zip(got, found, strict=False))

    assert_stage(v, got, stage, {name: 2 if name == "ddt" else 0 for name in got})


def test_sum_parts(v):
    parts = random_like(v.prev_states, "parts").float()
    assert_stage(v, {"sum": sum_first(parts, torch.empty_like(parts[0]))}, lambda at: {"sum": at.precision(parts).sum(0)},
                 {"sum": 1})
