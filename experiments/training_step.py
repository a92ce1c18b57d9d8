"""What a step of training is made of: the model and its optimizer, the batches, the gradient and the learning rate.

A step depends on nothing but the weights, the optimizer's state and the run: its data and its random numbers are drawn by the
run's seed and the step's number.
"""

import math
import os
import signal
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ssd.pruning import load

from .characterize.scopes import BACKWARD, FORWARD, scope
from .packages import import_package
from .parallel import Team
from .training_run import Run
from .workloads import Workload

_BETAS = (0.9, 0.95)
_WORKERS = 4  # processes that make batches while a GPU computes, or as many as half of its share of the cores


def build_model(run: Run, workload: Workload, team: Team) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """The model as it is to be called, its optimizer, and how many parameters it has."""
    torch.manual_seed(run.seed)
    with team.device:
        model = workload.build(run.sizes, run.variant, run.checkpoint_activations)
    if run.start:
        _load_start(model, run.start)
    decay, parameters = find_decaying(model), sum(parameter.numel() for parameter in model.parameters())
    model = team.spread(model)
    groups = {True: [], False: []}
    for name, parameter in unwrap(model).named_parameters():
        groups[name in decay].append(parameter)
    groups = [{"params": groups[True], "weight_decay": run.weight_decay}, {"params": groups[False], "weight_decay": 0.0}]
    if run.optimizer == "lamb":
        return model, find_lamb()(groups, run.lr, betas=_BETAS), parameters
    return model, torch.optim.AdamW(groups, run.lr, _BETAS, fused=team.device.type == "cuda"), parameters


def _load_start(model: nn.Module, folder: str) -> None:
    try:
        load(model, folder)
    except (FileNotFoundError, ValueError) as reason:
        raise ValueError(f"--start: {reason}") from reason


def unwrap(model: nn.Module) -> nn.Module:
    """The model by whose names weights are saved, of what `Team.spread` gives."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def find_lamb() -> type[torch.optim.Optimizer]:
    """timm's LAMB.

    Raises:
        ImportError: timm cannot be imported.
    """
    return import_package("timm.optim", "has the optimizer", "pip install timm torchvision, or --optimizer adamw").Lamb


def make_batches(run: Run, workload: Workload, dataset: Dataset, done: int, team: Team) -> Iterator[dict[str, Tensor]]:
    """This process's parts of micro-batches on its device, from the first of the step after `done`."""
    of_step, on_gpu = run.batch * run.accumulate, team.device.type == "cuda"
    parts = [team.part(range(n, n + run.batch)) for n in range(done * of_step, run.steps * of_step, run.batch)]
    loader = DataLoader(dataset, batch_sampler=parts, pin_memory=on_gpu, num_workers=_workers(team) if on_gpu else 0,
                        collate_fn=workload.collate, worker_init_fn=_outlast_signals,
                        generator=torch.Generator())  # not the one that steps draw from
    try:
        for batch in loader:
            yield {name: t.to(team.device, non_blocking=True) for name, t in batch.items()}
    except ValueError as error:  # a worker's is a traceback, whose last line says what happened
        raise ValueError(str(error).strip().rpartition("\n")[2].removeprefix("ValueError: ")) from error


def _workers(team: Team) -> int:
    return min(_WORKERS, max((os.cpu_count() or 2) // (2 * team.size), 1))


def _outlast_signals(_: int) -> None:
    """What ends a run is often sent to all its processes; those that make batches end with it, after it has saved."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def compute_gradient(run: Run, step: int, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer,
             batches: Iterator[dict[str, Tensor]], team: Team) -> dict[str, float]:
    """Leaves the gradient, clipped; the optimizer has yet to use it."""
    torch.manual_seed(int(np.random.SeedSequence([run.seed, step, team.rank]).generate_state(1, np.uint64)[0]))
    rate = compute_learning_rate(run, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    total = torch.zeros((), device=team.device)
    for n in range(run.accumulate):
        batch = next(batches)
        with team.average_gradients(model, now=n == run.accumulate - 1):
            with scope(FORWARD), torch.autocast(team.device.type, torch.bfloat16, enabled=run.dtype == "bf16"):
                loss = workload.loss(model, batch)
            part = loss * _weight(workload, batch, team) / run.accumulate
            with scope(BACKWARD):
                (part * team.size).backward()  # parts add up to the loss; averages of gradients are of `size` times that
        total += part.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), run.clip or math.inf)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # which all processes have to ask for
    return {"loss": team.sum_over(total).item(), "lr": rate, "grad_norm": norm.item()}


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
