"""The bench of context parallelism, but for its times: the calls run on four ranks, and rows have known keys."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from rich.console import Console

from experiments import context, record, timing
from experiments.parallel import make_single
from experiments.shapes import Shape
from tests.distributed.rank_calls import call_benched
from tests.experiments.small import without_gpu

SMALL = Shape("small", batch=1, seqlen=16, nheads=4, headdim=8, dstate=8, ngroups=4)


def test_every_way_runs(ranks):
    names = ["parts", "alone", "all_to_all"] * 2 + ["parts", "alone"] * 2
    assert ranks.run(4, call_benched, SMALL) == [names] * 4


@pytest.mark.parametrize("part", context.PARTS)
def test_a_row(part, monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "interleave", lambda calls, *_: dict.fromkeys(calls, (90.0, 100.0, 110.0)))
    monkeypatch.setattr(timing, "measure_peak_mib", lambda call: 1.0)
    monkeypatch.setattr(timing, "capture", lambda call: call)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(context, "has_window", lambda group: True)
    team = SimpleNamespace(rank=0, size=2, device="cpu", max_over=lambda value: value, measure_link=lambda: 400.0)
    ways = ("parts", "alone", "all_to_all") if part == "scan" else ("parts", "alone")
    row = context._measure(SMALL, part, "fwd", "auto", "bf16", dict.fromkeys(ways), team, 2, 1)
    record.append(row, tmp_path)
    said = f"{part} fwd, 16 tokens on 2 GPUs: 100 us in a CUDA graph, 1.00x"
    assert row["efficiency"] == 0.5 and context._describe(row).startswith(said)


@without_gpu
def test_without_two_gpus_nothing_is_timed(tmp_path):
    with pytest.raises(ValueError, match=r"got 1 process on cpu, expected one for each of two or more GPUs.*Nothing was timed"):
        context.run(["scan"], [16], ["fwd"], "auto", "bf16", make_single("cp"), tmp_path, Console(quiet=True))
