"""The cost model against hand-computed values of the representative shapes (bf16; MB, GFLOP and microseconds)."""

from dataclasses import replace

import pytest

from ssd import cost

B1 = cost.Problem(batch=1, seqlen=4096, nheads=128, headdim=64, dstate=128, ngroups=8, chunk_size=256)
B4 = replace(B1, batch=4)
MAMBA_2_7B = replace(B1, batch=4, nheads=80, ngroups=1)
LONG = replace(MAMBA_2_7B, batch=1, seqlen=65536)
MAMBA_130M = replace(B1, batch=8, seqlen=2048, nheads=24, ngroups=1)


@pytest.mark.parametrize("stage, megabytes, gflop", [
    ("chunk_cumsum", 5, 0), ("chunk_state", 147, 8.6), ("state_passing", 105, 0), ("bmm_chunk", 50, 2.1),
    ("chunk_scan", 214, 21.5)])
def test_forward_stages(stage, megabytes, gflop):
    c = cost.count_forward_stages(B1)[stage]
    assert round(c.bytes / 1e6) == megabytes
    assert round(c.flops / 1e9, 1) == gflop


@pytest.mark.parametrize("problem, forward_us, backward_us", [
    (B1, 36, 55), (B4, 142, 222), (MAMBA_2_7B, 81, 123), (LONG, 327, 495), (MAMBA_130M, 26, 40)])
def test_byte_floors(problem, forward_us, backward_us):
    for ideal, expected in ((cost.count_ideal_forward, forward_us), (cost.count_ideal_backward, backward_us)):
        # The expected values were rounded to whole microseconds after a run whose copy reached 4.27 to 4.3 TB/s.
        assert cost.H200.compute_floors_us(ideal(problem))[0] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("chunk_size, forward, backward, exps", [(256, 34, 69, 23), (128, 28, 56, 14), (64, 25, 50, 9)])
def test_compute_floors(chunk_size, forward, backward, exps):
    p = replace(B1, chunk_size=chunk_size)
    _, forward_us, exps_us = cost.H200.compute_floors_us(cost.count_ideal_forward(p))
    _, backward_us, _ = cost.H200.compute_floors_us(cost.count_ideal_backward(p))
    assert (round(forward_us), round(backward_us), round(exps_us)) == (forward, backward, exps)


@pytest.mark.parametrize("stage, measured_mb", [("chunk_scan_dstates", 563), ("chunk_scan_dC", 523), ("ddA_cumsum", 703)])
def test_backward_stages_match_counters(stage, measured_mb):
    """DRAM counters of upstream's launches on 8b-b4, for the stages that read and write what ours do."""
    assert cost.count_backward_stages(B4)[stage].bytes / 1e6 == pytest.approx(measured_mb, rel=0.04)


def test_element_sizes():
    fp32 = replace(B1, itemsize=4)
    assert cost.count_ideal_forward(fp32).bytes == 2 * cost.count_ideal_forward(B1).bytes
    assert cost.count_ideal_backward(fp32).bytes == 2 * cost.count_ideal_backward(B1).bytes
    fp32_states = cost.count_forward_stages(replace(B1, state_itemsize=4))["chunk_scan"]
    assert fp32_states.bytes - cost.count_forward_stages(B1)["chunk_scan"].bytes == 2 * B1.S


def test_gate_adds_its_stage_and_bytes():
    gated = replace(B1, gated=True)
    assert "chunk_scan_dz" in cost.count_backward_stages(gated)
    assert "chunk_scan_dz" not in cost.count_backward_stages(B1)
    assert cost.count_ideal_forward(gated).bytes - cost.count_ideal_forward(B1).bytes == 2 * B1.X
    assert cost.count_ideal_backward(gated).bytes - cost.count_ideal_backward(B1).bytes == 4 * B1.X


def test_modes():
    both = cost.count_ideal_forward(B1) + cost.count_ideal_backward(B1)
    assert cost.ideal(B1, "fwd_bwd") == both
    assert cost.ideal(B1, "fwd") == cost.ideal(B1, "fwd_train") == cost.count_ideal_forward(B1)
    with pytest.raises(ValueError, match="mode: got 'sideways'"):
        cost.ideal(B1, "sideways")


def test_vector_flops_by_hand():
    """Of one head at headdim 2, dstate 4, one chunk of 16 tokens in one tile."""
    p = cost.Problem(batch=1, seqlen=16, nheads=1, headdim=2, dstate=4, ngroups=1, chunk_size=16)
    stages = cost.count_forward_stages(p) | cost.count_backward_stages(p)
    pairs = 16 * 16
    assert stages["bmm_chunk"].vector == 0
    assert stages["state_passing"].vector == 2 * 8
    assert stages["chunk_scan"].vector == 3 * pairs + 3 * 32
    assert stages["ddA_cumsum"].vector == 6 * pairs
    assert stages["bmm_bwd"].vector == 2 * 64
    assert (cost.Cost(vector=1.0) + cost.Cost(vector=2.0)).vector == 3.0
