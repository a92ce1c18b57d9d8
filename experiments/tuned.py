"""To which configs kernels that tune themselves, as upstream's do, were tuned: kept by one process for another.

A launch takes longer under ncu than a small kernel does, so that what is tuned there is left to chance. So a call is made once
without ncu, and keeps its configs; under ncu it takes those.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from triton.runtime import Autotuner

KEPT = "SSD_KERNELS_TUNED"  # in the environment: the file


@contextmanager
def before(arguments: list[str], seconds: float) -> Iterator[None]:
    """Runs this command line with the arguments, which has to call `take` and `keep`; within, whatever else is run with the
    same arguments has the same configs.

    Raises:
        ValueError: it failed, with the end of what it said, or did not end in so many seconds.
    """
    with TemporaryDirectory() as folder:
        os.environ[KEPT] = str(Path(folder) / "configs.json")
        try:
            command = [sys.executable, "-m", "experiments", *arguments]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            if ran.returncode:
                raise ValueError(f"without ncu: exit status {ran.returncode}: {ran.stderr.strip()[-400:]}")
            yield
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"without ncu: did not end in {seconds} s; expected a smaller shape or preset") from error
        finally:
            del os.environ[KEPT]


def take() -> None:
    """Kernels are tuned as they were in the process before, if there was one."""
    path = Path(os.environ.get(KEPT, ""))
    for name, configs in json.loads(path.read_text()).items() if path.is_file() else ():
        module, _, kernel = name.rpartition(".")
        tuner = getattr(import_module(module), kernel)
        tuner.cache |= {tuple(key): tuner.configs[number] for key, number in configs}


def keep() -> None:
    """What kernels have been tuned to, for the processes after this one, if there are any."""
    path = Path(os.environ.get(KEPT, ""))
    if path.name and not path.exists():
        path.write_text(json.dumps({name: [(key, tuner.configs.index(config)) for key, config in tuner.cache.items()]
                                    for name, tuner in _tuners().items() if tuner.cache}))


def _tuners() -> dict[str, Autotuner]:
    """By module and name, of all modules that are loaded; where several have one, by the last of them."""
    modules = [(name, vars(module)) for name, module in list(sys.modules.items()) if getattr(module, "__dict__", None)]
    found = {id(tuner): (f"{module}.{name}", tuner) for module, names in modules
             for name, tuner in list(names.items()) if issubclass(type(tuner), Autotuner)}  # unlike isinstance, asks it nothing
    return dict(found.values())
