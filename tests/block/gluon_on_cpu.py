"""Gluon kernels as plain Python on CPU tensors, a program at a time: what they compute, not how a GPU lays it out.

Triton's interpreter knows no Gluon. The walk's kernels use little of it: `imported` loads their modules anew with a stand-in
for the language, and a launch runs the kernel's source for each program.
"""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass
from unittest.mock import MagicMock, patch

import torch
import triton.experimental
from torch import Tensor

import ssd.runtime

_NAMES = "ssd.runtime.gluon_names"
_PROGRAM = [0]
_ASSEMBLY = {
    "ex2.approx.ftz.f32": torch.exp2,
    "rcp.approx.ftz.f32": torch.reciprocal,
    "max.NaN.f32": lambda v, least: v.clamp(min=least),
}


@dataclass
class _Type:
    element_ty: torch.dtype


class Pointer:
    """The elements of a tensor's memory, from or at offsets."""

    def __init__(self, t: Tensor, offsets: Tensor | int):
        self.t, self.offsets, self.dtype = t, offsets, _Type(t.dtype)

    def __add__(self, offsets) -> Pointer:
        return Pointer(self.t, self.offsets + offsets)

    def memory(self) -> Tensor:
        return self.t.as_strided((self.t.untyped_storage().nbytes() // self.t.itemsize,), (1,), 0)


class Buffer:
    """Shared memory."""

    def __init__(self, t: Tensor):
        self.t, self.dtype, self.shape = t, t.dtype, tuple(t.shape)

    def index(self, n) -> Buffer:
        return Buffer(self.t[int(n)])

    def permute(self, order) -> Buffer:
        return Buffer(self.t.permute(order))

    def reinterpret(self, dtype, shape, layout) -> Buffer:
        assert dtype == self.dtype
        return Buffer(self.t.view(shape))

    def load(self, layout) -> Tensor:
        return self.t.clone()

    def store(self, value: Tensor) -> None:
        assert value.shape == self.t.shape and value.dtype == self.dtype
        self.t.copy_(value)


def _load(pointers: Pointer, mask=None, other=None) -> Tensor:
    at = pointers.offsets
    mask = torch.ones(at.shape, dtype=torch.bool) if mask is None else mask.expand(at.shape)
    value = torch.full(at.shape, 0.0 if other is None else other, dtype=pointers.t.dtype)
    value[mask] = pointers.memory()[at[mask]]
    return value


def _store(pointers: Pointer, value: Tensor, mask=None) -> None:
    at = pointers.offsets
    mask = torch.ones(at.shape, dtype=torch.bool) if mask is None else mask.expand(at.shape)
    assert value.dtype == pointers.t.dtype
    pointers.memory()[at[mask]] = value[mask]


def _language() -> types.ModuleType:
    gl = types.ModuleType("triton.experimental.gluon.language")
    gl.constexpr, gl.shared_memory_descriptor, gl.barrier = lambda v: v, Buffer, lambda: None
    gl.float32, gl.int32, gl.int64 = torch.float32, torch.int32, torch.int64
    gl.SwizzledSharedLayout = gl.SliceLayout = gl.BlockedLayout = gl.DistributedLinearLayout = lambda *args, **kwargs: None
    gl.program_id = lambda axis: torch.tensor(_PROGRAM[0])
    gl.arange = lambda start, stop, layout: torch.arange(start, stop, dtype=torch.int32)
    gl.static_range = range
    gl.expand_dims = lambda t, axis: t.unsqueeze(axis)
    gl.zeros = lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype)
    gl.where = torch.where
    gl.abs = torch.abs
    gl.sum = lambda t, axis: t.sum(axis)
    gl.join = lambda a, b: torch.stack((a, b), -1)
    gl.split = lambda t: t.unbind(-1)
    gl.reshape = lambda t, shape: t.reshape(shape)
    gl.convert_layout = lambda t, layout: t
    gl.load, gl.store = _load, _store
    gl.allocate_shared_memory = lambda dtype, shape, layout: Buffer(torch.full(shape, float("nan"), dtype=dtype))
    gl.inline_asm_elementwise = lambda asm, constraints, args, *rest: _ASSEMBLY[asm.split()[0]](*args)
    return gl


class _Kernel:
    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args):
        return self.fn(*args)


def _launch(kernel: _Kernel, programs: int, *args, **config) -> None:
    config.pop("num_warps")
    given = [Pointer(a, a.storage_offset()) if isinstance(a, Tensor) else a for a in args]
    for number in range(programs):
        _PROGRAM[0] = number
        kernel.fn(*given, **config)


def imported(*names: str) -> list[types.ModuleType]:
    """Modules that launch Gluon kernels, loaded anew, which run them here. In the order in which they import each other."""
    gluon, gl = types.ModuleType("triton.experimental.gluon"), _language()
    gluon.jit, gluon.constexpr_function, gluon.language = _Kernel, lambda f: f, gl
    hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    hopper.tma = MagicMock()  # none of these kernels calls it
    stand_ins = {module.__name__: module for module in (gluon, gl, hopper)}
    package = importlib.import_module(names[0].rpartition(".")[0])
    with (patch.dict(sys.modules, stand_ins), patch.object(triton.experimental, "gluon", gluon), patch.dict(vars(package)),
          patch.dict(vars(ssd.runtime))):
        for name in (_NAMES, *names):
            sys.modules.pop(name, None)
        found = [importlib.import_module(name) for name in (_NAMES, *names)][1:]
    for module in found:
        if hasattr(module, "launch"):
            sums = module.launch
            module.launch = lambda kernel, *args, sums=sums, **config: (
                _launch if isinstance(kernel, _Kernel) else sums)(kernel, *args, **config)
    return found
