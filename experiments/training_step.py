"""What a step of training is made of: the model and its optimizer, the batches, and the step itself with its learning rate.

A step depends on nothing but the weights, the optimizer's state and the run: its data and its random numbers are drawn by the
run's seed and the step's number.
"""

import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ssd.pruning import load

from .characterize.scopes import BACKWARD, FORWARD, OPTIMIZER, scope
from .lamb import Lamb
from .parallel import Team
from .shards import AdamW, clip_gradient
from .training_run import Run
from .workloads import Workload, get_workload

_BETAS = (0.9, 0.95)
_MOST_COMPILED = 64  # forms of a layer: of sizes, kinds and variants; beyond its limit torch.compile gives up in silence
_WORKERS = 24  # processes that make batches while a GPU computes, or three for four of its share of the cores


def build_model(run: Run, workload: Workload, team: Team,
                graph: bool = False, fused: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """The model as it is to be called, its optimizer, and how many parameters it has.

    graph: the optimizer is to run in a CUDA graph, so it reads its learning rate from a tensor; fused: AdamW is one kernel on a
    GPU.
    """
    torch.manual_seed(run.seed)
    with team.device:
        model = workload.build(run.sizes, run.variant, run.checkpoint_activations)
    if run.start is not None:
        _load_start(model, run.start)
    decay, parameters = find_decaying(model), sum(parameter.numel() for parameter in model.parameters())
    model = team.spread(model)
    groups = {True: [], False: []}
    for name, parameter in unwrap(model).named_parameters():
        groups[name in decay].append(parameter)
    groups = [{"params": groups[True], "weight_decay": run.weight_decay}, {"params": groups[False], "weight_decay": 0.0}]
    lr = torch.tensor(run.lr, device=team.device) if graph else run.lr
    if run.optimizer == "lamb":
        return model, Lamb(groups, lr, _BETAS), parameters
    one_kernel = fused and (graph or team.device.type == "cuda")
    return model, AdamW(groups, lr, _BETAS, fused=one_kernel or None, capturable=graph), parameters


def _load_start(model: nn.Module, folder: str) -> None:
    try:
        load(model, folder)
    except (FileNotFoundError, ValueError) as reason:
        raise ValueError(f"--start: {reason}") from reason


def unwrap(model: nn.Module) -> nn.Module:
    """The model by whose names weights are saved, of what `Team.spread` gives."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def compile_layers(model: nn.Module) -> None:
    """Compiles each layer by itself, so that like layers are compiled once; and the parts that the model names in
    `compiled_beside_layers`. What holds batch norms of several processes is left as it is.
    """
    torch._dynamo.reset()  # or what was compiled for another model would count towards the limit
    torch._dynamo.config.recompile_limit = _MOST_COMPILED
    layers = [layer for found in model.modules() if isinstance(found, nn.ModuleList) for layer in found
              if not any(isinstance(inner, nn.ModuleList) for inner in layer.modules())]
    for part in (*layers, *getattr(model, "compiled_beside_layers", ())):
        if not any(isinstance(inner, nn.SyncBatchNorm) for inner in part.modules()):
            part.compile(dynamic=False)


def make_batches(run: Run, workload: Workload, dataset: Dataset, done: int, team: Team) -> Iterator[dict[str, Tensor]]:
    """This process's parts of micro-batches on its device, from the first of the step after `done`."""
    of_step, on_gpu = run.batch * run.accumulate, team.device.type == "cuda"
    parts = (team.part(range(n, n + run.batch)) for n in range(done * of_step, run.steps * of_step, run.batch))
    alike = bool(run.buckets) and team.size > 1  # so filled up here, not where batches are made
    loader = DataLoader(dataset, batch_sampler=parts, pin_memory=on_gpu, num_workers=_workers(team) if on_gpu else 0,
                        collate_fn=partial(_collate, run) if run.buckets and not alike else workload.collate,
                        worker_init_fn=_outlast_signals,
                        generator=torch.Generator())  # not the one that steps draw from
    try:
        for batch in _fill_alike(run, workload, loader, team) if alike else loader:
            yield {name: t.to(team.device, non_blocking=True) for name, t in team.cut(batch).items()}
    except ValueError as error:  # a worker's is a traceback, whose last line says what happened
        raise ValueError(str(error).strip().rpartition("\n")[2].removeprefix("ValueError: ")) from error


def _fill_alike(run: Run, workload: Workload, batches: Iterable[dict[str, Tensor]], team: Team) -> Iterator[dict[str, Tensor]]:
    """Batches filled up to the size of the largest of all processes, by a thread while the one before is at work.

    Sizes are exchanged here, in the thread that trains, since a process group is for one thread. Batches come pinned, so that
    torch takes them out of its workers' pipe in a thread, too.
    """
    def fill(batch: dict[str, Tensor], counts: list[int]) -> dict[str, Tensor]:
        filled = workload.fill_up(run, batch, counts)
        return {name: t.pin_memory() for name, t in filled.items()} if on_gpu else filled

    on_gpu = team.device.type == "cuda"
    set_device = partial(torch.cuda.set_device, team.device) if on_gpu else None  # a thread begins with the first
    with ThreadPoolExecutor(1, initializer=set_device) as thread:
        ahead = deque()
        for batch in batches:
            ahead.append(thread.submit(fill, batch, team.find_largest(workload.count(batch))))
            if len(ahead) > 1:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _collate(run: Run, samples: list[Any]) -> dict[str, Tensor]:
    """Without the workload, which cannot be pickled for another process."""
    workload = get_workload(run.workload)
    return workload.fill_up(run, workload.collate(samples))


def _workers(team: Team) -> int:
    return min(_WORKERS, max(3 * (os.cpu_count() or 2) // (4 * team.size), 1))


def _outlast_signals(_: int) -> None:
    """What ends a run is often sent to all its processes; those that make batches end with it, after it has saved."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Step:
    """Takes steps of a training, launch by launch; `step_graph.CapturedStep` replays them.

    What `add_gradient` and `finish` launch depends on shapes alone: they read nothing from the device, draw nothing on the host
    and know neither the step's number nor its learning rate.

    Attributes:
        loss, norm: of the last step, single numbers on the device: the mean loss of this process's part of the batch, and the
            gradient's norm before it was clipped.
    """

    def __init__(self, run: Run, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team):
        self.run, self.workload, self.model, self.optimizer, self.team = run, workload, model, optimizer, team
        self.loss, self.norm = torch.zeros((), device=team.device), torch.zeros((), device=team.device)

    def __call__(self, number: int, batches: Iterator[dict[str, Tensor]]) -> Tensor:
        """Takes the step of that number, counted from 1; (2,), its loss and norm, on the device."""
        self.begin(number)
        for n in range(self.run.accumulate):
            self.add_gradient(self.prepare(next(batches)), n)
        self.finish()
        self.clear()
        return torch.stack([self.team.sum_over(self.loss), self.norm])

    def begin(self, number: int) -> None:
        """Seeds what the step draws, and sets its learning rate."""
        seed = np.random.SeedSequence([self.run.seed, number, self.team.rank])
        torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))
        rate = float(np.float32(compute_learning_rate(self.run, number)))  # a captured step reads it from a tensor of fp32
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def prepare(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the workload draws on the host for a batch, done."""
        return self.workload.prepare(self.model, batch) if self.workload.prepare else batch

    def add_gradient(self, batch: dict[str, Tensor], n: int) -> None:
        """Adds the n-th micro-batch's loss and gradient to those before it, counted from 0."""
        if n == 0:
            self.loss.zero_()
        last = n == self.run.accumulate - 1
        with self.team.average_gradients(self.model, now=last):
            with scope(FORWARD), torch.autocast(self.team.device.type, torch.bfloat16, enabled=self.run.dtype == "bf16"):
                loss = self.workload.loss(self.model, batch)
            part = loss * _weight(self.workload, batch, self.team) / self.run.accumulate
            with scope(BACKWARD):
                (part * self.team.size).backward()  # parts add up to the loss; averages of gradients are of `size` times that
        self.loss += part.detach()

    def finish(self) -> None:
        """Clips the gradient, and lets the optimizer use it."""
        self.norm.copy_(clip_gradient(self.model.parameters(), self.run.clip, self.team, self.optimizer))
        with scope(OPTIMIZER):
            self.optimizer.step()

    def clear(self) -> None:
        """Forgets the gradient."""
        self.optimizer.zero_grad()


def send(values: Tensor) -> Callable[[], list[float]]:
    """What gives the values as numbers. It waits for these alone, not for what is launched after them."""
    if values.device.type != "cuda":
        return values.tolist
    arrived = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    arrived.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()

    def read() -> list[float]:
        event.synchronize()
        return arrived.tolist()

    return read


def _weight(workload: Workload, batch: dict[str, Tensor], team: Team) -> Tensor | float:
    """Of this process's part in the mean over a micro-batch."""
    if workload.terms is None:
        return 1 / team.size
    terms = workload.terms(batch)
    return terms / team.sum_over(terms).clamp(min=1)


def compute_learning_rate(run: Run, step: int) -> float:
    """Of a step, counted from 1: up evenly along `run.warmup` steps, then down to a tenth along half a cosine."""
    if step <= run.warmup:
        return run.lr * step / run.warmup
    progress = (step - run.warmup) / (run.steps - run.warmup)
    return run.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def find_decaying(model: nn.Module) -> set[str]:
    """Names of the parameters that decay: matrices, filters and embeddings; not norms, biases and Mamba's A, D and dt."""
    return {name for name, parameter in model.named_parameters()
            if parameter.dim() >= 2 and not getattr(parameter, "_no_weight_decay", False)}
