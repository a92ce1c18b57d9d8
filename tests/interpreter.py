"""Triton's interpreter, made about twice as fast: it does without what says nothing new.

It prepares the language again in every call of a function inside a kernel, where once for each module does. It watches sums
and products of integers for overflows, which only tensors larger than any here could have. And it makes the type of every
value anew, where a kernel has few different ones.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps

from triton.language import core
from triton.runtime import interpreter


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


def _find_once(find_dtype: Callable) -> Callable:
    """find_dtype, which looks into a table that it makes each time, but for pointers."""
    found = cache(find_dtype)
    return lambda dtype: (find_dtype if dtype.scalar.is_ptr() else found)(dtype.scalar)


def _look_into_lists(unwrap: Callable) -> Callable:
    """unwrap, which asks four times what a value is, for lists and tuples alone."""
    def unwrap_quickly(value):
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | core.tuple) else value

    return unwrap_quickly


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
