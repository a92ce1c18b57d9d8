"""Modules that stand in for Gluon's language, and the global memory that kernels see.

What says where elements lie (layouts) is Gluon's own and means nothing here. Names that differ between versions of Triton are
there in all of their forms.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia import hopper as real_hopper

from ssd.types import LEAST_Z
from tests.executor import copies, products
from tests.executor.barriers import Barrier, BarrierArray
from tests.executor.memory import UNNAMED, Allocation, Buffer, fence, meet
from tests.executor.schedule import Fault, block
from tests.executor.values import TORCH, TRITON, Int, Value, apply, count

NAMES = ("triton.experimental.gluon", "triton.experimental.gluon.language", "triton.experimental.gluon.language.nvidia",
         "triton.experimental.gluon.language.nvidia.hopper")
_LAYOUTS = ("SliceLayout", "BlockedLayout", "DistributedLinearLayout", "SwizzledSharedLayout",
            "NVMMADistributedLayout", "DotOperandLayout")
PREFETCH = "cp.async.bulk.prefetch.L2.global"


def _bits_of_both(a: Tensor, b: Tensor) -> Tensor:
    return (a.view(torch.int16) & b.view(torch.int16)).view(a.dtype)


def prefetch(pointer: Pointer, nbytes: int) -> Tensor:
    """Changes nothing but what is in L2: asserts that all of it lies in the tensor, which is contiguous."""
    memory, first = pointer.t, int(pointer.offsets - pointer.t.storage_offset()) * pointer.t.itemsize
    assert first % 16 == 0 and nbytes % 16 == 0, f"prefetch of {nbytes} bytes from byte {first} on: not in steps of 16"
    assert 0 <= first < first + nbytes <= memory.nbytes, f"prefetch of {nbytes} bytes from byte {first} on of {memory.nbytes}"
    return torch.tensor(0)


def _let_next_begin() -> Tensor:
    """The next launch, which begins at the end of this one otherwise, and may count on the end of all launches before this."""
    if not block().running.alone:
        raise Fault(f"{block().running.line()}: lets the next launch begin, but has not waited for the end of the one before")
    block().lets_next_begin = True
    return torch.tensor(0)


def _wait_for_last() -> Tensor:
    block().running.alone = block().has_waited = True
    return torch.tensor(0)


def _apply_to_one(function: Callable[[Tensor], Tensor], v: Value | float) -> Value:
    """`apply` of a tensor or of a number of Python's."""
    return apply(function, v if isinstance(v, Value) else torch.tensor(v))


def _run_assembly(asm: str, constraints: str, args: list, *rest: object, **more: object) -> Value:
    return apply(next(function for name, function in ASSEMBLY.items() if f"{name} " in asm), *args)


def _bound_size(v: Value, least: float = LEAST_Z) -> Tensor:
    return torch.copysign(torch.as_tensor(v).abs().clamp(min=least), torch.as_tensor(v))


def _pack_weights(w: Tensor) -> Tensor:
    """Of each number the high and the low part, as the bits of one of fp32."""
    high = w.bfloat16()
    parts = torch.stack([(w - high.float()).bfloat16(), high], -1)  # as bytes lie in memory
    return parts.view(torch.float32).squeeze(-1)


def _weigh(x: Tensor, w: Tensor) -> Tensor:
    low, high = w.contiguous().view(torch.bfloat16).unflatten(-1, (*w.shape[-1:], 2)).unbind(-1)
    return torch.addcmul((x * low).double(), x.double(), high.double()).bfloat16()  # torch has no fma that rounds once


ASSEMBLY = {  # by an instruction; the first that is found
    "cvt.rn.bf16x2.f32": _pack_weights,
    "fma.rn.bf16x2": _weigh,
    "shl.b32": lambda y, x, factor: torch.addcmul(y, x.float(), torch.as_tensor(factor)),
    "and.b32": _bits_of_both,
    PREFETCH: prefetch,
    "ex2.approx.ftz.f32": torch.exp2,
    "lg2.approx.f32": torch.log2,
    "griddepcontrol.launch_dependents;": _let_next_begin,
    "griddepcontrol.wait;": _wait_for_last,
    "rcp.approx.ftz.f32": torch.reciprocal,
    "max.NaN.xorsign.abs.bf16x2": _bound_size,
    "max.NaN.xorsign.abs.f32": _bound_size,
    "max.NaN.f32": lambda v, least: torch.as_tensor(v).clamp(min=least),
    "min.NaN.f32": lambda v, most: torch.as_tensor(v).clamp(max=most),
}


class Jit:
    """A function in Gluon: the same function in Python."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Pointer:
    """Elements of a tensor's memory, at offsets."""

    def __init__(self, t: Tensor, offsets: Value | Int):
        self.t, self.offsets = t, offsets
        self.dtype = types.SimpleNamespace(element_ty=TRITON[t.dtype])

    def __add__(self, offsets: Value | Int) -> Pointer:
        return Pointer(self.t, self.offsets + offsets)

    def __sub__(self, offsets: Value | Int) -> Pointer:
        return Pointer(self.t, self.offsets - offsets)

    def elements(self) -> tuple[Tensor, Tensor | int]:
        """All of the memory, and the offsets in it, or the one."""
        memory = self.t.as_strided((self.t.untyped_storage().nbytes() // self.t.itemsize,), (1,), 0)
        return memory, self.offsets.take_tensor() if isinstance(self.offsets, Value) else int(self.offsets)


def _load(pointers: Pointer, mask: Value | None = None, other: float = 0) -> Value | Int:
    block().touch(pointers.t, writes=False)
    memory, at = pointers.elements()
    layout = getattr(pointers.offsets, "layout", None)
    if mask is None and isinstance(at, int):
        assert at >= 0, "an address before the tensor's memory"
        value = memory[at]
        return Value(value.clone(), layout) if value.is_floating_point() else Int(value)
    at = torch.as_tensor(at)
    if mask is None:
        assert int(at.min()) >= 0, "an address before the tensor's memory"
        value = memory[at]
    else:
        kept = mask.take_tensor().expand(at.shape)
        value = torch.full(at.shape, other, dtype=memory.dtype)
        value[kept] = memory[at[kept]]
    return Int(value) if value.dim() == 0 and not value.is_floating_point() else Value(value, layout)


def _store(pointers: Pointer, value: Value, mask: Value | None = None) -> None:
    block().touch(pointers.t, writes=True)
    memory, at = pointers.elements()
    new, at = value.take_tensor(), torch.as_tensor(at)
    assert new.dtype == memory.dtype, f"{new.dtype} stored into {memory.dtype}"
    new = new.expand(at.shape)
    if mask is not None:
        kept = mask.take_tensor().expand(at.shape)
        at, new = at[kept], new[kept]
    assert bool((at >= 0).all()), "an address before the tensor's memory"
    memory[at] = new


def _where(condition: Value | Int, yes: Value | Int, no: Value | Int) -> Value | Int:
    if isinstance(condition, int):
        return yes if condition else no
    return apply(torch.where, condition, yes, no)


def _expand_dims(value: Value, axis: int) -> Value:
    layout = value.layout.parent if isinstance(value.layout, real.SliceLayout) else None
    return Value(value.tensor.unsqueeze(axis), layout, value.loads)


def _reduce(function: Callable, value: Value, axis: int) -> Value:
    return Value(function(value.tensor, axis), value.layout and real.SliceLayout(axis, value.layout), value.loads)


def _reshape(value: Value, shape: list[int]) -> Value:
    return Value(value.tensor.reshape(tuple(shape)), None, value.loads)


def _permute(value: Value, order: tuple[int, ...]) -> Value:
    return Value(value.tensor.permute(tuple(order)), None, value.loads)


def _join(a: Value, b: Value) -> Value:
    return _reshape(apply(lambda a, b: torch.stack((a, b), -1), a, b), [*a.shape, 2])


def _minimum(a: Value | Int, b: Value | Int) -> Value | Int:
    return Int(min(a, b)) if isinstance(a, int) and isinstance(b, int) else apply(torch.minimum, a, b)


def _split(value: Value) -> tuple[Value, Value]:
    return tuple(Value(value.tensor[..., n], None, value.loads) for n in range(2))


def _static_assert(condition: bool, message: str = "") -> None:
    assert condition, message


def _allocate(dtype: real.dtype, shape: list[int], layout: object) -> Buffer | BarrierArray:
    if isinstance(layout, real_hopper.mbarrier.MBarrierLayout):
        return BarrierArray(shape[0])
    allocation = Allocation(dtype, shape)
    return Buffer(allocation, allocation.elements)


def _init(barrier: Barrier, count: int) -> None:
    barrier.init(count)
    block().barriers.append(barrier)


def _arrive(barrier: Barrier, *, count: int = 1) -> None:
    barrier.arrive(block().pause(), count)


def _expect(barrier: Barrier, bytes: int) -> None:
    barrier.expect(block().pause(), bytes)


def _fence() -> None:
    """Shows the async proxy what the role has stored; before the roles begin, the mbarriers that were made."""
    role = block().pause()
    fence(role)
    if not role.is_partition:
        for barrier in block().barriers:
            barrier.fenced = True


def _meet() -> None:
    meet(block().pause())


def _warp_specialize(parts: list[tuple[Jit, tuple]], warps: list[int], registers: list[int] | None = None) -> None:
    assert len(parts) - 1 == len(warps) == len(registers or warps), "warps and registers of each role but the first"
    _name(sys._getframe(1).f_locals)
    block().specialize([(jit.function, args) for jit, args in parts])


def _name(local: dict[str, object]) -> None:
    """Calls shared memory and mbarriers as the kernel does, for what is said of faults."""
    for name, thing in local.items():
        if isinstance(thing, Buffer):
            thing.allocation.name = name
        elif isinstance(thing, Barrier):
            thing.name = name
        elif isinstance(thing, BarrierArray):
            for n, barrier in enumerate(thing.barriers):
                barrier.name = f"{name}[{n}]"
        elif hasattr(thing, "_fields"):
            parts = thing._asdict().items()
            _name({f"{name}.{field}": part for field, part in parts
                   if not isinstance(part, Buffer) or part.allocation.name == UNNAMED})


@functools.cache
def _choose_layout(shape: tuple[int, ...], dtype: real.dtype) -> real.NVMMASharedLayout:
    return real.NVMMASharedLayout.get_default_for(list(map(int, shape)), dtype)


def _language() -> types.ModuleType:
    gl = types.ModuleType(NAMES[1])
    gl.constexpr = lambda value: Int(value) if type(value) is int else value
    for dtype in TRITON.values():
        setattr(gl, str(dtype).replace("fp", "float").replace("bf16", "bfloat16"), dtype)
    for name in _LAYOUTS:
        setattr(gl, name, getattr(real, name))
    gl.NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda shape, dtype: _choose_layout(tuple(shape), dtype))
    gl.program_id, gl.num_programs = lambda axis: Int(block().number), lambda axis: Int(block().programs)
    gl.static_range, gl.static_assert = count, _static_assert
    gl.arange = lambda start, stop, layout: Value(torch.arange(start, stop), layout)
    gl.zeros = lambda shape, dtype, layout: Value(torch.zeros(tuple(shape), dtype=TORCH[dtype]), layout)
    gl.where, gl.minimum = _where, _minimum
    gl.sum, gl.max = (functools.partial(_reduce, function) for function in (torch.sum, torch.amax))
    gl.expand_dims, gl.reshape, gl.permute, gl.join, gl.split = _expand_dims, _reshape, _permute, _join, _split
    for name in ("abs", "exp2", "rsqrt"):
        setattr(gl, name, functools.partial(_apply_to_one, getattr(torch, name)))
    gl.convert_layout = lambda value, layout: Value(value.tensor, layout, value.loads)
    gl.inline_asm_elementwise = _run_assembly
    gl.load, gl.store = _load, _store
    gl.allocate_shared_memory, gl.warp_specialize, gl.shared_memory_descriptor = _allocate, _warp_specialize, Buffer
    gl.tensor = Value
    gl.barrier = gl.thread_barrier = _meet
    return gl


def _hopper() -> types.ModuleType:
    hopper, mbarrier, tma = (types.ModuleType(f"{NAMES[3]}{end}") for end in ("", ".mbarrier", ".tma"))
    mbarrier.MBarrierLayout = real_hopper.mbarrier.MBarrierLayout
    mbarrier.init, mbarrier.arrive, mbarrier.expect = _init, _arrive, _expect
    mbarrier.wait = lambda barrier, phase: barrier.wait(phase)
    tma.async_copy_global_to_shared = tma.async_load = copies.copy_in
    tma.async_copy_shared_to_global = tma.async_store = copies.copy_out
    tma.store_wait = copies.wait_for_copies_out
    hopper.mbarrier, hopper.tma, hopper.fence_async_shared = mbarrier, tma, _fence
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = products.multiply, products.wait_for_products
    return hopper


def stand_ins() -> dict[str, types.ModuleType]:
    """By the names under which they are imported."""
    def jit(function: Callable | None = None, **options) -> Jit | Callable:
        return jit if function is None else Jit(function)

    modules = dict(zip(NAMES, (types.ModuleType(NAMES[0]), _language(), types.ModuleType(NAMES[2]), _hopper()), strict=True))
    gluon = modules[NAMES[0]]
    gluon.jit, gluon.constexpr_function = jit, lambda function: function
    for outer, inner in pairwise(NAMES):
        setattr(modules[outer], inner.rpartition(".")[2], modules[inner])
    return modules
