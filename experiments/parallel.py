"""One model trained by several processes, a GPU each, as torchrun starts them; or by this one alone.

A micro-batch is dealt out: its samples in equal parts, or with "cp" and "cp-fsdp" the tokens of every sample (context
parallelism). With "ddp" and "cp" every process has the whole model, and they average gradients; with "fsdp" and "cp-fsdp" each
has a part of every tensor, and they gather some layers when it is their turn.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ssd.modules.captured import get_side_stream
from ssd.registry import is_peer

from .training_run import WAYS, Run

_SUMMED_BYTES, _SUMS = 256 * 2**20, 5
_GATHERED = 2**28  # parameters that FSDP2 gathers at once: 1 GiB in fp32
_NEVER = 2**31 - 1
_PATIENCE = timedelta(hours=1)  # with the first process, which writes checkpoints


@dataclass(frozen=True)
class Team:
    """The processes that train one model together, of which this is one.

    Attributes:
        rank, size: which it is, from 0, and how many there are.
        device: this one's.
        way: of `WAYS`.
    """

    rank: int
    size: int
    device: torch.device
    way: str

    def spread(self, model: nn.Module) -> nn.Module:
        """What to call in place of a model that every process has made alike; its parameters stay where they are named.

        On GPUs batch norms take the statistics of the whole micro-batch.
        """
        if self.size == 1:
            return model
        if self.cuts_tokens:
            for module in model.modules():
                if hasattr(module, "context_group"):
                    module.context_group = dist.group.WORLD
        if self.device.type == "cuda":  # torch has none on CPUs, where each process takes the statistics of its own part
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if self.way in ("ddp", "cp"):
            if self.device.type == "cpu":
                return _Copy(model)
            side, current = get_side_stream(self.device), torch.cuda.current_stream(self.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):  # in which a step may be captured, and the gradients' sums then must be
                model = _Copy(model, [self.device])
                model._set_ddp_runtime_logging_sample_rate(_NEVER)  # it reads its times in steps, of which any may be captured
            current.wait_stream(side)
            return model
        for layers in reversed([module for module in model.modules() if isinstance(module, nn.ModuleList)]):
            for group in _group_layers(layers):
                fully_shard(group)
        return fully_shard(model)

    @contextmanager
    def average_gradients(self, model: nn.Module, now: bool) -> Iterator[None]:
        """Within, gradients of what `spread` gave are averaged only if `now`, for the last micro-batch of a step."""
        if isinstance(model, DistributedDataParallel) and not now:
            with model.no_sync():
                yield
            return
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(now)
        yield

    @property
    def cuts_tokens(self) -> bool:
        return self.size > 1 and self.way.startswith("cp")

    def check(self, run: Run) -> None:
        """Refuses a run whose micro-batches cannot be dealt out, by the option's name."""
        if not self.cuts_tokens:
            if run.batch % self.size:
                raise ValueError(f"--batch: got {run.batch}, expected a multiple of {self.size}, so that each process has its "
                                 "part")
            return
        if run.workload not in ("mamba2", "hybrid"):
            raise ValueError(f"--parallel: got {self.way} with the workload {run.workload}, expected mamba2 or hybrid, whose "
                             "samples are sequences of tokens")
        kv_heads = run.sizes.kv_heads
        if kv_heads % self.size:
            raise ValueError(f"--parallel: got {self.way} on {self.size} GPUs with {kv_heads} heads of keys, expected a "
                             "divisor of these: attention deals them out")
        if kv_heads and run.seqlen % self.size:
            raise ValueError(f"--seqlen: got {run.seqlen}, expected a multiple of {self.size}, so that attention has "
                             "equal parts")
        if run.compile:
            raise ValueError(f"--compile: got it with --parallel {self.way}, expected none: exchanges are not compiled")
        if is_peer(run.variant):
            raise ValueError(f"--variant: got {run.variant!r} with --parallel {self.way}, expected one of this project's")
        if run.seqlen < self.size:
            raise ValueError(f"--seqlen: got {run.seqlen}, expected at least {self.size}, so that each process has its part")

    def cut(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process's tokens of each sample; a batch of tensors (batch, seqlen)."""
        if not self.cuts_tokens:
            return batch
        return {name: t[:, t.shape[1] * self.rank // self.size : t.shape[1] * (self.rank + 1) // self.size]
                for name, t in batch.items()}

    def part(self, batch: range) -> range:
        """This process's samples of a batch whose length `size` divides; all where it has a part of each."""
        if self.cuts_tokens:
            return batch
        each = len(batch) // self.size
        return batch[self.rank * each : (self.rank + 1) * each]

    @contextmanager
    def take_turns(self) -> Iterator[None]:
        """What the first process does before the others, who then find it done, in a cache, say."""
        if self.size > 1 and self.rank:
            dist.barrier()
        yield
        if self.size > 1 and not self.rank:
            dist.barrier()

    def sum_over(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def max_over(self, value: float) -> float:
        """The largest over all processes."""
        return self.find_largest([value])[0]

    def find_largest(self, values: list[float]) -> list[float]:
        """Of each, all floats or all integers, over all processes."""
        if self.size == 1:
            return values
        # on the host, which must not wait for its GPU in each step
        found = torch.tensor(values, dtype=torch.float64 if isinstance(values[0], float) else torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def measure_link(self) -> float | None:
        """What each GPU sends while all of them sum a tensor (NCCL's bus bandwidth); None alone, or without GPUs."""
        if self.size == 1 or self.device.type != "cuda":
            return None
        t = torch.zeros(_SUMMED_BYTES // 4, device=self.device)
        dist.all_reduce(t)
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        for _ in range(_SUMS):
            dist.all_reduce(t)
        torch.cuda.synchronize(self.device)
        sent = _SUMS * _SUMMED_BYTES * 2 * (self.size - 1) / self.size  # once to add up, once to hand out
        return sent / (time.perf_counter() - began) / 1e9


def _group_layers(layers: nn.ModuleList) -> Iterator[list[nn.Module]]:
    """Layers next to each other that are gathered at once: of each group the host makes three exchanges a step."""
    group, held = [], 0
    for layer in layers:
        size = sum(parameter.numel() for parameter in layer.parameters())
        if group and held + size > _GATHERED:
            yield group
            group, held = [], 0
        group.append(layer)
        held += size
    if group:
        yield group


class _Copy(DistributedDataParallel):
    """Passes on what a loss asks of the model besides calling it."""

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def make_single(way: str = "ddp") -> Team:
    """This process, on the GPU if there is one."""
    return Team(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"), way)


@contextmanager
def join_team(way: str = "ddp") -> Iterator[Team]:
    """The team that torchrun started this process for, or this process alone.

    Raises:
        ValueError: an unknown way, or more processes than GPUs.
    """
    if way not in WAYS:
        raise ValueError(f"--parallel: got {way!r}, expected one of {', '.join(WAYS)}")
    if "LOCAL_RANK" not in os.environ:
        yield make_single(way)
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(os.environ["LOCAL_RANK"])
    if gpus and number >= gpus:
        raise ValueError(f"torchrun: got a process {number} on this machine, expected at most one for each of its {gpus} GPUs")
    device = torch.device("cuda", number) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", device_id=device if gpus else None, timeout=_PATIENCE)
    yield Team(dist.get_rank(), dist.get_world_size(), device, way)
    dist.destroy_process_group()  # not after an error, which the others may wait for: torchrun ends them

