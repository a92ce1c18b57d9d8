"""Named stretches of a step that profilers see: a range for Nsight (NVTX) and one for torch's profiler, by one name."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import record_function

PREFIX = "ssd:"  # of names in torch's traces, and the NVTX domain
STEP, FORWARD, BACKWARD, OPTIMIZER, LOSS = "step", "forward", "backward", "optimizer", "loss"

try:
    import nvtx
except ImportError:  # optional: without it Nsight's time line has no phases, torch's traces have them all the same
    nvtx = None


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Names what is launched inside.

    NVTX's range is one from start to end, not one that is pushed and popped: those belong to a thread, and autograd launches
    a backward from another. In a trace of torch's, `Trace` finds the scopes of other threads by time.
    """
    mark = nvtx.start_range(name, domain=PREFIX.rstrip(":")) if nvtx else None
    try:
        with record_function(PREFIX + name):
            yield
    finally:
        if mark is not None:
            nvtx.end_range(mark)
