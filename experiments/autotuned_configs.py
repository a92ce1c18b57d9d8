"""Kernels that tune themselves, as upstream's do: their configs compiled side by side, or handed from one process to the next.

A launch takes longer under ncu than a small kernel does, so that what is tuned there is left to chance. So a call is made once
without ncu, and leaves its configs; under ncu it takes those, and tunes nothing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from triton import AsyncCompileMode, Config
from triton.runtime import Autotuner

_FILE = "SSD_KERNELS_TUNED"  # in the environment


@contextmanager
def tune_first(arguments: list[str], seconds: float) -> Iterator[None]:
    """Runs this command line once, without ncu. Inside, other runs with the same arguments use the configs that it chose.

    The command has to make its calls inside `hand_over_configs`.

    Raises:
        ValueError: it failed, with the end of what it said, or did not end in so many seconds, or left no configs.
    """
    with TemporaryDirectory() as folder, patch.dict(os.environ, {_FILE: str(Path(folder, "configs.json"))}):
        try:
            ran = subprocess.run([sys.executable, "-m", "experiments", *arguments], capture_output=True, text=True,
                                 timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"without ncu: did not end in {seconds} s; expected a smaller shape or preset") from error
        if ran.returncode:
            raise ValueError(f"without ncu: exit status {ran.returncode}: {ran.stderr.strip()[-400:]}")
        if not Path(os.environ[_FILE]).exists():
            raise ValueError("without ncu: it left no configs")
        yield


@contextmanager
def compile_together() -> Iterator[None]:
    """Inside, a kernel that is to be tuned compiles all its configs at once, then times them one by one as before."""
    prune = Autotuner.prune_configs

    def compile_all(tuner: Autotuner, given: dict) -> list[Config]:
        configs = prune(tuner, given)
        with AsyncCompileMode(pool, ignore_errors=True):  # the tuner meets errors where it would have
            for config in configs:
                tuner.fn.run(*tuner.nargs.values(), **given | config.all_kwargs() | {"warmup": True})
        return configs

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, patch.object(Autotuner, "prune_configs", compile_all):
        yield


@contextmanager
def hand_over_configs() -> Iterator[None]:
    """Inside, kernels use the configs that the process of `tune_first` chose. That process itself tunes and writes them down.
    Nothing changes where `tune_first` was not called.

    Kernels are met as they are launched: whoever imports upstream's need not leave its modules where they can be found.
    """
    if not (path := os.environ.get(_FILE)):
        yield
    elif Path(path).exists():
        table = json.loads(Path(path).read_text())

        def fill_cache(tuner: Autotuner) -> None:
            for key, number in table.get(_name(tuner), ()):
                tuner.cache.setdefault(tuple(key), tuner.configs[number])

        with patch.multiple(Autotuner, run=_run_after(fill_cache), _bench=_refuse_tuning):
            yield
    else:
        met: dict[int, Autotuner] = {}
        with patch.object(Autotuner, "run", _run_after(lambda tuner: met.update({id(tuner): tuner}))):
            yield
        found: dict[str, list] = {}
        for tuner in met.values():  # of one kernel there may be several
            found.setdefault(_name(tuner), []).extend((key, tuner.configs.index(one)) for key, one in tuner.cache.items())
        Path(path).write_text(json.dumps(found))


def _run_after(act: Callable[[Autotuner], None]) -> Callable:
    """A tuner's `run` that calls `act` on the tuner first."""
    run = Autotuner.run

    def run_after(tuner: Autotuner, *args, **kwargs):
        act(tuner)
        return run(tuner, *args, **kwargs)

    return run_after


def _refuse_tuning(tuner: Autotuner, *_, **__):
    raise RuntimeError(f"{_name(tuner)} was not tuned to this call before: the two runs differ")


def _name(tuner: Autotuner) -> str:
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__name__}"
