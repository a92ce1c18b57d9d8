"""The settings of a training run, all of them: two runs with the same settings are the same run. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from .known_names import refuse_unknown, variant_names
from .workloads import get_workload, preset_names

if TYPE_CHECKING:
    from ssd import Options

DTYPES = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "lamb")
WAYS = ("ddp", "fsdp", "cp", "cp-fsdp")  # of several processes, see `parallel`
_AT_LEAST = {"steps": 1, "batch": 1, "seqlen": 2, "accumulate": 1, "warmup": 0, "save_every": 0, "clip": 0, "weight_decay": 0,
             "seed": 0, "buckets": 1}
_MOST_LR = 3.4e38  # the optimizer takes it in fp32
_OF_PRESET = ("batch", "seqlen", "lr", "optimizer", "weight_decay")  # the preset's unless given


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and how. `make_run` makes one of a preset; `dataclasses.replace` derives another.

    Attributes:
        workload, preset: see `experiments.workloads`.
        variant: of the SSD, see `ssd.ssd_chunk_scan`.
        mixer: one of the workload's, see `workloads.Workload`.
        data: "synthetic", or the place of the workload's data.
        tokenizer: of text; "bytes", or as in `workloads.hub_text.load_tokenizer`.
        documents: keep documents that share a row apart. Off, a row is one document, as in most pretraining.
        steps: steps of the optimizer.
        batch: samples of a micro-batch, split evenly over the GPUs.
        seqlen: tokens of a sample; None for workloads whose samples have sizes of their own.
        accumulate: micro-batches of a step, whose gradients are averaged.
        lr, warmup: the highest learning rate, and the steps until it is reached; see `training_step.compute_learning_rate`.
        clip: the largest norm of the gradient; 0 for no clipping.
        optimizer: "adamw" or "lamb".
        weight_decay: of matrices and filters alone.
        dtype: "fp32", or "bf16" for autocast; weights are fp32.
        checkpoint_activations: compute layers again in the backward instead of keeping their activations.
        compile: use torch.compile.
        seed: of weights and data.
        save_every: steps between checkpoints; the last step is saved, too. 0: save only when a signal ends the run.
        buckets: of graphs: nodes and edges of a batch are filled up to one of so many sizes in each doubling; None: to none.
        start: a folder that `ssd.pruning.save` wrote, whose weights and sizes the model starts with.

    Raises:
        ValueError: naming the option, what came and what is accepted.
    """

    workload: str
    preset: str
    variant: str = "auto"
    mixer: str
    data: str = "synthetic"
    tokenizer: str = "bytes"
    documents: bool = True
    steps: int
    batch: int
    seqlen: int | None
    accumulate: int = 1
    lr: float
    warmup: int
    clip: float = 1.0
    optimizer: str
    weight_decay: float
    dtype: str = "fp32"
    checkpoint_activations: bool = False
    compile: bool = False
    seed: int = 0
    save_every: int = 1000
    buckets: int | None = None
    start: str | None = None

    def __post_init__(self):
        workload = get_workload(self.workload)
        for name, known in (("preset", workload.presets), ("variant", ("auto", *variant_names())), ("mixer", workload.mixers),
                            ("optimizer", OPTIMIZERS), ("dtype", DTYPES)):
            refuse_unknown(option(name), getattr(self, name), known)
        if self.seqlen is not None and workload.presets[self.preset].seqlen is None:
            raise ValueError(f"--seqlen: got {self.seqlen}, expected none: {workload.unit} of {self.workload} are as large as "
                             "they are")
        if self.buckets is not None and workload.fill_up is None:
            raise ValueError(f"--buckets: got {self.buckets}, expected none: batches of {self.workload} are of one size")
        for name, usual in (("tokenizer", "bytes"), ("documents", True)):
            if getattr(self, name) != usual and workload.unit != "tokens":
                raise ValueError(f"{option(name)}: got {getattr(self, name)!r}, expected none: {self.workload} reads no text")
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                finite = "a finite number of " if isinstance(value, float) else ""
                raise ValueError(f"{option(name)}: got {value}, expected {finite}at least {least}")
            if name != "seed" and isinstance(value, int) and value >= 2**31:
                raise ValueError(f"{option(name)}: got {value}, expected less than 2^31")
        if not 0 < self.lr <= _MOST_LR:
            raise ValueError(f"--lr: got {self.lr}, expected more than 0, and at most {_MOST_LR:g}, as fp32 holds it")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed: got {self.seed}, expected 0 to 2^63 - 1")
        if self.warmup > self.steps:
            raise ValueError(f"--warmup: got {self.warmup}, expected at most --steps, {self.steps}")

    def identity(self, options: Options | None = None) -> dict[str, Any]:
        """The keys of a row that say what was trained. options: the defaults unless given; a peer has none."""
        from ssd import Options
        from ssd.registry import is_peer

        options = None if is_peer(self.variant) else asdict(options or Options())
        return {"variant": self.variant, "options": options, "batch": self.batch, "seqlen": self.seqlen, "dtype": self.dtype,
                "workload": self.workload, "preset": self.preset, "run": asdict(self)}

    @property
    def sizes(self) -> Any:
        """The sizes of the model, with its mixer."""
        workload = get_workload(self.workload)
        sizes = workload.presets[self.preset].sizes
        return replace(sizes, mixer=self.mixer) if len(workload.mixers) > 1 else sizes

    @property
    def units(self) -> int:
        """Tokens, images or graphs of a step."""
        return self.batch * self.accumulate * (self.seqlen or 1)


def make_run(workload: str, preset: str = "tiny", *, mixer: str | None = None, steps: int = 100, warmup: int | None = None,
             **given: Any) -> Run:
    """A run with the settings of a preset and those given.

    A setting that is missing or None is the preset's; warmup a tenth of the steps; the mixer the workload's first. The others
    have the defaults of `Run`.
    """
    refuse_unknown("--preset", preset, preset_names(workload))
    known = get_workload(workload)
    of_preset = {name: getattr(known.presets[preset], name) for name in _OF_PRESET}
    settings = of_preset | {name: value for name, value in given.items() if value is not None}
    return Run(workload=workload, preset=preset, mixer=known.mixers[0] if mixer is None else mixer, steps=steps,
               warmup=steps // 10 if warmup is None else warmup, **settings)


def parse_workload(text: str) -> tuple[str, str, str | None]:
    """NAME[:PRESET][/MIXER] as name, preset (tiny unless given) and mixer."""
    text, _, mixer = text.strip().partition("/")
    name, _, preset = text.partition(":")
    return name, preset or "tiny", mixer or None


def option(field: str) -> str:
    """The command line's name of a setting."""
    return f"--{field.replace('_', '-')}"
