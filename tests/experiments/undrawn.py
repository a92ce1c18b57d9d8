"""Trains a workload without what its model draws by itself, for which every process draws other numbers.

`python -m tests.experiments.undrawn WORKLOAD OUT` is one of several processes, and trains in one way after the other.
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from experiments import parallel
from experiments import train as training
from experiments.parallel import join_team
from experiments.training_run import Run, make_run
from experiments.workloads import get_workload, graph_model
from ssd.block import arguments
from tests.experiments.small import VARIANT

degree_orders = graph_model.degree_orders


def runs_of(workload: str) -> dict[str, Run]:
    """Of the preset `tiny`, by name: with the first mixer, and with the last while layers are computed again, of graphs in
    batches that are filled up.
    """
    known = get_workload(workload)
    short = {} if known.presets["tiny"].seqlen is None else {"seqlen": 32}
    runs = {}
    for again, mixer in ((False, known.mixers[0]), (True, known.mixers[-1])):
        runs[f"{mixer}-again" if again else mixer] = make_run(
            workload, variant=VARIANT if mixer == "ssd" else "auto", mixer=mixer, batch=4, accumulate=2, steps=3,
            checkpoint_activations=again, buckets=1 if again and known.fill_up else None, **short)
    return runs


def ways_of(workload: str) -> tuple[str, ...]:
    """Of `WAYS`: both that deal out samples, and one that cuts sequences where the workload has any."""
    return ("ddp", "fsdp", *{"mamba2": ("cp",), "hybrid": ("cp-fsdp",)}.get(workload, ()))


def train_undrawn(workload: str, out: Path, *ways: str) -> None:
    """All runs in each way, into the folders `out`/way/run."""
    with pytest.MonkeyPatch.context() as patch, join_team() as team:
        patch.setattr(arguments, "INTERPRETED", False)
        patch.setattr(training, "join_team", lambda way: nullcontext(replace(team, way=way)))
        patch.setattr(graph_model, "degree_orders", orders_by_place)
        presets = get_workload("mambavision").presets
        patch.setitem(presets, "tiny", replace(presets["tiny"], sizes=replace(presets["tiny"].sizes, drop_path=0.0)))
        for way in ways:
            for name, run in runs_of(workload).items():  # in a group for each layer, and in one group
                patch.setattr(parallel, "_GATHERED", 2**28 if run.checkpoint_activations else 1)
                training.train(run, out / way / name, Console(quiet=True), rows=out / way / name / "rows", way=way)


def orders_by_place(edge_index: Tensor, number: Tensor, noise: Tensor) -> Tensor:
    """`degree_orders` where nodes of one degree stay in order."""
    places = torch.arange(len(number), device=number.device) / len(number)
    return degree_orders(edge_index, number, places.expand_as(noise))


if __name__ == "__main__":
    train_undrawn(sys.argv[1], Path(sys.argv[2]), *ways_of(sys.argv[1]))
