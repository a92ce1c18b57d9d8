"""Utilisation and bandwidth on numbers that were computed by hand."""

import pytest

from experiments.characterize import definitions
from experiments.characterize.gpus import GPUS, find
from tests.experiments.rows import kernel_row, ssd_row, write

# 48 MB in 20 us are 2400 GB/s; 9.6 MB in 80 us are 120.
SLOW = {"ncu_us": 80.0, "dram_bytes": 9.6e6, "dram_pct": 2.5}


@pytest.fixture
def call(tmp_path):
    write(tmp_path, kernel_row("chunk_state_kernel"), kernel_row(**SLOW),
          ssd_row(graph_p50_us=120.0, copy_gbps=4000.0), ssd_row(graph_p50_us=1.0, chunk_size=64))
    (found,) = definitions.read_calls(tmp_path)
    return found


def test_three_utilisations_against_three_peaks(call):
    found = definitions.compute_utilisations(call)
    assert list(found) == ["ncu", "data sheet", "copy"]
    # U: (50 + 2.5) / 2; W: 57.6 MB in 100 us = 576 GB/s of 4800; G: in 120 us, 480 GB/s
    assert found["data sheet"] == pytest.approx((26.25, 12.0, 10.0))
    assert found["copy"] == pytest.approx((31.5, 14.4, 12.0))
    assert found["ncu"][:2] == pytest.approx((26.25, 12.0)) and found["ncu"].G is None


def test_bandwidth_and_amplification(call):
    # 8b-b4, ideal forward: 4 X + 4 K + 2 D bytes = 608,174,080
    assert call.ideal.bytes == 4 * 134_217_728 + 4 * 16_777_216 + 2 * 2_097_152
    assert definitions.compute_amplification(call) == pytest.approx(57.6e6 / 608_174_080)
    assert definitions.gbps(call.dram_bytes, call.wall_us) == pytest.approx(480.0)
    assert definitions.compute_speed_of_light(call) == pytest.approx(608_174_080 / 4000e9 / 120e-6)


def test_time_of_another_commit_only_where_there_is_none_of_the_same(tmp_path):
    later = {"git_sha": "1" * 40, "time": "2027-01-01T00:00:00+00:00"}
    write(tmp_path, kernel_row(), ssd_row(graph_p50_us=300.0, **later))
    (call,) = definitions.read_calls(tmp_path)
    assert (call.wall_us, call.same_commit) == (300.0, False)
    write(tmp_path, ssd_row(graph_p50_us=None, p50_us=200.0))
    (call,) = definitions.read_calls(tmp_path)
    assert (call.wall_us, call.same_commit) == (200.0, True)


def test_without_a_time(tmp_path):
    write(tmp_path, kernel_row(gpu="Some GPU"))
    (call,) = definitions.read_calls(tmp_path)
    assert list(definitions.compute_utilisations(call)) == ["ncu"]
    assert call.wall_us is None and definitions.compute_speed_of_light(call) is None


def test_vector_flops():
    assert definitions.count_vector_flops(kernel_row(fadds=1, fmuls=10, ffmas=100)) == 211
    assert definitions.count_vector_flops(kernel_row(fadds=1, fmuls=10)) is None


def test_gpus():
    """Clocks that the data sheets' rates imply; names as torch gives them."""
    assert find("NVIDIA H100 80GB HBM3") is GPUS["h100"] and find("NVIDIA A100-SXM4-80GB") is GPUS["a100"]
    assert find("NVIDIA GeForce RTX 4090") is GPUS["rtx_4090"]
    assert find("Radeon") is None and find(None) is None
    assert GPUS["h200"].clock_ghz == pytest.approx(1.98, abs=0.005) and GPUS["a100"].clock_ghz == pytest.approx(1.41, abs=0.005)
    assert GPUS["h100"].exps_per_s == pytest.approx(16 * 132 * 1.98e9, rel=0.002)
