"""What a training run is made of: its settings, all of them, so that two runs with the same are the same run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ssd import variant_names

from .workloads import get_workload

DTYPES = ("fp32", "bf16")
_AT_LEAST = {"steps": 1, "batch": 1, "seqlen": 2, "accumulate": 1, "warmup": 0, "save_every": 1, "clip": 0, "weight_decay": 0,
             "seed": 0}


@dataclass(frozen=True)
class Run:
    """What is trained, and how. `run_of` makes one of a preset; `dataclasses.replace` derives another.

    Attributes:
        workload, preset: see `experiments.workloads`.
        variant: of the SSD, see `ssd.ssd_chunk_scan`.
        data: "synthetic", or where the workload's data are.
        steps: of the optimizer.
        batch, seqlen: rows of a micro-batch, tokens of a row.
        accumulate: micro-batches whose mean gradient makes a step.
        lr, warmup: the highest learning rate, and the steps after which it is reached; see `train.learning_rate`.
        clip: the gradient's largest norm; 0 for none.
        weight_decay: of AdamW, on matrices and filters alone.
        dtype: "fp32", or "bf16" for autocast; weights are fp32.
        checkpoint_activations: compute layers again in the backward.
        compile: by torch.compile.
        seed: of weights and data.
        save_every: steps between checkpoints.

    Raises:
        ValueError: naming the option, what came and what is accepted.
    """

    workload: str
    preset: str
    variant: str
    data: str
    steps: int
    batch: int
    seqlen: int
    accumulate: int
    lr: float
    warmup: int
    clip: float
    weight_decay: float
    dtype: str
    checkpoint_activations: bool
    compile: bool
    seed: int
    save_every: int

    def __post_init__(self):
        presets = get_workload(self.workload).presets
        for name, known in (("preset", presets), ("variant", (*variant_names(), "auto")), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{option(name)}: got {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name, least in _AT_LEAST.items():
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{option(name)}: got {getattr(self, name)}, expected at least {least}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr: got {self.lr}, expected more than 0")
        if self.warmup > self.steps:
            raise ValueError(f"--warmup: got {self.warmup}, expected at most --steps, {self.steps}")


def run_of(workload: str, preset: str = "tiny", *, variant: str = "auto", data: str = "synthetic", steps: int = 100,
           batch: int | None = None, seqlen: int | None = None, accumulate: int = 1, lr: float | None = None,
           warmup: int | None = None, clip: float = 1.0, weight_decay: float = 0.1, dtype: str = "fp32",
           checkpoint_activations: bool = False, compile: bool = False, seed: int = 0, save_every: int = 1000) -> Run:
    """A run whose batch, seqlen and lr are the preset's unless given, and warmup a tenth of the steps; else as `Run`."""
    presets = get_workload(workload).presets
    if preset not in presets:
        raise ValueError(f"--preset: got {preset!r}, expected one of {', '.join(presets)}")
    its = presets[preset]
    return Run(workload, preset, variant, data, steps, its.batch if batch is None else batch,
               its.seqlen if seqlen is None else seqlen, accumulate, its.lr if lr is None else lr,
               steps // 10 if warmup is None else warmup, clip, weight_decay, dtype, checkpoint_activations, compile, seed,
               save_every)


def option(field: str) -> str:
    """The command line's name of a setting."""
    return f"--{field.replace('_', '-')}"
