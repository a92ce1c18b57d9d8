"""What a training run is made of: its settings, all of them, so that two runs with the same are the same run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ssd import Options, variant_names
from ssd.registry import is_peer

from .workloads import get_workload

DTYPES = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "lamb")
_AT_LEAST = {"steps": 1, "batch": 1, "seqlen": 2, "accumulate": 1, "warmup": 0, "save_every": 0, "clip": 0, "weight_decay": 0,
             "seed": 0}


@dataclass(frozen=True)
class Run:
    """What is trained, and how. `run_of` makes one of a preset; `dataclasses.replace` derives another.

    Attributes:
        workload, preset: see `experiments.workloads`.
        variant: of the SSD, see `ssd.ssd_chunk_scan`.
        mixer: one of the workload's, see `workloads.Workload`.
        data: "synthetic", or where the workload's data are.
        tokenizer: of text; "bytes", or as in `workloads.hub_text.load_tokenizer`.
        documents: documents that share a row see nothing of each other; else it is taken for one, as most pretraining does.
        steps: of the optimizer.
        batch, seqlen: samples of a micro-batch, of which each GPU has its part; tokens of a sample, None where samples are as
            long as they are.
        accumulate: micro-batches whose mean gradient makes a step.
        lr, warmup: the highest learning rate, and the steps after which it is reached; see `train.learning_rate`.
        clip: the gradient's largest norm; 0 for none.
        optimizer: "adamw", or "lamb", which is timm's.
        weight_decay: of the optimizer, on matrices and filters alone.
        dtype: "fp32", or "bf16" for autocast; weights are fp32.
        checkpoint_activations: compute layers again in the backward.
        compile: by torch.compile.
        seed: of weights and data.
        save_every: steps between checkpoints, of which the last step's is one; 0 for none but a signal's.

    Raises:
        ValueError: naming the option, what came and what is accepted.
    """

    workload: str
    preset: str
    variant: str
    mixer: str
    data: str
    tokenizer: str
    documents: bool
    steps: int
    batch: int
    seqlen: int | None
    accumulate: int
    lr: float
    warmup: int
    clip: float
    optimizer: str
    weight_decay: float
    dtype: str
    checkpoint_activations: bool
    compile: bool
    seed: int
    save_every: int

    def __post_init__(self):
        workload = get_workload(self.workload)
        for name, known in (("preset", workload.presets), ("variant", (*variant_names(), "auto")), ("mixer", workload.mixers),
                            ("optimizer", OPTIMIZERS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{option(name)}: got {getattr(self, name)!r}, expected one of {', '.join(known)}")
        if self.seqlen is not None and workload.presets[self.preset].seqlen is None:
            raise ValueError(f"--seqlen: got {self.seqlen}, expected none: {workload.unit} of {self.workload} are as large as "
                             "they are")
        for name, usual in (("tokenizer", "bytes"), ("documents", True)):
            if getattr(self, name) != usual and workload.unit != "tokens":
                raise ValueError(f"{option(name)}: got {getattr(self, name)!r}, expected none: {self.workload} reads no text")
        for name, least in _AT_LEAST.items():
            if getattr(self, name) is not None and not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{option(name)}: got {getattr(self, name)}, expected at least {least}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr: got {self.lr}, expected more than 0")
        if self.warmup > self.steps:
            raise ValueError(f"--warmup: got {self.warmup}, expected at most --steps, {self.steps}")

    def identity(self, options: Options | None = None) -> dict[str, Any]:
        """The keys of a row that say what was trained; options: the default ones unless given. A peer has none."""
        options = None if is_peer(self.variant) else asdict(options or Options())
        return {"variant": self.variant, "options": options, "batch": self.batch, "seqlen": self.seqlen, "dtype": self.dtype,
                "workload": self.workload, "preset": self.preset, "run": asdict(self)}

    @property
    def sizes(self) -> Any:
        """Of the model, mixer included."""
        workload = get_workload(self.workload)
        sizes = workload.presets[self.preset].sizes
        return replace(sizes, mixer=self.mixer) if len(workload.mixers) > 1 else sizes

    @property
    def units(self) -> int:
        """What a step takes, counted in the workload's unit."""
        return self.batch * self.accumulate * (self.seqlen or 1)


def run_of(workload: str, preset: str = "tiny", *, variant: str = "auto", mixer: str | None = None, data: str = "synthetic",
           tokenizer: str = "bytes", documents: bool = True, steps: int = 100, batch: int | None = None,
           seqlen: int | None = None, accumulate: int = 1, lr: float | None = None, warmup: int | None = None,
           clip: float = 1.0, optimizer: str | None = None, weight_decay: float | None = None, dtype: str = "fp32",
           checkpoint_activations: bool = False, compile: bool = False, seed: int = 0, save_every: int = 1000) -> Run:
    """A run as `Run` has it. Unless given, what a preset has is the preset's, warmup a tenth of the steps, and the mixer the
    workload's first.
    """
    known = get_workload(workload)
    if preset not in known.presets:
        raise ValueError(f"--preset: got {preset!r}, expected one of {', '.join(known.presets)}")
    its = known.presets[preset]
    given = {"batch": batch, "seqlen": seqlen, "lr": lr, "optimizer": optimizer, "weight_decay": weight_decay}
    return Run(workload=workload, preset=preset, variant=variant, mixer=known.mixers[0] if mixer is None else mixer, data=data,
               tokenizer=tokenizer, documents=documents, steps=steps, accumulate=accumulate,
               warmup=steps // 10 if warmup is None else warmup, clip=clip, dtype=dtype,
               checkpoint_activations=checkpoint_activations, compile=compile, seed=seed, save_every=save_every,
               **{name: getattr(its, name) if value is None else value for name, value in given.items()})


def option(field: str) -> str:
    """The command line's name of a setting."""
    return f"--{field.replace('_', '-')}"
