"""Workers in processes of their own: what kills one, or what it hangs in, is known by name and costs one batch."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO
from unittest.mock import patch

import torch

from . import worker
from .trial import Outcome

_STDERR_LINES = 6
_STARTING = 120.0  # seconds that a process may take to import torch and start CUDA

Batch = list[str]  # configurations as JSON
Found = tuple[str, Outcome]


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    said: IO  # its stderr
    ready: bool = False
    batch: Batch = field(default_factory=list)  # none while it is idle
    current: int | None = None  # which of the batch runs
    deadline: float = 0.0


class Pool:
    """`width` workers, each started with its first batch; to be closed, or used as a context.

    Args:
        timeout: seconds that one configuration may take.
        main: what a worker runs, as `worker.main`.
    """

    def __init__(self, width: int, timeout: float, main: Callable[[Connection, str], None] = worker.main):
        self.width, self._timeout, self._main = width, timeout, main
        self._workers: dict[int, _Worker] = {}
        self.replaced = 0  # workers that died or hung

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        for number in [*self._workers]:
            self._end(number)

    def run(self, batches: Iterator[Batch], until: Callable[[], bool] = lambda: False) -> Iterator[Found]:
        """Configurations and what became of them, as they end. `until`: once it is true, what runs is broken off."""
        more = True
        while not until():
            for number in range(self.width):
                if more and not (number in self._workers and self._workers[number].batch):
                    batch = next(batches, None)
                    if more := batch is not None:
                        self._give(number, batch)
            busy = {each.pipe: number for number, each in self._workers.items() if each.batch}
            if not busy:
                return
            for pipe in wait([*busy], timeout=0.2):
                yield from self._read(busy[pipe])
            for number in busy.values():
                one = self._workers.get(number)
                if one and one.batch and time.monotonic() > one.deadline:
                    yield from self._lose(number, f"hung: no result after {self._timeout:g} s")
        for number in [number for number, each in self._workers.items() if each.batch]:
            self._end(number)

    def _give(self, number: int, batch: Batch) -> None:
        if number not in self._workers:
            said, context = tempfile.NamedTemporaryFile(), get_context("spawn")  # noqa: SIM115 - as long as the worker
            pipe, theirs = context.Pipe()
            process = context.Process(target=self._main, args=(theirs, said.name))
            with patch.dict(os.environ, _environment(number)):
                process.start()
            theirs.close()
            self._workers[number] = _Worker(process, pipe, said)
        given = self._workers[number]
        given.batch, given.current = batch, None
        given.deadline = time.monotonic() + (self._timeout if given.ready else _STARTING)
        with suppress(BrokenPipeError):  # it died idle; the end of its messages says so next
            given.pipe.send(batch)

    def _read(self, number: int) -> Iterator[Found]:
        """Takes a message, as `worker.main` sends them."""
        sender = self._workers[number]
        try:
            current, outcome = sender.pipe.recv()
        except (EOFError, OSError):
            yield from self._lose(number, None)
            return
        sender.deadline, sender.ready, sender.current = time.monotonic() + self._timeout, True, current
        if outcome is not None:
            yield sender.batch[current], outcome
            sender.current = None
            if current == len(sender.batch) - 1:
                sender.batch = []

    def _lose(self, number: int, reason: str | None) -> Iterator[Found]:
        """Ends a worker, and says what it was at if it had begun any; another is started when there is a batch for it."""
        lost = self._end(number)
        said = "\n".join(lost.said.read().decode(errors="replace").strip().splitlines()[-_STDERR_LINES:])
        if not lost.ready and reason is None:
            raise RuntimeError(f"a worker ended before it ran anything: {said}")
        self.replaced += 1
        if lost.current is not None:
            reason = reason or f"died: {_describe_end(lost.process.exitcode)}"
            yield lost.batch[lost.current], Outcome("failed", f"{reason}\n{said}".strip(), lost=True)

    def _end(self, number: int) -> _Worker:
        ended = self._workers.pop(number)
        if ended.process.is_alive():
            with suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(ended.process.pid, signal.SIGKILL)  # compilers that it started, too
            ended.process.kill()
        ended.process.join()
        ended.pipe.close()
        return ended


def _environment(number: int) -> dict[str, str]:
    """The environment of a worker: a GPU of its own in turn, and one thread, since there is a worker for each core."""
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    count = torch.cuda.device_count()
    if count > 1:
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[number % count]
    return environment


def _describe_end(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
