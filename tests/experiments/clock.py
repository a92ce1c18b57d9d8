"""Timing without a GPU: every call is made, and takes as long as a test says."""

import contextlib
from collections.abc import Callable, Hashable

import pytest

from experiments import record, timing


def install(patch: pytest.MonkeyPatch, us_of: Callable[[Hashable, bool], float], gpu: str | None = None) -> None:
    """us_of: microseconds of a call by its name, in a CUDA graph or not. gpu: that rows are of."""

    def interleave(calls, repeats, warmup, ahead=False):
        in_graphs = all(hasattr(call, "captured") for call in calls.values())
        for call in calls.values():
            call()
        return {name: (us - 1, us, us + 1) for name in calls for us in [us_of(name, in_graphs)]}

    def capture(call):
        def replay():
            return call()

        replay.captured = True
        return replay

    for name, fake in {"side_stream": contextlib.nullcontext, "measure_copy_gbps": lambda: 4000.0, "interleave": interleave,
                       "capture": capture, "count_launches": lambda call: 5, "measure_peak_mib": lambda call: 1.5,
                       "measure_saved_mib": lambda call: 0.5}.items():
        patch.setattr(timing, name, fake)
    patch.setattr(record, "environment", lambda: dict.fromkeys(record.ENVIRONMENT) | {"time": "2026", "gpu": gpu})
