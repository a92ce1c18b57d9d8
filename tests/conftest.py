"""Tests run on a GPU if there is one, else in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import re
import shlex
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or the threads of one worker wait for the cores of another

import pytest
import torch
from filelock import FileLock

if "PYTEST_XDIST_WORKER" in os.environ:
    from tests.gpus import number_own_first

    number_own_first(os.environ["PYTEST_XDIST_WORKER"])

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.interpreter import quicken

    quicken()

from tests.inputs import OURS
from tools import tritons

_OUTCOMES = ("passed", "failed", "skipped")
_REPORTED_LINES = 12
_KEPT_BYTES = 1 << 30
_MUCH_BYTES = 64 << 30  # that a test with `much_memory` may take
_started = time.monotonic()


def group(nodeid: str) -> str:
    """What tests share that differ in nothing but the variant: the nodeid without it."""
    return re.sub(rf"(?<=[\[-])({'|'.join(OURS)})(?=[\]-])", "", nodeid)


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="K/N", help="run the K-th of N parts of the tests, each group of variants in one")
    parser.addoption("--row", action="store_true",
                     help="leave a row also where paths or -k choose some of the tests, or where there is no GPU")
    parser.addoption("--triton", metavar="V,V", type=tritons.parse_versions, default=(),
                     help="run the tests of compilation with these versions of Triton as well, or with all")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu(count=1): needs that many CUDA devices")
    config.addinivalue_line("markers", "other_tritons: compiles with the oldest and the newest Triton, not the locked one")
    config.addinivalue_line("markers", "slow: takes a minute or more, so it begins first, or one worker ends with it alone")
    config.addinivalue_line("markers", "rare: compiles what differs little from others, or is less used; runs with --triton")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))


def pytest_generate_tests(metafunc):
    if "triton" in metafunc.fixturenames:
        marked = metafunc.definition.get_closest_marker("other_tritons")
        versions = tritons.PINNED if marked else (None, *metafunc.config.option.triton)
        metafunc.parametrize("triton", versions, indirect=True, ids=lambda version: version or "locked")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: "test_compile.py" not in item.nodeid and item.get_closest_marker("slow") is None)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            wanted = marker.kwargs.get("count", 1)
            if wanted > found:
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {found}"))
    if config.option.shard:
        number, count = map(int, config.option.shard.split("/"))
        dealt = [zlib.crc32(group(item.nodeid).encode()) % count == number - 1 for item in items]
        config.hook.pytest_deselected(items=[item for item, kept in zip(items, dealt, strict=True) if not kept])
        items[:] = [item for item, kept in zip(items, dealt, strict=True) if kept]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """On a GPU one worker runs a whole group: its variants share kernels, which several workers would compile at once.

    Without a GPU nothing is compiled, and groups would only be harder to share out evenly. It is not left to xdist's marks
    and `--dist=loadgroup`: xdist 3.8 writes the mark into an attribute of the item that pytest 9.2 no longer reads.
    """
    if not torch.cuda.is_available() or config.getvalue("dist") != "load":
        return None
    config.option.loadscopereorder = False  # which would put the largest groups first, and with them the slowest last
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return ByGroup(config, log)


class _Failures:
    """Prints each failure when it happens, so that a run that is killed has told what failed."""

    def __init__(self, config: pytest.Config):
        self.config = config

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report):
        result = yield
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line("")  # ends the line of dots
            terminal.write_line(f"{'FAILED' if report.when == 'call' else 'ERROR'} {report.nodeid}", red=True)
            for line in report.longreprtext.splitlines()[-_REPORTED_LINES:]:
                terminal.write_line(f"  {line}")
            terminal.flush()
        return result


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def triton(request) -> str | None:
    """The version of Triton that a test compiles with, in a process of its own; None for the locked one."""
    if reason := request.param and tritons.explain_missing(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_recordings():
    """What a test patches must not be missed because another recorded the call without it."""
    from ssd.runtime import replay

    replay.clear()


@pytest.fixture(autouse=True)
def _memory():
    """What torch keeps of a large test's memory is other workers' to have."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def one_thread():
    """For small tensors: on cores shared with other tests, more threads wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def much_memory():
    """For a test that takes a large part of a GPU's memory: one worker of each GPU at a time has one."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    with FileLock(Path(tempfile.gettempdir()) / f"ssd-tests-much-memory{gpu}.lock"):
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else _MUCH_BYTES
        if "PYTEST_XDIST_WORKER" in os.environ and free < _MUCH_BYTES:
            pytest.skip(f"needs {_MUCH_BYTES >> 30} GiB of the GPU's memory, {free >> 30} are free: run it without -n")
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def poison():
    """Fresh memory holds NaN, or 77 where a dtype has none, so that a result left unwritten shows."""
    from experiments.fuzz.poison import poison_memory

    with poison_memory():
        yield


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """A run of all the tests, or of a shard of them, leaves a row beside the measurements.

    So it is on a GPU. A run of some tests leaves one with --row, and `only` says which they were chosen by; so does any run
    without a GPU. Workers of xdist leave none, nor does a run that was broken off.
    """
    if hasattr(config, "workerinput"):
        return
    chosen = _describe_choice(config)
    partial = any(getattr(config.option, name, None) for name in ("lf", "collectonly", "maxfail"))
    partial |= exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    unasked = (chosen or not torch.cuda.is_available()) and not config.option.row
    if partial or unasked:
        return
    from experiments import record

    only = {"only": chosen} if chosen else {}
    if config.option.triton:
        only["only"] = f"{chosen} --triton {','.join(config.option.triton)}".strip()
    shard = {"shard": config.option.shard} if config.option.shard else {}
    counts = {outcome: len(terminalreporter.stats.get(outcome, ())) for outcome in _OUTCOMES}
    counts["failed"] += len(terminalreporter.stats.get("error", ()))
    seconds = round(time.monotonic() - _started, 1)
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ()))
    path = record.append({"bench": "tests", **only, **shard, **counts, "reasons": dict(reasons.most_common()),
                          "seconds": seconds, "cores": os.cpu_count(), **record.environment()})
    terminalreporter.write_line(f"row added to {path}")


def _describe_choice(config: pytest.Config) -> str:
    """What some of the tests were chosen by, as one would type it; nothing if all of them run."""
    given = {"-k": [config.option.keyword], "-m": [config.option.markexpr], "--deselect": config.option.deselect or [],
             "--ignore": config.option.ignore or []}
    paths = [os.path.relpath(path, config.rootpath) for path in config.args]
    whole = paths == [os.path.relpath(Path(__file__).parent, config.rootpath)]
    options = (word for flag, values in given.items() for value in values if value for word in (flag, value))
    return shlex.join([*([] if whole else paths), *options])
