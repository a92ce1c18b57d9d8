"""What a workload is, and their names; one is imported when it is asked for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..known_names import refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from ssd.cost import Problem

    from ..training_run import Run

_MODULES = {name: f"{__package__}.{name}" for name in ("mamba2", "hybrid", "mambavision", "graphmamba")}


@dataclass(frozen=True)
class Preset:
    """Sizes of a model, and how it is trained unless a run says otherwise.

    Attributes:
        sizes: what the workload's `build` and `dataset` take.
        batch: samples of a micro-batch.
        lr: the highest learning rate.
        seqlen: tokens of a sample; None where samples are as long as they are.
        optimizer, weight_decay: see `training_run.Run`.
    """

    sizes: Any
    batch: int
    lr: float
    seqlen: int | None = None
    optimizer: str = "adamw"
    weight_decay: float = 0.1


@dataclass(frozen=True)
class Workload:
    """A model with its data and its loss.

    Attributes:
        presets: by name; "tiny" trains on a CPU.
        build: (sizes, variant, checkpoint_activations) to a model with fp32 weights, on the current default device.
        dataset: a run to samples by number, without end: the n-th is the same whoever asks, and when.
            Its `floor` is a loss, in nats, that no model gets below; None where nobody knows. Its `samples` are those of an
            epoch; None of made-up data.
        loss: (model, batch) to the mean loss in nats.
        terms: a batch to how many terms that mean has, by which means of parts are weighted; unless given, they weigh the same.
        scans: (sizes, batch, seqlen) to the sizes of the SSD calls that a forward makes; unless given nobody knows.
        prepare: (model, batch) to the batch that `loss` takes, where the host draws how: it is not captured in a CUDA graph.
        collate: samples to a batch, tensors by name; unless given as torch's DataLoader does it.
        count: a batch to the numbers that its size depends on; None: batches have one size.
        fill_up: (run, batch, counts) to the batch in one of few sizes, see `training_run.Run.buckets`, with room for counts, or
            unless given for what it has; None as `count`.
        unit: what speed is counted in: the tokens of samples, or samples by another name.
        mixers: what may mix tokens in place of the SSD, the first unless a run says otherwise; where there are several, `sizes`
            have a field `mixer`.
    """

    name: str
    presets: Mapping[str, Preset]
    build: Callable[[Any, str, bool], nn.Module]
    dataset: Callable[[Run], Dataset]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    terms: Callable[[dict[str, Tensor]], Tensor] | None = None
    scans: Callable[[Any, int, int | None], list[Problem]] | None = None
    prepare: Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]] | None = None
    collate: Callable[[list[Any]], dict[str, Tensor]] | None = None
    count: Callable[[dict[str, Tensor]], list[int]] | None = None
    fill_up: Callable[..., dict[str, Tensor]] | None = None
    unit: str = "tokens"
    mixers: tuple[str, ...] = ("ssd",)


def workload_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def preset_names(workload: str) -> tuple[str, ...]:
    """Of `get_workload(workload).presets`; from its source alone unless it was imported before, which takes torch's seconds.

    Raises:
        ValueError: no such workload.
    """
    refuse_unknown("--workload", workload, _MODULES)
    if _MODULES[workload] in sys.modules:
        return tuple(get_workload(workload).presets)
    source = ast.parse(Path(__file__).with_name(f"{workload}.py").read_text())
    presets = next(node.value for node in ast.walk(source) if isinstance(node, ast.keyword) and node.arg == "presets")
    return tuple(map(ast.literal_eval, presets.keys))


def get_workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ValueError: no such name; the message lists the known ones.
    """
    refuse_unknown("--workload", name, _MODULES)
    return import_module(_MODULES[name]).WORKLOAD
