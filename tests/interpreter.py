"""Triton's interpreter, made about five times as fast: it does without what says nothing new.

It prepares the language again in every launch and in every call of a function inside a kernel, where once for each module
does. It watches sums and products of integers for overflows, which only tensors larger than any here could have. It makes the
type of every value anew, where a kernel has few different ones. It makes operands alike again that are so, and constants that
it has made. And it asks of every operation anew which one of NumPy's it comes to, which types alone decide.
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
_PLAIN = {"int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64"}  # NumPy's
_OPERATIONS = ("add", "sub", "mul", "truediv", "mod", "minimum", "maximum", "and_", "or_", "xor_", "less_than", "less_equal",
               "greater_than", "greater_equal", "equal", "not_equal")


class _Kept:
    """A scope that leaves what a launch changed in the language: here nothing else uses it."""

    def restore(self) -> None:
        pass


def quicken() -> None:
    """From now on, in this process."""
    patch, prepared, kept = interpreter._patch_lang, {}, _Kept()

    def patch_once(function):
        module = function.__globals__
        if id(module) not in prepared:
            prepared[id(module)] = module, patch(function)
        return kept

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
    for name in _OPERATIONS:
        setattr(TritonSemantic, name, _plan_once(getattr(TritonSemantic, name)))
    TritonSemantic.cast = _cast_once(TritonSemantic.cast)
    interpreter.InterpreterBuilder.create_expand_dims = _expand_dims


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


def _plan_once(operate: Callable) -> Callable:
    """operate, of two operands, which plans once for each pair of types, or of a number and a type, what NumPy has to do."""
    plans = {}

    def operate_by_plan(self, lhs, rhs, *rules, **more):
        left, right = _identify(lhs), _identify(rhs)
        within = "binary_op" in vars(self.builder)  # an operation that is being planned
        if within or more or left is None or right is None:
            return operate(self, lhs, rhs, *rules, **more)
        key = left, right, rules
        if key not in plans:
            result, plans[key] = _plan(operate, self, lhs, rhs, rules)
            return result
        plan = plans[key]
        return operate(self, lhs, rhs, *rules) if plan is None else plan(lhs, rhs)

    return operate_by_plan


def _identify(operand: object) -> object:
    """The name of a tensor's type, or what distinguishes a number from all others."""
    if type(operand) is core.tensor:
        return operand.type.name
    return (type(operand), operand, math.copysign(1, operand)) if type(operand) in _NUMBERS else None


def _plan(operate: Callable, semantic: TritonSemantic, lhs: object, rhs: object,
          rules: tuple) -> tuple[core.tensor, Callable | None]:
    """What operate gives, and how to compute it from operands of the same types; None if it is more than one operation."""
    builder, steps = semantic.builder, []

    def note_operation(left, right, function):
        steps.append(((left, right), function))
        return type(builder).binary_op(builder, left, right, function)

    def note_address(pointer, offset):
        bytes = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        steps.append(((pointer, offset), lambda at, n: at + bytes * n.astype(np.uint64)))
        return type(builder).create_addptr(builder, pointer, offset)

    builder.binary_op, builder.create_addptr = note_operation, note_address
    try:
        result = operate(semantic, lhs, rhs, *rules)
    finally:
        del builder.binary_op, builder.create_addptr
    if len(steps) != 1:
        return result, None
    (handles, function), = steps
    takes = [_find_operand(*pair) for pair in zip((lhs, rhs), handles, strict=True)]
    if None in takes or not any(type(operand) is core.tensor for operand in (lhs, rhs)):
        return result, None
    (take_left, take_right), handle, dtype = takes, result.handle.dtype, result.handle.data.dtype

    def compute(lhs: object, rhs: object) -> core.tensor:
        data = function(take_left(lhs), take_right(rhs))
        if data.dtype != dtype:
            data = data.astype(dtype)
        return core.tensor(interpreter.TensorHandle(data, handle), result.type)

    return result, compute


def _find_operand(given: object, taken: interpreter.TensorHandle) -> Callable | None:
    """What makes NumPy's operand, `taken`, of the given one, but for its shape, which NumPy makes fit. None: it is unclear."""
    if type(given) is not core.tensor:
        constant = taken.data if taken.data.ndim < 2 else taken.data.ravel()[:1].copy()
        return lambda number: constant
    if given.dtype.name == taken.dtype.scalar.name:
        return _take_data
    if given.dtype.name in _PLAIN and taken.dtype.scalar.name in _PLAIN:
        return partial(_take_cast, taken.data.dtype)
    return None


def _cast_once(cast: Callable) -> Callable:
    """cast, which looks at both dtypes from all sides; between most of NumPy's it is one conversion."""
    types = {}

    def cast_quickly(self, input, dst_ty, rounding=None):
        have, wanted = input.dtype.name, dst_ty.scalar.name
        if have == wanted:
            return input
        several = wanted == "int1" or (have == "fp16" and wanted != "fp32")
        if several or rounding or have not in _PLAIN or wanted not in _PLAIN:
            return cast(self, input, dst_ty, rounding)
        key = input.type.name, wanted
        if key not in types:
            result = cast(self, input, dst_ty)
            types[key] = result.type, result.handle.data.dtype
            return result
        type, dtype = types[key]
        return core.tensor(interpreter.TensorHandle(input.handle.data.astype(dtype), type.scalar), type)

    return cast_quickly


def _take_data(tensor: core.tensor) -> np.ndarray:
    return tensor.handle.data


def _take_cast(dtype: np.dtype, tensor: core.tensor) -> np.ndarray:
    return tensor.handle.data.astype(dtype)


def _expand_dims(builder: object, arg: interpreter.TensorHandle, axis: int) -> interpreter.TensorHandle:
    data = arg.data
    return interpreter.TensorHandle(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), arg.dtype.scalar)


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
