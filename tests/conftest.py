"""Tests run on a GPU if there is one, else in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

_OUTCOMES = ("passed", "failed", "skipped")
_started = time.monotonic()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu(count=1): needs that many CUDA devices")


def pytest_collection_modifyitems(items):
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            wanted = marker.kwargs.get("count", 1)
            if wanted > found:
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {found}"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory holds NaN wherever a dtype has one, so that a result left unwritten shows."""

    def poisoned(allocate):
        def allocate_poisoned(*args, **kwargs):
            t = allocate(*args, **kwargs)
            return t.fill_(float("nan")) if t.is_floating_point() else t

        return allocate_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def pytest_terminal_summary(terminalreporter, config):
    """On a GPU, a run of all the tests leaves a row of its outcome beside the measurements; workers of xdist do not."""
    part = any(getattr(config.option, name, None) for name in ("keyword", "markexpr", "lf", "collectonly"))
    whole = [Path(path).resolve() for path in config.args] == [Path(__file__).parent] and not part
    if not torch.cuda.is_available() or hasattr(config, "workerinput") or not whole:
        return
    from experiments import record

    counts = {outcome: len(terminalreporter.stats.get(outcome, ())) for outcome in _OUTCOMES}
    counts["failed"] += len(terminalreporter.stats.get("error", ()))
    seconds = round(time.monotonic() - _started, 1)
    path = record.append({"bench": "tests", **counts, "seconds": seconds, **record.environment()})
    terminalreporter.write_line(f"row added to {path}")
