"""Each Hopper kernel alone against the stages that it merges, as a whole and by head: in the executor, or on such a GPU."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from fused import hopper
from fused.hopper import BLOCK_M, count_pairs, count_parts, describe, describe_inputs, describe_states
from fused.schedule import deal_two_level
from ssd.kernels.arguments import cdiv
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.types import SPAN
from tests.executor import Executor
from tests.fused import test_hopper
from tests.fused.hopper_on_cpu import KERNELS
from tests.fused.test_kernels import OUTPUTS, STATES, compute_segments, round_dCB
from tests.inputs import GPU, HALF, Shape
from tests.stage_values import Values, assert_stages, name_results

pytestmark = [pytest.mark.skipif(GPU and not test_hopper.GPU, reason="needs a GPU of compute capability 9, or none"),
              pytest.mark.usefixtures("poison")]
# Two groups of a pair of heads and a lone one; tiles that are not full; four sub-chunks.
SHAPE = Shape(2, 3 * BLOCK_M + 22, 6, 56, 2, 48)
GRADIENTS = ("chunk_scan_dstates", "state_passing_bwd")
over_dstate = pytest.mark.parametrize("dstate", (48, 200), ids=("one part", "two parts"))


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    """As they are on a GPU."""
    with nullcontext() if GPU else Executor(*KERNELS).install():
        yield


def draw(case, device, dstate, every=1):
    """every: sub-chunks in a chunk."""
    return Values.draw(case, HALF, device, replace(SHAPE, dstate=dstate, chunk_size=every * BLOCK_M))


def deal(i, rows, segment, parts=1, blocks=3):
    """Runs of `segment` sub-chunks."""
    return deal_two_level(rows, count_pairs(i) * parts, cdiv(i.seqlen, BLOCK_M), segment, blocks, i.x.device).sequences


@over_dstate
def test_scan(dstate, device):
    """By hopper_wide_scan where dstate has two parts. It keeps the state before each sub-chunk."""
    v = draw("one document", device, dstate)
    runs = deal(v.inputs, 2, cdiv(v.inputs.seqlen, BLOCK_M))
    call = hopper._Call.of(v.inputs, True)
    final_states, kept = call.new_final_states(), torch.empty_like(v.prev_states)
    call.scan(runs, call.initial_states, final_states=final_states, kept=kept)
    assert_stages(v, name_results("out y final_states prev_states", call.out, call.y, final_states, kept), *STATES, *OUTPUTS)


@over_dstate
def test_scan_from_states(dstate, device):
    """A run of three sub-chunks from each state that is given, that before a chunk."""
    v = draw("every option", device, dstate, 3)
    call = hopper._Call.of(v.inputs, True)
    call.scan(deal(v.inputs, 2, 3), starts=v.prev_states, every=v.inputs.chunk_size)
    assert_stages(v, name_results("out y", call.out, call.y), *OUTPUTS)


@over_dstate
@pytest.mark.parametrize(("case", "every", "back"), [
    ("every option", 1, False), ("one document", 3, False), ("one document", 1, True)],
    ids=("every state", "few states", "backwards"))
def test_states(case, every, back, dstate, device):
    """With walks backwards in the same launch, which alone leave the state at their end: its gradient."""
    from fused.kernels.hopper.states import hopper_states

    v = draw(case, device, dstate, every)
    i, rows = v.inputs, 4 if back else 2
    tokens = (*describe_inputs(i.x, i.B), *(describe_inputs(v.dy, i.C) if back else ()))
    states = torch.empty_like(v.prev_states).repeat(rows // 2, 1, 1, 1, 1)
    ends = torch.empty_like(v.dfinal_states)
    runs = deal(i, rows, 4, count_parts(dstate))
    steps = chunk_cumsum(replace(i, chunk_size=BLOCK_M), apart=True, lets_next=True)
    hopper_states(i, tokens, describe_states(states), *steps, runs, (i.initial_states, v.dfinal_states), None, None, ends, 2,
                  i.chunk_size)
    if back:
        got, stages = name_results("prev_states dstates dinitial_states", *states.split(2), ends), (*STATES, *GRADIENTS)
    else:
        got, stages = name_results("prev_states final_states", states, ends), STATES
    assert_stages(v, got, *stages)


@over_dstate
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_pieces(dstate, dtype, device):
    """(28): from zeros, a piece leaves its own part and the factor of the state before it. Chunks are the pieces, and those
    that are walked backwards come in that order.
    """
    from fused.kernels.hopper.pieces import hopper_pieces

    v, parts = draw("one document", device, dstate, 2), count_parts(dstate)
    i = v.inputs
    runs = deal(i, 4, 2, parts, None)
    runs[:, 0, 4] = torch.arange(len(runs), device=device)
    tokens = (*describe_inputs(i.x, i.B), *describe_inputs(v.dy, i.C))
    steps = chunk_cumsum(replace(i, chunk_size=BLOCK_M), apart=True, lets_next=True)
    ends, factors = hopper_pieces(i, tokens, *steps, len(runs), runs, 2, dtype=dtype)
    p, n = torch.arange(64, device=device), torch.arange(ends.shape[2] // 64 - 1, device=device)
    each = 16 // ends.itemsize  # of a thread's elements together
    rows = p // 16 * 32 * each + p % 8 * 4 * each + p % 16 // 8 * 2
    columns = n // (2 * each) * 128 * each + n % 8 // 2 * each + n % (2 * each) // 8 * 4 + n % 2
    exponents = ends[..., -64:] if dtype == torch.float16 else torch.zeros(64, device=device)
    ends = ends[..., rows[:, None] + columns].float() * exponents.float().exp2()[..., None]
    heads = i.nheads // i.ngroups  # of a group, whose pieces have a place more for the lone head
    ends = ends.view(2, 2, i.nchunks, i.ngroups, -1, parts, 2, *ends.shape[2:]).movedim(5, -2)  # [..., pair, 2, P, part, N]
    ends = ends.flatten(-2).flatten(4, 5)[:, :, :, :, :heads, :i.headdim, :dstate].flatten(3, 4)
    factors = factors.view(2, 2, i.nchunks, i.ngroups, -1, parts, 2).movedim(5, -1).flatten(4, 5)[..., :heads, :].flatten(3, 4)

    def compute_backwards(at):
        at.factors = at.factors[..., None].expand(-1, -1, -1, parts)
        at.back_ends, at.back_factors = at.dprev_states.flip(1), at.factors.flip(1)

    assert_stages(v, name_results("ends back_ends factors back_factors", *ends, *factors), "chunk_state", compute_segments,
                  "chunk_scan_dstates", compute_backwards)


def add_sums(at):
    at.dB, at.dC = at.dB + at.dB_pairs, at.dC + at.dC_pairs
    at.s = at.dA_cumsum[..., -1].exp() * (at.prev_states * at.dstates).sum((-2, -1)).transpose(1, 2)
    at.output, at.dy_x = at.r + at.row, (at.dy * at.x).sum(-1).permute(0, 3, 1, 2)


GROUP = ("bmm_chunk", "chunk_scan_chunk_state_dx", "chunk_state_dB", "chunk_scan_dC", "chunk_scan_dCB", round_dCB, "bmm_bwd",
         "sum_pairs", add_sums)


@over_dstate
def test_group(dstate, device):
    """Heads of a group in two splits. Where dstate has two parts, the second launch adds the sums of the first."""
    from fused.kernels.hopper.group import hopper_group

    v = draw("plain", device, dstate)
    i = v.inputs
    dB, dC = (torch.empty(2, *t.shape, device=device) for t in (i.B, i.C))
    dx = torch.empty_like(v.dy)
    (x, B), (dy, C) = describe_inputs(i.x, i.B), describe_inputs(v.dy, i.C)
    sums = hopper_group(i, x, dy, B, C, describe_states(v.prev_states), describe_states(v.dstates), describe(dx), v.dt,
                        v.dA_cumsum, dB, dC, 3)

    assert_stages(v, name_results("dx dB dC u_v_x q output col dy_x s", dx, dB.sum(0), dC.sum(0), *sums), *GROUP)


def test_spans(device):
    """hopper_ends, with a group's heads in two splits, and hopper_pairs, whose first split adds to the second of these."""
    from fused.kernels.hopper.ends import hopper_ends
    from fused.kernels.hopper.pairs import hopper_pairs

    v = draw("plain", device, 200, SPAN // BLOCK_M)
    i, states = v.inputs, (describe_states(v.prev_states), describe_states(v.dstates))
    dB, dC = torch.empty(2, 3, *i.B.shape, device=device)
    dx = torch.empty_like(v.dy)
    (x, B), (dy, C) = describe_inputs(i.x, i.B), describe_inputs(v.dy, i.C)
    v_x, r, s = hopper_ends(i, x, dy, B, C, *states, v.dt, v.dA_cumsum, v.prev_states.shape[1], dx, dB[:2], dC[:2], 3)
    sums = hopper_pairs(i, x, dy, describe(B.base), describe(C.base), describe(dx), v.dt, v.dA_cumsum, v_x, r[-1], dB[1:],
                        dC[1:], dB[1], dC[1], 3)

    def take_together(at):
        at.net, at.s = at.output - at.col, at.s[..., None]

    got = name_results("dx dB dC u_v_x q net dy_x s", dx, dB.sum(0), dC.sum(0), *sums, s.sum(-1, keepdim=True))
    assert_stages(v, got | {"net": got["net"] + r.sum(0)}, *GROUP, take_together)
