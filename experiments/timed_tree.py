"""The process behind `regress` that times the operator of the tree in whose folder it is started.

In: a line of JSON that says what to call, or {} to time it once more. Out: {} when the call is ready, or its median times in
microseconds. `timing`, `shapes` and `inputs` are those beside this file; `ssd` is the tree's.
"""

import json
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from types import ModuleType

import torch

from ssd import ssd_chunk_scan


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed otherwise
    beside = ModuleType("beside")
    beside.__path__ = [str(Path(__file__).parent)]
    sys.modules["beside"] = beside
    timing, shapes, inputs = (import_module(f"beside.{name}") for name in ("timing", "shapes", "inputs"))
    with timing.side_stream():
        for line in sys.stdin:
            question = json.loads(line)
            if question:
                repeats = question.pop("repeats")
                call = _make_call(timing, shapes, inputs, **question)
                for _ in range(3):  # compiles, records, replays
                    call()
                calls = {"p50_us": call, "graph_p50_us": timing.capture(call)}
                print("{}", file=out)
            else:
                times = {key: timing.interleave({key: each}, repeats, warmup=3, ahead=key == "graph_p50_us")[key][1]
                         for key, each in calls.items()}
                print(json.dumps(times | {"host_us": _host_us(call, repeats)}), file=out)


def _make_call(timing: ModuleType, shapes: ModuleType, inputs: ModuleType, shape: str, mode: str, variant: str, dtype: str,
               chunk_size: int):
    (sizes,) = shapes.find_shapes(shape)
    given = inputs.make_inputs(sizes, inputs.DTYPES[dtype], "cuda", requires_grad=True)
    leaves, dout = [t for t in given.values() if isinstance(t, torch.Tensor)], torch.randn_like(given["x"])
    scan = partial(ssd_chunk_scan, **given, chunk_size=chunk_size, variant=variant)
    return timing.make_call(scan, mode, leaves, dout)


def _host_us(call, repeats: int) -> float:
    """Median microseconds until a call returns, made while the GPU has nothing to do."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        call()
        found.append(1e6 * (perf_counter() - start))
    return median(found)


if __name__ == "__main__":
    main()
