"""What of Triton is private or differs between its versions, but for the language of kernels (gluon_names).

Every use of a name that Triton does not promise to keep is here, so that a new version is tried, and mended, in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .versions import TESTED, describe_tested, release

TRITON = release(triton.__version__)

# Given to every compilation, since its default is about to change (Triton 3.10): products and sums become one instruction.
COMPILE_OPTIONS = {"enable_fp_fusion": True}


def mark(*texts: str) -> dict:
    """An option of a compilation that changes nothing but the key under which Triton keeps what it compiles: among fp8 dtypes
    that are out of favour, Hopper's own entry and the texts. Without texts, no option.
    """
    return {"deprecated_fp8_dot_operand_dtypes": ("fp8e4b15", *texts)} if texts else {}


def get_ptxas(arch: int) -> knobs.NvidiaTool:
    """The ptxas, `path` and `version`, that Triton takes for a compute capability, 90 say for 9.0."""
    from triton.backends.nvidia import compiler

    return compiler.get_ptxas(arch)


@contextmanager
def change_stages(change: Callable[[dict], None]) -> Iterator[None]:
    """What is compiled inside of kernels in plain Triton, which begin as "ttir", goes through stages that `change` was given to
    change: functions, by what they make, of what the one before made and of the metadata. Of one thread at a time: Triton's
    hook is one for all. Triton 3.6 keeps what it compiled under keys that know nothing of the hook: `mark` tells it apart.
    """
    others = knobs.runtime.add_stages_inspection_hook

    def hook(backend=None, stages=None, *args):
        if stages is None:  # newer Tritons ask what their keys, on disk and in memory, are to hold of the hook
            return others() if others is not None else ("", "0")
        if others is not None:
            others(backend, stages, *args)
        if "ttir" in stages:
            change(stages)

    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = others


if knobs.runtime.interpret:
    from .interpreter import mend

    mend()


@cache
def explain_missing_gluon() -> str | None:
    """Why kernels in Gluon, which Triton may change as it likes, do not run with this Triton; None if they do."""
    newest = TESTED["triton"][1]
    if newest < TRITON:
        return f"Gluon kernels are tested with Triton {describe_tested('triton')}, got {triton.__version__}"
    try:
        from .gluon_names import check

        check()
    except ImportError as error:
        return f"Triton {triton.__version__} lacks some of Gluon: {error}"
    return None


def launch_compiled(compiled: CompiledKernel, programs: int, stream: int, args: tuple | list) -> None:
    """Launches a compiled kernel: args are all of its parameters in order, tensors as such or as addresses."""
    enter, leave = _skip_if_empty(knobs.runtime.launch_enter_hook), _skip_if_empty(knobs.runtime.launch_exit_hook)
    metadata = enter and compiled.launch_metadata((programs, 1, 1), stream, *args)
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *args)


def begins_early(compiled: CompiledKernel) -> bool:
    """Whether its launches may begin before the one before has ended."""
    return compiled.metadata.launch_pdl


def _skip_if_empty(hook: Callable | None) -> Callable | None:
    """A hook that calls somebody; Triton would call an empty chain of them for nothing, at every launch."""
    return hook if getattr(hook, "calls", True) else None


def get_current_stream(device: int | None = None) -> int:
    """The current stream of a device, by default the current one, as launches take it."""
    return driver.active.get_current_stream(driver.active.get_current_device() if device is None else device)


def get_descriptor_fields(descriptor) -> dict:
    """The fields of a TMA descriptor but for its tensor."""
    return {name: value for name, value in vars(descriptor).items() if name != "base"}


def copy_descriptor(cls: type, fields: dict, t: Tensor):
    """A TMA descriptor of class `cls` of the tensor t with fields that were checked before, as building one checks them."""
    descriptor = object.__new__(cls)
    vars(descriptor).update(fields, base=t)
    return descriptor


class DescriptorAt:
    """A TMA descriptor as Triton's launcher reads one, of memory at an address."""

    def __init__(self, address: int, fields: dict):
        self.__dict__.update(fields, address=address)

    @property
    def base(self) -> DescriptorAt:
        return self

    def data_ptr(self) -> int:
        return self.address
