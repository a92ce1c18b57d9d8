"""A stand-in for Triton and the GPU: calls are recorded and replayed on CPU tensors."""

from types import SimpleNamespace

import torch

from ssd.runtime import launch, replay


class Compiled:
    """Any kernel, which computes nothing: memory that nobody writes takes none."""

    function = packed_metadata = None
    metadata = SimpleNamespace(launch_pdl=False)

    def run(self, *args):
        pass


def record_without_gpu(monkeypatch, compiled: type = Compiled, get_stream=lambda device=None: 7) -> None:
    """compiled: the class of kernels as Triton's launches return them; by default no launch comes to Triton."""
    monkeypatch.setattr(launch, "CompiledKernel", compiled)
    monkeypatch.setattr(launch, "_found", {})
    if compiled is Compiled:
        monkeypatch.setattr(launch, "_compile_and_launch", lambda *args: Compiled())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for where in (launch, replay):
        monkeypatch.setattr(where, "get_current_stream", get_stream)
    monkeypatch.setattr(replay, "empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(replay, "_recordings", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
