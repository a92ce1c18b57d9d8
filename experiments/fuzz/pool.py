"""Workers in processes of their own: what kills one, or what it hangs in, is known by name and costs one batch."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

import torch

from .trial import Outcome

COMMAND = (sys.executable, "-m", "experiments.fuzz.worker")
_STDERR_LINES = 6
_STARTING = 120.0  # seconds that a process may take to import torch and start CUDA

Batch = list[str]  # configurations as JSON
Found = tuple[str, Outcome]


@dataclass
class _Worker:
    process: subprocess.Popen | None = None  # none before the first batch
    said: IO | None = None  # its stderr
    batch: Batch = field(default_factory=list)
    current: int | None = None  # which of the batch runs
    deadline: float = float("inf")
    ready: bool = False
    buffered: bytes = b""

    @property
    def idle(self) -> bool:
        return not self.batch


class Pool:
    """`count` workers; to be closed, or used as a context.

    Args:
        timeout: seconds that one configuration may take.
        command: what a worker is started by.
    """

    def __init__(self, count: int, timeout: float, command: tuple[str, ...] = COMMAND):
        self._timeout, self._command = timeout, command
        self._selector = selectors.DefaultSelector()
        self._workers = [_Worker() for _ in range(count)]
        self.replaced = 0  # workers that died or hung

    @property
    def width(self) -> int:
        """How many configurations run at once."""
        return len(self._workers)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def run(self, batches: Iterator[Batch], until: Callable[[], bool] = lambda: False) -> Iterator[Found]:
        """Configurations and what became of them, as they end. `until`: once it is true, what runs is broken off."""
        more = True
        while not until():
            for number, worker in enumerate(self._workers):
                if worker.idle and more:
                    batch = next(batches, None)
                    more = batch is not None
                    if more:
                        self._give(number, batch)
            if all(worker.idle for worker in self._workers):
                return
            for key, _ in self._selector.select(timeout=0.2):
                yield from self._read(key.data)
            for number, worker in enumerate(self._workers):
                if time.monotonic() > worker.deadline:
                    yield from self._lose(number, f"hung: no result after {self._timeout:g} s")
        for number, worker in enumerate(self._workers):
            if not worker.idle:
                self._end(number)

    def close(self) -> None:
        """Ends the workers."""
        for number in range(len(self._workers)):
            self._end(number)
        self._selector.close()

    def _start(self, number: int) -> _Worker:
        said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
                                   env=_environment(number), start_new_session=True)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, number)
        return _Worker(process, said)

    def _give(self, number: int, batch: Batch) -> None:
        if self._workers[number].process is None:
            self._workers[number] = self._start(number)
        worker = self._workers[number]
        worker.batch, worker.current = batch, None
        worker.deadline = time.monotonic() + (self._timeout if worker.ready else _STARTING)
        try:
            worker.process.stdin.write(json.dumps({"configs": batch}).encode() + b"\n")
            worker.process.stdin.flush()
        except BrokenPipeError:  # it died idle; its end of output says so next
            pass

    def _read(self, number: int) -> Iterator[Found]:
        worker = self._workers[number]
        came = worker.process.stdout.read(1 << 16)
        if came is None:
            return
        if not came:
            yield from self._lose(number, None)
            return
        *lines, worker.buffered = (worker.buffered + came).split(b"\n")
        for line in lines:
            message = json.loads(line)
            worker.deadline = time.monotonic() + self._timeout
            if "begin" in message:
                worker.current = message["begin"]
            elif "end" in message:
                yield worker.batch[message["end"]], Outcome(**message["outcome"])
                worker.current = None
                if message["end"] == len(worker.batch) - 1:
                    worker.batch, worker.deadline = [], float("inf")
            worker.ready = True

    def _lose(self, number: int, reason: str | None) -> Iterator[Found]:
        """Replaces a worker, and says what it was at if it had begun any."""
        worker = self._workers[number]
        self._end(number)
        running = worker.batch[worker.current] if worker.batch and worker.current is not None else None
        if not worker.ready and reason is None:
            raise RuntimeError(f"a worker ended before it ran anything: {_tail(worker.said)}")
        reason = reason or f"died: {_ending(worker.process.returncode)}"
        self.replaced += 1
        if running is not None:
            yield running, Outcome("failed", f"{reason}\n{_tail(worker.said)}".strip(), lost=True)

    def _end(self, number: int) -> None:
        """Ends the worker; another is started when there is a batch for it."""
        worker, self._workers[number] = self._workers[number], _Worker()
        if worker.process is None:
            return
        self._selector.unregister(worker.process.stdout)
        if worker.process.poll() is None:
            os.killpg(worker.process.pid, signal.SIGKILL)  # compilers that it started, too
        worker.process.wait()


def _environment(number: int) -> dict[str, str]:
    """A worker's: GPUs are dealt out in turn, and it has one thread, since there are as many workers as cores."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    count = torch.cuda.device_count()
    if count > 1:
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[number % count]
    return environment


def _tail(said: IO) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-_STDERR_LINES:])


def _ending(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
