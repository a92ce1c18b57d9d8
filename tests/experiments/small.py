"""Workloads small enough that a test trains them."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiments import checkpoints
from experiments.training_run import Run, make_run
from experiments.workloads.graph_model import GraphSizes
from experiments.workloads.graphs import PEPTIDES_FUNC
from experiments.workloads.language_model import LanguageSizes
from experiments.workloads.vision_model import VisionSizes

# the torch form's cumulative sums on a GPU are not the same bits twice
VARIANT = "baseline" if torch.cuda.is_available() else "torch"

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, where more happens")
needs_graphs = pytest.mark.skipif(find_spec("torch_geometric") is None, reason="torch_geometric is not installed")


def sizes(pattern: str, **other) -> LanguageSizes:
    return LanguageSizes(**{"d_model": 32, "pattern": pattern, "vocab_size": 256, "d_state": 16, "headdim": 16, "ngroups": 2,
                            "chunk_size": 16, "heads": 4, "kv_heads": 2, "attention_headdim": 8} | other)


def vision_sizes(**other) -> VisionSizes:
    return VisionSizes(**{"dim": 8, "in_dim": 8, "depths": (1, 1, 2, 2), "heads": (2, 4), "drop_path": 0.1, "image_size": 32,
                          "windows": (2, 1), "classes": 10, "headdim": 8, "augment": False} | other)


def graph_sizes(**other) -> GraphSizes:
    data = replace(PEPTIDES_FUNC, nodes=(60, 80))
    return GraphSizes(**{"data": data, "d_model": 16, "layers": 2, "headdim": 8, "chunk_size": 16, "walks": 2,
                         "hops": 2} | other)


def read_log(out: Path, value: str = "loss") -> list[float]:
    """What a run in that folder logged of every step."""
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    return [entry[value] for entry in entries]


def read_saved(out: Path) -> dict[str, torch.Tensor]:
    """The tensors of its last checkpoint."""
    return checkpoints.read_tensors(checkpoints.latest(out / "checkpoints"))


def small_run(workload: str = "mamba2", preset: str = "small", **settings) -> Run:
    return make_run(workload, preset, **{"variant": VARIANT, "mixer": "ssd", "steps": 6} | settings)
