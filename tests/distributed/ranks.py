"""Processes that are ranks of groups, of gloo on the CPU or of NCCL with a GPU each, started once for many tests."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE_S = 120


class Ranks:
    """`size` processes, of which the first 2, 3, ... are groups of their own.

    On the CPU they are forked from a process that has imported what they need: importing torch takes longer than most tests.
    With GPUs each imports it anew: CUDA works in no fork of a process where it has started, which an import may do.
    """

    def __init__(self, size: int, store: Path, backend: str = "gloo"):
        context = multiprocessing.get_context("spawn" if "nccl" in backend else "forkserver")
        if "nccl" not in backend:
            context.set_forkserver_preload(["tests.distributed.rank_calls"])
        self.connections, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, store, backend), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, size: int, function: Callable, *args: Any) -> list[Any]:
        """What function(group, *args) gives on each rank of the group of that size; an exception is returned."""
        for connection in self.connections[:size]:
            connection.send_bytes(pickle.dumps((size, function, args)))
        return [self._receive(rank) for rank in range(size)]

    def _receive(self, rank: int) -> Any:
        if not self.connections[rank].poll(_PATIENCE_S):
            raise TimeoutError(f"rank {rank} gave no answer within {_PATIENCE_S} s")
        try:
            result, trace = pickle.loads(self.connections[rank].recv_bytes())
        except EOFError:
            return EOFError(f"rank {rank} died")
        if isinstance(result, Exception):
            result.add_note(trace)
        return result

    def end(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.close()
            process.join(10)
            process.kill()


def _serve(connection: Connection, rank: int, size: int, store: Path, backend: str) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size,
                            timeout=timedelta(seconds=_PATIENCE_S))
    groups = {n: dist.new_group(range(n)) for n in range(1, size + 1)}
    while True:
        try:
            number, function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = function(groups[number], *args), ""
        except Exception as error:
            answer = type(error)(str(error)), traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
