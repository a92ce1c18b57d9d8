"""Triton's interpreter, made about three times as fast: it does without what says nothing new.

It prepares the language again in every call of a function inside a kernel, where once for each module does. It watches sums
and products of integers for overflows, which only tensors larger than any here could have. It makes the type of every value
anew, where a kernel has few different ones. And it makes operands alike again that are so, and constants that it has made.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, wraps

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_LISTS = list, tuple, core.tuple
_NUMBERS = int, float, bool


class _Scope:
    """What a launch changed in the language, to be undone after it."""

    def __init__(self, inner, prepared: set[int]):
        self.inner, self.prepared = inner, prepared

    def restore(self) -> None:
        self.prepared.clear()
        self.inner.restore()


def quicken() -> None:
    """From now on, in this process."""
    patch, prepared = interpreter._patch_lang, set()

    def patch_once(function):
        module = id(function.__globals__)
        if module in prepared:
            return None  # a call inside a kernel does not look at it
        prepared.add(module)
        return _Scope(patch(function), prepared)

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _find_once(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _look_into_lists(core._unwrap_if_constexpr)
    core.block_type.__init__ = _make_once(core.block_type.__init__)
    core.tensor.__init__ = _set_tensor
    interpreter.TensorHandle.__post_init__ = lambda self: None  # a check of its own results
    interpreter._patch_attr, interpreter._patch_builtin = _bind_semantic, _patch_builtins
    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(TritonSemantic, name, _remember_types(getattr(TritonSemantic, name)))


def _find_once(find_dtype: Callable) -> Callable:
    """find_dtype, which looks into a table that it makes each time, but for pointers."""
    found = cache(find_dtype)
    return lambda dtype: (find_dtype if dtype.scalar.is_ptr() else found)(dtype.scalar)


def _look_into_lists(unwrap: Callable) -> Callable:
    """unwrap, which asks four times what a value is, for lists and tuples alone."""
    def unwrap_quickly(value):
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, _LISTS) else value

    return unwrap_quickly


@cache
def _find_builtins(package: object) -> list[tuple[str, Callable]]:
    return [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtins(package: object, builder: object, scope: object) -> None:
    """As they were when they were first looked for, which was before any was patched."""
    for name, member in _find_builtins(package):
        _bind_semantic(package, name, member, builder, scope)


def _bind_semantic(obj: object, name: str, member: Callable, builder: object, scope: object) -> None:
    """Gives a builtin its last argument, which nothing here leaves out, without a look at the others."""
    function = getattr(member, "__wrapped__", member)

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _remember_types(make_alike: Callable) -> Callable:
    """make_alike, which gives both operands of an operation types that fit: it finds out which once for each pair of types,
    and makes a number a tensor once for each type of the other operand.
    """
    constants, fitting = {}, {}

    def make_quickly(self, lhs, rhs, *rules):
        left, right = type(lhs), type(rhs)
        if left is core.tensor and right is core.tensor:
            key = lhs.type.name, rhs.type.name, rules
            if key not in fitting:
                fitting[key] = tuple(t.type for t in make_alike(self, lhs, rhs, *rules))
            return tuple(map(partial(_give_type, self), (lhs, rhs), fitting[key]))
        if (left in _NUMBERS and right is core.tensor) or (right in _NUMBERS and left is core.tensor):
            number, tensor = (lhs, rhs) if right is core.tensor else (rhs, lhs)
            key = number, type(number), math.copysign(1, number), tensor.type.name, left, rules
            if key not in constants:
                alike = make_alike(self, lhs, rhs, *rules)
                if (alike[1] if number is lhs else alike[0]) is not tensor:
                    return alike
                constants[key] = alike[0] if number is lhs else alike[1]
            return (constants[key], tensor) if number is lhs else (tensor, constants[key])
        return make_alike(self, lhs, rhs, *rules)

    return make_quickly


def _give_type(semantic: TritonSemantic, t: core.tensor, wanted: core.dtype) -> core.tensor:
    """The tensor cast and broadcast."""
    if t.type.name == wanted.name:
        return t
    if t.dtype.name != wanted.scalar.name:
        t = semantic.cast(t, wanted.scalar)
    if t.type.name == wanted.name:
        return t
    data = np.broadcast_to(t.handle.data, [size.value if type(size) is core.constexpr else size for size in wanted.shape])
    return core.tensor(interpreter.TensorHandle(data, t.handle.dtype), wanted)


def _make_once(set_type: Callable) -> Callable:
    """The constructor of types of blocks, which computes what one consists of once for each dtype and shape."""
    made = {}

    @wraps(set_type)
    def set_type_once(self, element_ty, shape):
        key = element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in made:
            set_type(self, element_ty, shape)
            made[key] = vars(self).copy()
        vars(self).update(made[key], element_ty=element_ty)

    return set_type_once


def _set_tensor(self, handle, type) -> None:
    """The constructor of tensors. Those of one shape share it: nothing changes a shape."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _describe_shape(*(type.shape if type.is_block() else ()))


@cache
def _describe_shape(*sizes: int) -> tuple[core.tuple, core.constexpr]:
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
