"""What a workload is, and their names; one is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

_MODULES = {name: f"{__package__}.{name}" for name in ("mamba2", "hybrid")}


@dataclass(frozen=True)
class Preset:
    """Sizes of a model, and how it is trained unless a run says otherwise.

    Attributes:
        sizes: what the workload's `build` and `dataset` take.
        batch: rows of a micro-batch.
        seqlen: tokens of a row.
        lr: the highest learning rate.
    """

    sizes: Any
    batch: int
    seqlen: int
    lr: float


@dataclass(frozen=True)
class Workload:
    """A model with its data and its loss.

    Attributes:
        presets: by name; "tiny" trains on a CPU.
        build: (sizes, variant, checkpoint_activations) to a model with fp32 weights, on the current default device.
        dataset: (data, sizes, seqlen, seed) to samples by number, without end: the n-th is the same whoever asks, and when.
            Its `floor` is a loss, in nats, that no model gets below; None where nobody knows.
        loss: (model, batch) to the mean loss in nats; a batch is what torch's DataLoader makes of samples.
    """

    name: str
    presets: Mapping[str, Preset]
    build: Callable[[Any, str, bool], nn.Module]
    dataset: Callable[[str, Any, int, int], Dataset]
    loss: Callable[[nn.Module, Any], Tensor]


def workload_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def get_workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ValueError: no such name; the message lists the known ones.
    """
    if name not in _MODULES:
        raise ValueError(f"--workload: got {name!r}, expected one of {', '.join(_MODULES)}")
    return import_module(_MODULES[name]).WORKLOAD
