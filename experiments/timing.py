"""Time, launches and memory of calls on the current GPU.

Everything here runs on the current stream, which must not be the default one: a CUDA graph cannot be captured there,
and autograd replays a backward on the stream of its forward.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from time import perf_counter

import torch
from torch.autograd import DeviceType

from .record import find_slow_clock
from .terminal import first_line

Call = Callable[[], object]

_FLUSH_BYTES = 256 * 2**20  # several times any L2
_COPY_BYTES = 2 * 2**30
_PRODUCT = 8192
_IN_A_ROW = 4  # the queue is as full after three calls as it gets in a loop of them, or empty for good


def wait_for_gpu() -> None:
    """Until the current GPU, if there is one, has done all that was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def side_stream():
    """Runs its body on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize()


def interleave(calls: dict, repeats: int, warmup: int, align: Call = lambda: None, ahead: bool = False) -> dict:
    """{name: call} -> {name: (p20, p50, p80) in microseconds} between events around each call, L2 flushed before it.

    Calls are timed in turn, so that a change of clocks meets all alike, and each behind itself: made a few times from an idle
    GPU, of which the last is timed. So launches are hidden as far as they would be in a loop of this call, whatever the others
    are: where the GPU is the slower side, as in training, wholly. While the GPU flushes, the host waits for as long, or else it
    would be that much ahead. align: launched before each call that is timed, such as what several GPUs wait for each other in.

    ahead: the host may be ahead, so that launches are hidden and the GPU's time is left: for CUDA graphs, whose launch is
    shorter than a flush.
    """
    flush, flush_us = _flush()
    for call in calls.values():
        for _ in range(warmup):
            call()
    events = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            for _ in range(_IN_A_ROW):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flushed = perf_counter() + flush_us / 1e6
                flush.zero_()
                while not ahead and perf_counter() < flushed:
                    pass
                align()
                start.record()
                call()
                end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: _percentiles([1e3 * a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def _flush() -> tuple[torch.Tensor, float]:
    """What to write to, to flush L2, and the microseconds it takes the GPU."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(10)]
    for event in events:  # queued up, but for the first of them
        flush.zero_()
        event.record()
    torch.cuda.synchronize()
    return flush, _percentiles([1e3 * a.elapsed_time(b) for a, b in pairwise(events)])[1]


def make_call(scan: Call, mode: str, leaves: Sequence[torch.Tensor],
              dout: torch.Tensor | Sequence[torch.Tensor] | None) -> Call:
    """What one measurement of a mode of `shapes.MODES` runs. scan: a forward; leaves: the inputs whose gradients are taken;
    dout: the gradient of its output, or of each if it has several; None without a backward.
    """
    match mode:
        case "fwd":
            return torch.no_grad()(scan)
        case "fwd_train":
            return scan
        case "bwd":
            return partial(torch.autograd.grad, scan(), leaves, dout, retain_graph=True)
        case "fwd_bwd":
            return lambda: torch.autograd.grad(scan(), leaves, dout)


def capture(call: Call) -> Call:
    """The call as a CUDA graph; calling the result replays it. The call must have run before."""
    graph = torch.cuda.CUDAGraph()
    # the mode of this thread alone: NCCL watches from another what ranks exchange
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        call()
    return graph.replay


def measure(calls: dict, repeats: int, warmup: int) -> dict:
    """{name: call} -> {name: the keys of a row that every bench measures}. Calls are timed side by side, and have run before.

    p20_us, p50_us and p80_us are of eager calls, graph_p50_us of the call in a CUDA graph: None where it cannot be captured,
    and `note` says why.
    """
    facts = {name: {"launches": count_launches(call), "peak_mib": round(measure_peak_mib(call), 1)}
             for name, call in calls.items()}
    eager = interleave(calls, repeats, warmup)
    graphs, notes = {}, {}
    for name, call in calls.items():
        try:
            graphs[name] = capture(call)
        except Exception as reason:
            notes[name] = f"no CUDA graph: {first_line(reason)}"
            torch.cuda.synchronize()
    replayed = interleave(graphs, repeats, warmup, ahead=True)
    slow = find_slow_clock()
    return {
        name: {**dict(zip(("p20_us", "p50_us", "p80_us"), eager[name], strict=True)),
               "graph_p50_us": replayed.get(name, (None,) * 3)[1], **facts[name], "note": notes.get(name), **slow}
        for name in calls}


def compare_times(p50_us: float, graph_p50_us: float | None, rival_us: float, rival_graph_us: float | None) -> dict:
    """A row's keys that compare median times with a rival's; of graphs, where both have one."""
    both = graph_p50_us is not None and rival_graph_us is not None
    return {"against_p50_us": rival_us, "against_graph_p50_us": rival_graph_us, "speedup": rival_us / p50_us,
            "graph_speedup": rival_graph_us / graph_p50_us if both else None}


def list_launches(call: Call, repeats: int = 1) -> list[tuple[str, float]]:
    """By the profiler, each kernel, copy and fill that calls launch: its name, and how long it runs in microseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return [(event.name, event.device_time) for event in profile.events()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation]


def count_launches(call: Call) -> int | None:
    """Kernels that one call launches; None where the profiler sees none at all."""
    return sum(not name.startswith(("Memcpy", "Memset")) for name, _ in list_launches(call)) or None


def measure_peak_mib(call: Call) -> float:
    """Most memory in MiB that one call holds at a time beyond what was held before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_saved_mib(call: Call) -> float:
    """Memory in MiB that a forward's result holds for its backward, beside its inputs and itself."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before - out.untyped_storage().nbytes()) / 2**20


def measure_copy_gbps(repeats: int = 20) -> float:
    """The memory ceiling: a device-to-device copy, counting bytes read and bytes written, in GB/s."""
    size = min(_COPY_BYTES, torch.cuda.mem_get_info()[0] // 8)
    source = torch.randint(256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    _, p50_us, _ = interleave({"copy": lambda: target.copy_(source)}, repeats, warmup=3)["copy"]
    return 2 * size / p50_us / 1e3


def measure_matrix_tflops(repeats: int = 20) -> float:
    """The matrix ceiling: torch's product of random bf16 matrices, 8192 cubed, in TFLOP/s."""
    a, b = (torch.randn(_PRODUCT, _PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    _, p50_us, _ = interleave({"product": lambda: a @ b}, repeats, warmup=3)["product"]
    return 2 * _PRODUCT**3 / p50_us / 1e6


def _percentiles(samples: list[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(samples).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist())
