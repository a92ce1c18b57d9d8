"""Each kernel of the baseline alone against its stage, so that a fault says which kernel and which head."""

from dataclasses import replace

import pytest
import torch

from ssd import reference, reference_stages
from ssd.baseline.kernels.bmm_bwd import bmm_bwd_dB, bmm_bwd_dC
from ssd.baseline.kernels.bmm_chunk import bmm_chunk
from ssd.baseline.kernels.chunk_scan import chunk_scan
from ssd.baseline.kernels.chunk_scan_chunk_state_dx import chunk_scan_chunk_state_dx
from ssd.baseline.kernels.chunk_scan_dC import chunk_scan_dC
from ssd.baseline.kernels.chunk_scan_dCB import chunk_scan_dCB
from ssd.baseline.kernels.chunk_scan_dstates import chunk_scan_dstates
from ssd.baseline.kernels.chunk_scan_dz import chunk_scan_dz
from ssd.baseline.kernels.chunk_state import chunk_state, varlen_states
from ssd.baseline.kernels.chunk_state_dB import chunk_state_dB
from ssd.baseline.kernels.ddA_cumsum import ddA_cumsum
from ssd.baseline.kernels.document_passing import pass_states, pass_states_bwd
from ssd.baseline.kernels.state_passing import state_passing
from ssd.baseline.kernels.state_passing_bwd import state_passing_bwd
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.kernels.chunk_cumsum_bwd import chunk_cumsum_bwd
from ssd.kernels.sum_parts import sum_first
from ssd.kernels.sum_several import sum_several
from ssd.reference_stages import Precision, into_chunks
from ssd.types import Options, SSDSaved
from tests.inputs import HALF, Case, Shape, random_inputs, random_like
from tests.stage_values import SHAPE, Values, assert_stages, find_written_pairs, name_results, over_values

OPTIONS = Options()


def launch_state_passing_bwd(v):
    dstates, dinitial_states, s_tiles = state_passing_bwd(v.inputs, v.dprev_states, v.prev_states, v.dA_cumsum,
                                                          v.dfinal_states, None)
    return {"dstates": dstates, "dinitial_states": dinitial_states, "s": s_tiles.sum(-1)}


def launch_chunk_scan_dC(v):
    dC_parts, r_tiles = chunk_scan_dC(v.inputs, v.dy, v.dA_cumsum, v.prev_states, OPTIONS)
    return {"dC": dC_parts.sum(0), "r": r_tiles.sum(0)}


def launch_ddA_cumsum(v):
    """A tile of rows leaves nothing of the columns behind its last."""
    row, col_tiles = ddA_cumsum(v.inputs, v.dt, v.dA_cumsum, v.dy, v.CB, OPTIONS)
    ends = torch.arange(1, len(col_tiles) + 1, device=row.device) * (row.shape[-1] // len(col_tiles))
    written = torch.arange(row.shape[-1], device=row.device) < ends[:, None]
    return {"row_minus_col": row - torch.where(written[:, None, None, None], col_tiles, 0).sum(0)}


KERNELS = {  # by the stage that each is
    "chunk_state": lambda v: {"states": chunk_state(v.inputs, v.dt, v.dA_cumsum, OPTIONS)},
    "state_passing": lambda v: name_results("prev_states final_states", *state_passing(v.inputs, v.states, v.dA_cumsum)),
    "bmm_chunk": lambda v: {"CB": torch.where(find_written_pairs(v.inputs), bmm_chunk(v.inputs, OPTIONS), 0)},
    "chunk_scan": lambda v: name_results(
        "out y", *chunk_scan(v.inputs, v.CB, v.dt, v.dA_cumsum, v.prev_states, OPTIONS, True)),
    "chunk_scan_dstates": lambda v: {"dprev_states": chunk_scan_dstates(v.inputs, v.dy, v.dA_cumsum, OPTIONS)},
    "state_passing_bwd": launch_state_passing_bwd,
    "chunk_scan_chunk_state_dx": lambda v: name_results(
        "dx u_v_x q dD", *chunk_scan_chunk_state_dx(v.inputs, v.CB, v.dt, v.dA_cumsum, v.dstates, v.dy, OPTIONS, None)),
    "chunk_state_dB": lambda v: {"dB": chunk_state_dB(v.inputs, v.dt, v.dA_cumsum, v.dstates, OPTIONS).sum(0)},
    "chunk_scan_dC": launch_chunk_scan_dC,
    "chunk_scan_dCB": lambda v: {
        "dCB": torch.where(find_written_pairs(v.inputs), chunk_scan_dCB(v.inputs, v.dt, v.dA_cumsum, v.dy, OPTIONS), 0)},
    "ddA_cumsum": launch_ddA_cumsum,
}


@over_values
@pytest.mark.parametrize("stage", KERNELS)
def test_kernel(stage, case, dtype, device):
    v = Values.draw(case, dtype, device)
    assert_stages(v, KERNELS[stage](v), stage)


@over_values
def test_chunk_cumsum(case, dtype, device):
    v = Values.draw(case, dtype, device)
    assert_stages(v, name_results("dt dA_cumsum", *chunk_cumsum(v.inputs)), "chunk_cumsum", dt=v.inputs.dt)


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_chunk_scan_dz(dtype, device):
    """From y where that is kept, else from the output; of gates near 0 and at it, of some that leave little, and large ones."""
    v = Values.draw("every option", dtype, device)
    z = v.inputs.z.clone()
    z[..., :7] = torch.tensor([0.0, -0.0, 1e-30, -1e-4, -20.0, 1e3, 5e4], dtype=z.dtype, device=device)
    v = replace(v, inputs=replace(v.inputs, z=z))
    y = random_like(v.inputs.x, "y")
    out = (y.float() * reference_stages.gate(z.float())).to(dtype)
    saved = SSDSaved(v.inputs, OPTIONS, y if v.inputs.keeps_y(True) else None, out=out)
    y = y if v.inputs.keeps_y(True) else reference_stages.find_y(out.float(), z.float())
    assert_stages(v, name_results("dz dy", *chunk_scan_dz(saved, v.dy, None)), "chunk_scan_dz", dout=v.dy, y=y)


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_document_passing(dtype, device):
    """A row of the batch is a document, and one chunk more belongs to none."""
    v = Values.draw("one document", dtype, device)
    i = v.inputs
    first_rows = torch.tensor([0, i.nchunks, 2 * i.nchunks, 2 * i.nchunks + 1], dtype=torch.int32, device=device)
    states, dprev_states, dA_cumsum = (torch.cat([t.flatten(0, 1), t[0, :1]])[:, None]
                                       for t in (v.states, v.dprev_states, v.dA_cumsum.transpose(1, 2)))
    dA_cumsum, found = dA_cumsum.transpose(1, 2).contiguous(), []
    for kept, leaving in (pass_states(i, i.initial_states, states, dA_cumsum, first_rows),
                          pass_states_bwd(i, v.dfinal_states, dprev_states, dA_cumsum, first_rows)):
        assert not kept[-1].any()
        found += kept[:-1].unflatten(0, (2, -1)), leaving
    assert_stages(v, name_results("prev_states final_states dstates dinitial_states", *found),
                  "state_passing", "state_passing_bwd")


@pytest.mark.parametrize("dtype", (torch.float32, HALF), ids=str)
def test_varlen_states(dtype, device):
    """Of documents that begin in the chunk that they end in, or before it, and of an empty one."""
    v = Values.draw("every option", dtype, device, replace(SHAPE, batch=1))
    ends = torch.tensor([0, 20, 50, 60, 76, 76], dtype=torch.int32, device=device)
    documents = torch.bucketize(torch.arange(76, device=device), ends, out_int32=True, right=True)
    i = replace(v.inputs, cu_seqlens=ends, seq_idx=documents[None])
    prev_states = reference.compute_prev_states(i, Precision(torch.float32)).to(dtype).contiguous()

    def compute_ends(at):
        at.varlen_states = reference.varlen_states(i, at.precision)

    assert_stages(v, {"varlen_states": varlen_states(i, v.dt, v.dA_cumsum, prev_states, OPTIONS)}, compute_ends)


@over_values
def test_bmm_bwd(case, dtype, device):
    """Each adds to the parts of the other sum."""
    v = Values.draw(case, dtype, device)
    parts = random_like(v.inputs.B, "parts").float()[None].repeat(2, 1, 1, 1, 1)
    got = {"dB": bmm_bwd_dB(v.inputs, v.dCB, parts, OPTIONS, None), "dC": bmm_bwd_dC(v.inputs, v.dCB, parts, OPTIONS, None)}

    def add_parts(at):
        more = into_chunks(at.precision(parts).sum(0), at.chunk_size)
        at.dB, at.dC = at.dB_pairs + more, at.dC_pairs + more

    assert_stages(v, got, "bmm_bwd", add_parts, dCB=torch.where(find_written_pairs(v.inputs), v.dCB, 0))


@over_values
def test_chunk_cumsum_bwd(case, dtype, device):
    v = Values.draw(case, dtype, device)
    i = v.inputs
    u_v_x, q, row, r, col = (random_like(v.dt, name) for name in ("u_v_x", "q", "row", "r", "col"))
    # as kernels leave padding; of one sign, since no bound holds a single number that nearly cancels
    u_v_x, q, row, r, col = (torch.where(v.dt != 0, t.abs(), 0) for t in (u_v_x, q, row, r, col / 8))
    u_v_x, s = -u_v_x, random_like(v.dt[..., 0], "s")
    arrivals = torch.zeros(i.nheads, dtype=torch.int32, device=v.dt.device)
    found = chunk_cumsum_bwd(i, u_v_x, r[None], q, s[..., None], row, col[None], arrivals, None)[:3]
    assert_stages(v, name_results("ddt dA ddt_bias", *found), "chunk_cumsum_bwd", ddt=u_v_x, r=r, q=q, s=s,
                  row_minus_col=row - col)


@over_values
def test_sum_parts(case, dtype, device):
    v = Values.draw(case, dtype, device)
    parts = random_like(v.prev_states, "parts").float()

    def add_up(at):
        at.sum = at.parts.sum(0)

    other, several = torch.empty_like(parts[0, 0]), torch.empty_like(parts[0])
    sum_several((parts[0], other), (parts, several))  # the second after the tiles of the first
    for found in (sum_first(parts, torch.empty_like(parts[0])), several):
        assert_stages(v, {"sum": found}, add_up, parts=parts)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("batch, seqlen", [(1, 16), (2, 40), (1, 2100)])
@pytest.mark.parametrize("bias, D", [(False, False), (True, False), (False, True), (True, True)])
def test_sums_that_the_last_program_adds_up(batch, seqlen, bias, D, device):
    """Of one part, of fewer than are read at a time and of more. As often as it is launched, the bits are the same."""
    i = random_inputs(Shape(batch, seqlen, 11, 16, 1, 16, 16), Case(dt_bias=bias), torch.float32, device)
    i = replace(i, dt=i.dt.abs())
    arrivals = torch.full((i.nheads,), 77, dtype=torch.int32, device=device)
    dt, _ = chunk_cumsum(i, arrivals=arrivals)
    inside = torch.arange(dt[0, 0].numel(), device=device).view_as(dt[0, 0]) < seqlen
    u_v_x, row, dy_x = (torch.randn_like(dt) * inside for _ in range(3))
    none, s = dt.new_empty(0, *dt.shape), torch.zeros(*dt.shape[:3], 1, device=device)

    def run() -> tuple:
        return chunk_cumsum_bwd(i, u_v_x, none, torch.zeros_like(dt), s, row, none, arrivals, None, dy_x if D else None)

    ddt, dA, ddt_bias, dD = run()
    da = row.double().flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(dA.double(), (da * dt).sum((0, 2, 3)), rtol=1e-5, atol=1e-5 * seqlen**0.5)
    for got, wanted, expected in ((ddt_bias, bias, ddt.double().sum((0, 1))), (dD, D, dy_x.double().sum((0, 2, 3)))):
        if wanted:
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5 * seqlen**0.5)
        else:
            assert got is None
    for again, before in zip(run(), (ddt, dA, ddt_bias, dD), strict=True):
        assert before is None or torch.equal(again, before)
