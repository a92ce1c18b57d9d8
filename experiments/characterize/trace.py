"""A trace of torch.profiler (`export_chrome_trace`): its kernels, each with what launched it, and the time of each class.

A kernel and its launch share a correlation id. The launch lies, on its thread, inside the CPU operators that made it, and
inside scopes; the scopes of another thread count too while they last, since autograd runs a backward on a thread of its own.
Replays of CUDA graphs have no such launches: traces are of eager runs.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .operators import classify
from .scopes import BACKWARD, FORWARD, LOSS, OPTIMIZER, PREFIX, STEP

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_PHASES = (BACKWARD, OPTIMIZER, FORWARD, LOSS)


@dataclass(frozen=True)
class Kernel:
    """One launch, copies and fills included.

    Attributes:
        start, us: microseconds; when it began on the device, and for how long it ran.
        ops: CPU operators around its launch, the innermost first.
        scopes: likewise.
    """

    name: str
    start: float
    us: float
    ops: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return classify(self.name, self.ops, self.scopes)

    @property
    def phase(self) -> str:
        """forward, backward, optimizer, loss, by the innermost of these scopes; else an empty string."""
        own = (scope.removeprefix(PREFIX) for scope in self.scopes)
        return next((name for name in own if name in _PHASES), "")


@dataclass(frozen=True)
class Trace:
    """Kernels of the steps in a trace, and how long these took in all, in microseconds."""

    kernels: tuple[Kernel, ...]
    total_us: float

    @property
    def idle_us(self) -> float:
        """Time in which no kernel ran."""
        return self.total_us - _measure_union(self.kernels)


def read(path: Path) -> Trace:
    """The trace in a file, .json or .json.gz; of its steps alone, if scopes named `step` are in it.

    Raises:
        ValueError: the file holds no such trace, or one without kernels.
    """
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    except (EOFError, KeyError, OSError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a trace of torch.profiler: {error or type(error).__name__}") from None
    launches = _launches(events)
    kernels = [Kernel(event["name"], event["ts"], event["dur"], *launches.get(event["args"].get("correlation"), ()))
               for event in events if event.get("cat") in _ON_DEVICE]
    if not kernels:
        raise ValueError(f"{path}: no kernels in it, expected a trace with ProfilerActivity.CUDA")
    steps = [(event["ts"], event["ts"] + event["dur"]) for event in events
             if _is_scope(event) and event["name"] == PREFIX + STEP]
    if not steps:
        steps = [(min(kernel.start for kernel in kernels), max(kernel.start + kernel.us for kernel in kernels))]
    inside = (kernel for kernel in kernels if any(start <= kernel.start < end for start, end in steps))
    return Trace(tuple(sorted(inside, key=lambda kernel: kernel.start)), sum(end - start for start, end in steps))


def _launches(events: list[dict]) -> dict[int, tuple[tuple[str, ...], tuple[str, ...]]]:
    """{correlation id: (operators, scopes)} around each launch, the innermost first."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in (*_LAUNCHES, "cpu_op") or _is_scope(event):
            threads[event["tid"]].append(event)
    scopes = [event for event in events if _is_scope(event)]
    found = {}
    for thread, own in threads.items():
        others = [event for event in scopes if event["tid"] != thread]
        around: list[dict] = []
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            while around and event["ts"] >= around[-1]["ts"] + around[-1]["dur"]:
                around.pop()
            if event["cat"] not in _LAUNCHES:
                around.append(event)
            elif (correlation := event["args"].get("correlation")) is not None:
                here = around[::-1]
                elsewhere = sorted((e for e in others if e["ts"] <= event["ts"] < e["ts"] + e["dur"]), key=lambda e: e["dur"])
                found[correlation] = (tuple(e["name"] for e in here if not _is_scope(e)),
                                      tuple(e["name"] for e in (*(e for e in here if _is_scope(e)), *elsewhere)))
    return found


def _is_scope(event: dict) -> bool:
    return event.get("cat") == "user_annotation"


def _measure_union(kernels: Iterable[Kernel]) -> float:
    """Length of the union of the kernels' times; they come by their start."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        end = kernel.start + kernel.us
        total += max(0.0, end - max(until, kernel.start))
        until = max(until, end)
    return total
