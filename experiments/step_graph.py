"""Steps of a training as CUDA graphs: thousands of small launches, for which the GPU waits, become one for each micro-batch.

A step is two graphs, or three: the gradient of its first micro-batch, that of another, and what uses the gradient. Each shape
of a batch has its own. Batches are copied to where the graphs read, gradients stay where the graphs wrote them, and the
learning rate is a tensor. Replays draw by the step's seed: torch keeps seed and offset of its generator in tensors, which each
replay fills from the generator's state. So the bits are those of steps launch by launch.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ssd.modules.captured import capture, warm_up
from ssd.runtime import value_checks

from .parallel import Team
from .terminal import first_line
from .training_run import Run
from .training_step import Step
from .workloads import get_workload

WARM_UPS = 2  # steps in which kernels are compiled, tuned and loaded, and the optimizer makes its state
_WARM_UPS_OF_TWO = 11  # in which DistributedDataParallel lays out its buckets and times itself (torch, "CUDA semantics")
_FINISH = ("finish",)


class NotCaptured(RuntimeError):
    """A step that cannot be captured; the message says which. torch may then not draw numbers on this GPU any more."""


def explain_refusal(run: Run, team: Team) -> str | None:
    """Why steps of a run cannot be captured; None where nothing is known that prevents it."""
    workload = get_workload(run.workload)
    if team.device.type != "cuda":
        return "a CUDA graph needs a GPU, found none"
    if team.size > 1 and team.way != "ddp":
        return f"steps of {team.size} processes are captured with --parallel ddp alone, got {team.way}"
    if workload.fill_up and not run.buckets:
        return "batches of graphs differ in their sizes without --buckets"
    if run.checkpoint_activations and run.workload == "mambavision":
        return "with --checkpoint-activations the backward restores the generator's state to drop the same paths, on the host"
    if run.variant == "fla" and run.documents and workload.unit == "tokens":
        return "got --variant fla, which asks the GPU where documents end"
    if value_checks.ENABLED:
        return "SSD_CHECK=1 reads every tensor"
    return None


def find_refusal(runs: Iterable[Run], team: Team) -> str | None:
    """Why steps of the first that cannot be captured cannot; None where nothing is known that prevents any."""
    return next(filter(None, (explain_refusal(run, team) for run in runs)), None)


def choose(asked: bool | None, runs: Iterable[Run], team: Team, console: Console) -> bool:
    """Whether to capture steps of runs that are compared, or of one: as asked, and else where all can be; says why not.

    Raises:
        ValueError: it was asked for, and one cannot.
    """
    reason = find_refusal(runs, team)
    if asked and reason:
        raise ValueError(f"--graph: {reason}; expected --no-graph")
    if asked is None and reason and team.device.type == "cuda":
        console.print(f"steps are launched kernel by kernel: {reason}", style="dim", markup=False)
    return reason is None if asked is None else asked


class CapturedStep(Step):
    """Steps that are replayed, but for micro-batches of a shape that came fewer than two times before, and the first eleven of
    several processes. Their exchanges are captured, too, so all processes' micro-batches must have one shape: NCCL wants what
    one process captures or replays of all (its guide, "Using NCCL with CUDA Graphs").

    Args:
        pool: of memory, see `torch.cuda.graph_pool_handle`; one of its own unless given. Steps that share one must take turns.

    Raises:
        NotCaptured: from a call, as soon as something in the step cannot be captured.
    """

    def __init__(self, *given: Any, pool: tuple[int, int] | None = None):
        super().__init__(*given)
        self._pool = pool or torch.cuda.graph_pool_handle()
        self._warm_steps = WARM_UPS if self.team.size == 1 else _WARM_UPS_OF_TWO
        self._warm = Counter()
        self._inputs: dict[tuple, dict[str, Tensor]] = {}
        self._replays: dict[tuple, Callable[[], object]] = {}

    def begin(self, number: int) -> None:
        super().begin(number)
        if not self._replays:  # the first that is captured makes the gradients, in the graphs' memory, where they then stay
            self.optimizer.zero_grad()

    def add_gradient(self, batch: dict[str, Tensor], n: int) -> None:
        shapes = tuple((name, t.shape, t.dtype) for name, t in batch.items())
        inputs = self._inputs.setdefault(shapes, {name: torch.empty_like(t) for name, t in batch.items()})
        for name, t in batch.items():
            inputs[name].copy_(t)

        def launch() -> Tensor:
            if n == 0:
                self.optimizer.zero_grad(set_to_none=False)
            super(CapturedStep, self).add_gradient(inputs, n)
            return self.loss

        self._run((shapes, n == 0), launch, makes_gradients=n == 0)

    def finish(self) -> None:
        def launch() -> Tensor:
            super(CapturedStep, self).finish()
            return self.norm

        self._run(_FINISH, launch)

    def clear(self) -> None:
        """Gradients stay where they are."""

    def _run(self, part: tuple, launch: Callable[[], Tensor], makes_gradients: bool = False) -> None:
        """Launches a part of a step, or captures it where it was launched often enough, and replays it.

        A part that makes the gradients is captured first: others would read and write what another candidate's steps free.
        """
        if self._warm[part] < WARM_UPS or self._warm[_FINISH] < self._warm_steps or not (self._replays or makes_gradients):
            self._warm[part] += 1
            warm_up(launch, self.team.device)
            return
        if part not in self._replays:
            try:
                self._replays[part], _ = capture(launch, self.team.device, self._pool)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise NotCaptured(f"--graph: a step of {self.run.workload} {self.run.preset} with variant {self.run.variant} "
                                  f"cannot be captured: {first_line(error)}; expected --no-graph") from error
        self._replays[part]()
