"""What a second launch is taken for, with a stand-in for Triton: on a GPU every other test launches kernels again and again."""

from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from ssd.runtime import launch as module
from ssd.runtime.launch import launch


class OnGPU(torch.Tensor):
    is_cuda = True


class Compiled:
    """Counts launches of its own."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launched = []

    def run(self, x, y, z, stream, function, packed_metadata, metadata, enter, leave, *args):
        assert (stream, function, packed_metadata) == (7, "function", "metadata")
        self.launched.append(((x, y, z), (metadata, enter, leave), args))

    def launch_metadata(self, grid, stream, *args):
        return grid, stream, args


class Kernel:
    """Compiles at every launch that comes to it."""

    arg_names = ("x", "n", "strides", "BLOCK", "STAGES")

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def run(*args, **config):
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "CompiledKernel", Compiled)
    monkeypatch.setattr(module, "_found", {})
    monkeypatch.setattr(module, "get_current_stream", lambda: 7)
    return Kernel()


def tensor(offset=0, dtype=torch.float16, cls=OnGPU):
    return torch.zeros(64, dtype=dtype)[offset:].as_subclass(cls)


def test_the_same_again_is_launched_directly(kernel):
    for programs in (5, 7):
        x = tensor()
        launch(kernel, programs, x, 3, (1, 2), STAGES=2, BLOCK=64, num_warps=4)
    (compiled,) = kernel.compiled
    ((grid, hooks, (got, *others)),) = compiled.launched
    assert hooks == (None, None, None), "nobody is called who is not there"
    assert grid == (7, 1, 1) and got is x and others == [3, (1, 2), 64, 2], "parameters in the kernel's order, no options"


@pytest.mark.parametrize("other", [
    {"x": tensor(1)},  # another alignment
    {"x": tensor(dtype=torch.bfloat16)}, {"x": None}, {"n": 4}, {"strides": (1, 3)}, {"BLOCK": 32}, {"num_warps": 8}], ids=str)
def test_anything_else_is_left_to_triton(kernel, other):
    for given in ({}, other):
        given = {"x": tensor(), "n": 3, "strides": (1, 2), "BLOCK": 64, "STAGES": 2, "num_warps": 4} | given
        launch(kernel, 5, given.pop("x"), given.pop("n"), given.pop("strides"), **given)
    assert len(kernel.compiled) == 2 and not any(compiled.launched for compiled in kernel.compiled)


def test_profilers_are_called(kernel, monkeypatch):
    """Triton's hooks, a chain of functions or one function."""
    chain = SimpleNamespace(calls=[print])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", chain)
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", print)
    x = tensor()
    for _ in range(2):
        launch(kernel, 5, x, 3, (1, 2), STAGES=2, BLOCK=64)
    ((_, hooks, args),) = kernel.compiled[0].launched
    assert hooks == (((5, 1, 1), 7, args), chain, print) and args[0] is x


def test_another_kernel_is_another_key(kernel):
    second = Kernel()
    for k in (kernel, second):
        launch(k, 5, tensor(), 3, (1, 2), BLOCK=64, STAGES=2)
    assert len(second.compiled) == 1


def test_nothing_is_kept_of_a_launch_on_the_cpu(kernel):
    """The interpreter's, and those that only compile."""
    for _ in range(2):
        launch(kernel, 5, tensor(cls=torch.Tensor), 3, (1, 2), BLOCK=64, STAGES=2)
    assert len(kernel.compiled) == 2 and not module._found


def test_what_is_kept_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "_MOST", 3)
    for n in range(8):
        launch(kernel, 5, tensor(), n, (1, 2), BLOCK=64, STAGES=2)
    assert len(module._found) <= 3
