"""Traces: every one in `traces/`, the synthetic one exactly, one of torch's own on a CPU, and what is no trace.

traces/synthetic_step.json was written by hand in the format of torch.profiler. The others were recorded on an H200 and trimmed
to a step, of which they have the first launch of each kernel in each phase.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from experiments.characterize import scopes, trace
from experiments.characterize.operators import CLASSES

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json*"))
SYNTHETIC = Path(__file__).parent / "traces" / "synthetic_step.json"


def sum_by(found: trace.Trace, key: str) -> dict[str, float]:
    """Microseconds of the kernels by their kind or phase."""
    times = Counter()
    for kernel in found.kernels:
        times[getattr(kernel, key)] += kernel.us
    return dict(times)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_any_trace(path):
    found = trace.read(path)
    times = sum_by(found, "kind")
    assert times.get("other", 0.0) < 0.02 * found.total_us and found.idle_us >= 0
    assert times.keys() <= {*CLASSES} and {"forward", "backward", "optimizer"} <= sum_by(found, "phase").keys()


def test_synthetic_step():
    found = trace.read(SYNTHETIC)
    assert sum_by(found, "kind") == {
        "memcpy": 10, "embedding": 20, "gemm": 600, "norm": 30, "conv1d": 40, "ssm": 330, "conv": 60, "attention": 50,
        "elementwise": 45, "loss": 15, "reduce": 15, "optimizer": 78, "other": 5}
    assert found.idle_us == pytest.approx(116)
    assert found.total_us == pytest.approx(1414), "the step's, not the warm-up's before it"
    assert sum_by(found, "phase") == {"": 15, "forward": 575, "loss": 15, "backward": 615, "optimizer": 78}
    backward = trace.Trace(tuple(kernel for kernel in found.kernels if kernel.phase == "backward"), found.total_us)
    assert sum_by(backward, "kind") == {"gemm": 400, "ssm": 180, "elementwise": 20, "reduce": 15}


def test_a_backward_on_another_thread_is_found_by_time():
    kernels = {kernel.name: kernel for kernel in trace.read(SYNTHETIC).kernels}
    backward = kernels["hopper_group_kernel"]
    assert backward.scopes == ("ssd:backward", "ssd:step") and backward.ops[-1].startswith("autograd::engine")
    forward = kernels["bmm_chunk_kernel"]
    assert (forward.ops, forward.phase) == (("ssd::chunk_scan_fwd",), "forward")


def test_overlap_is_no_idle_time():
    kernels = tuple(trace.Kernel("bmm_chunk_kernel", start, us) for start, us in ((0, 10), (2, 3), (8, 4), (20, 5)))
    found = trace.Trace(kernels, total_us=30)
    assert found.idle_us == 30 - 12 - 5


def test_scopes_as_torch_writes_them(tmp_path):
    """What a trace of torch has of our scopes and operators is what the reader looks for; kernels are added by hand."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded, scopes.scope(scopes.STEP), scopes.scope(scopes.FORWARD):
        torch.ones(4) + 1
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    added = next(event for event in content["traceEvents"] if event["name"] == "aten::add")
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": 7}, "dur": 0.001}
    kernel = {"cat": "kernel", "name": "new_kernel", "args": {"correlation": 7}, "dur": 0.5, "tid": 7, "pid": 0}
    content["traceEvents"] += [added | launch, added | kernel]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump(content, file)
    (found,) = trace.read(tmp_path / "trace.json.gz").kernels
    assert (found.ops, found.scopes, found.kind, found.phase) == (
        ("aten::add",), ("ssd:forward", "ssd:step"), "elementwise", "forward")


@pytest.mark.parametrize("text, said", [("", "not a trace"), ("[]", "not a trace"), ("{}", "not a trace"),
                                        ('{"traceEvents": []}', "no kernels in it")])
def test_what_is_no_trace(tmp_path, text, said):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"a.json: {said}"):
        trace.read(path)


def test_a_scope_is_an_nvtx_range_too(monkeypatch):
    seen = []

    class NVTX:
        start_range = staticmethod(lambda name, domain: seen.append((name, domain)) or "mark")
        end_range = staticmethod(seen.append)

    for package in (NVTX, None):
        monkeypatch.setattr(scopes, "nvtx", package)
        with pytest.raises(KeyError), scopes.scope("forward"):
            raise KeyError
    assert seen == [("forward", "ssd"), "mark"], "closed though its body failed"
