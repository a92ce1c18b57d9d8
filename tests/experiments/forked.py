"""Processes that need not import torch, which takes seconds: forks of one that has imported what they run, and begun nothing.

For a machine without a GPU. Elsewhere what is imported may have started CUDA, of which a fork can make no use.
"""

import faulthandler
import os
import runpy
import sys
import tempfile
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import TimeoutExpired
from unittest.mock import patch

from tests.programs import ROOT


@cache
def start_server() -> forkserver.ForkServer:
    """One of our own, whose processes interpret no kernels, which those of `tests.distributed` do."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.experiments.faults", "tests.experiments.undrawn", "torch._dynamo"])
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}):
        os.environ.pop("TRITON_INTERPRET", None)
        server.ensure_running()
    return server


class Process(ForkServerProcess):
    """Of that server, where multiprocessing knows one alone."""

    @staticmethod
    def _Popen(process: ForkServerProcess) -> object:
        with patch.object(forkserver, "connect_to_new_process", start_server().connect_to_new_process):
            return ForkServerProcess._Popen(process)


class Forked:
    """What tests need of subprocess.Popen, for a module run as if by `python -m`; variables: of its environment, besides."""

    def __init__(self, module: str, *arguments: object, **variables: object):
        self._said = [tempfile.NamedTemporaryFile("r") for _ in range(2)]  # noqa: SIM115 - as long as the process
        self._process = Process(target=_run, args=(
            module, [*map(str, arguments)], {name: str(value) for name, value in variables.items()},
            [file.name for file in self._said]))
        self._process.start()
        self.terminate = self._process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(self._process.name, timeout)
        out, err = (Path(file.name).read_text() for file in self._said)
        return out, err


def _run(module: str, arguments: list[str], variables: dict[str, str], said: list[str]) -> None:
    for number, name in enumerate(said, 1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    faulthandler.enable()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
