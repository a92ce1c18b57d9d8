"""What a role holds in registers: tensors that may still depend on loads that are on their way, and integers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon import language as real

if TYPE_CHECKING:
    from tests.executor.memory import Access

TORCH = {real.float32: torch.float32, real.bfloat16: torch.bfloat16, real.float16: torch.float16, real.int16: torch.int16,
         real.int32: torch.int32, real.int64: torch.int64, real.int1: torch.bool}
TRITON = {dtype: name for name, dtype in TORCH.items()}


class Value:
    """A tensor in registers.

    `loads` are the loads from shared memory that it was computed from and that nothing has used yet. The compiler is free to
    move such a load down to the first use, so it counts as pending until then (`used`). Its value was read when it was issued:
    if something overwrites the memory in between, that is a fault, and no value matters.

    `layout` is Gluon's, where it is known: which thread has which elements.
    """

    __slots__ = ("_tensor", "layout", "loads")

    def __init__(self, tensor: Tensor, layout: object = None, loads: Iterable[Access] = ()):
        self._tensor, self.layout, self.loads = tensor, layout, loads

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    @property
    def dtype(self) -> real.dtype:
        return TRITON[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(Int, self.tensor.shape))

    def to(self, dtype: real.dtype, bitcast: bool = False) -> Value:
        wanted = TORCH[dtype]
        if dtype.is_int() and not self.tensor.dim() and not bitcast:
            return Int(self.take_tensor())
        return apply((lambda t: t.view(wanted)) if bitcast else (lambda t: t.to(wanted)), self)

    def take_tensor(self) -> Tensor:
        """The tensor, for something that leaves the registers: what it was loaded from has been read by then."""
        for load in self.loads:
            load.finished = True
        self.loads = ()
        return self.tensor

    def __bool__(self) -> bool:
        return bool(self.take_tensor())

    def __neg__(self) -> Value:
        return apply(operator.neg, self)


class Int(int):
    """An integer in registers, or one known when the kernel is compiled: the same numbers with Gluon's `to`.

    Control flow and addresses need it, so it is never pending. Quotients of negative numbers, which Triton rounds otherwise
    than Python, are refused.
    """

    def to(self, dtype: real.dtype) -> Int | Value:
        return self if dtype.is_int() else Value(torch.tensor(int(self), dtype=TORCH[dtype]))

    __hash__ = int.__hash__


def _of_values(function: Callable) -> tuple[Callable, Callable]:
    def forwards(self: Value, other) -> Value:
        return apply(function, self, other)

    def backwards(self: Value, other) -> Value:
        return apply(function, other, self)

    return forwards, backwards


def _of_ints(name: str) -> Callable:
    function = getattr(int, name)

    def operate(self: Int, other):
        result = function(self, other)
        return result if result is NotImplemented else Int(result)

    def divide(self: Int, other):
        assert not isinstance(other, int) or min(self, other) >= 0, f"{name} of {self!r}, {other!r}: Triton rounds towards zero"
        return operate(self, other)

    return divide if "div" in name or "mod" in name else operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne"):
    _forwards, _backwards = _of_values(getattr(operator, f"{_name}_" if _name in ("and", "or") else _name))
    setattr(Value, f"__{_name}__", _forwards)
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__r{_name}__", _backwards)
for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Int, f"__{_name}__", _of_ints(f"__{_name}__"))
    setattr(Int, f"__r{_name}__", _of_ints(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Int, f"__{_name}__", _of_ints(f"__{_name}__"))


def apply(function: Callable[..., Tensor], *args) -> Value:
    """function of the tensors among args, element by element, pending on whatever those are pending on."""
    tensors, layout, loads = [], None, []
    for arg in args:
        if isinstance(arg, Value):
            loads += [load for load in arg.loads if not load.finished]
            layout = layout or arg.layout
            arg = arg.tensor
        tensors.append(arg)
    return Value(function(*tensors), layout, loads)


def count(*args: int) -> Iterable[Int]:
    """Python's `range`, as a loop in a kernel counts."""
    return map(Int, range(*args))
