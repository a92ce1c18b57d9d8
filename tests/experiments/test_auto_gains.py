"""What "auto" takes beside mamba_ssm and the best of ours: read from made rows, and held to its bounds in committed ones."""

from dataclasses import asdict, replace

import pytest

from experiments import auto_gains, record
from experiments.shapes import NAMED
from ssd import Options

NOTHING, KEEP = replace(Options(), save_states=False), Options()
NAME = NAMED[0].name


def make_row(variant, us, options=KEEP, second=0, mode="bwd", **other):
    return {"bench": "ssd", "variant": variant, "shape": NAME, "mode": mode, "dtype": "bf16", "git_sha": "a", "gpu": "a GPU",
            "graph_p50_us": us, "options": None if variant == "mamba_ssm" else asdict(options),
            "time": f"2026-01-01T00:00:{second:02}+00:00", **other}


def read(*rows):
    return auto_gains.read_calls(rows, "named")


def test_a_run_is_compared_within_itself():
    """At the better chunk size of each, with what keeps as much; the last run counts."""
    slow = make_row("auto", 900.0), make_row("mamba_ssm", 100.0), make_row("persistent", 100.0, NOTHING)
    last = (make_row("auto", 60.0, second=20), make_row("auto", 50.0, second=20), make_row("mamba_ssm", 220.0, second=21),
            make_row("mamba_ssm", 200.0, second=22),
            make_row("persistent", 10.0, KEEP, 22), make_row("fused", 40.0, NOTHING, 23))
    assert read(*slow, *last) == [auto_gains.Call(f"{NAME} bwd", 4.0, pytest.approx(0.25))]


@pytest.mark.parametrize("apart", [{"git_sha": "b"}, {"second": 9}])
def test_runs_are_told_apart(apart):
    assert read(make_row("auto", 50.0), make_row("mamba_ssm", 200.0, **apart)) == []
    (call,) = read(make_row("auto", 50.0), make_row("mamba_ssm", 200.0), make_row("fused", 40.0, NOTHING, **apart))
    assert call.over is None, "the other run has no row of auto"


def test_a_forward_keeps_nothing_by_itself():
    rows = make_row("auto", 50.0, mode="fwd"), make_row("mamba_ssm", 60.0, mode="fwd"), make_row("fused", 40.0, mode="fwd")
    assert read(*rows)[0].over == pytest.approx(0.25)


@pytest.mark.parametrize("other", [
    {"options": replace(KEEP, keep_bytes=9)}, {"options": replace(KEEP, exp2=False)}, {"dtype": "fp16"}, {"shape": "sweep-64"},
    {"us": None}, {"mode": "fwd_train"}])
def test_what_is_no_call_of_auto_as_it_comes(other):
    assert read(make_row("mamba_ssm", 60.0), make_row(**{"variant": "auto", "us": 50.0} | other)) == []


def test_the_table_names_the_worst():
    rows = [make_row(name, us, mode=mode) for mode, auto in (("fwd", 80.0), ("bwd", 50.0))
            for name, us in (("auto", auto), ("mamba_ssm", 100.0))]
    assert f"a GPU:\n\n{auto_gains._HEAD}| named | 21 | 2 | 1.25 | {NAME} fwd | 0 |  |  |\n" == auto_gains.tabulate(rows)


def test_auto_is_never_slower_than_mamba_ssm_nor_far_from_the_best():
    """In all committed rows; on an H200 each named shape, workload and model was measured beside both."""
    by_gpu = record.group_by(record.read(record.read_gpus(), bench="ssd"), lambda row: row["gpu"])
    calls = {(gpu, group): auto_gains.read_calls(rows, group) for gpu, rows in by_gpu.items() for group in auto_gains.GROUPS}
    assert all(call.gain >= 1 for of in calls.values() for call in of)
    assert all(call.over is None or call.over <= 0.05 for of in calls.values() for call in of)
    beside = [[call for call in calls["NVIDIA H200", group] if call.over is not None] for group in auto_gains.GROUPS]
    assert [len(of) for of in beside] == [21, 9, 144]
