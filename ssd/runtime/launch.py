"""Launches without Triton's search for the compiled kernel, which takes 10 of the 13 us that a launch spends in Python.

Triton's key of a compiled kernel is built from what its arguments are specialised on. The key here is the arguments themselves,
tensors by dtype, device and alignment: more keys for the same kernel, each cheaper to build. The first launch under a key is
Triton's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from .late import includes_late, receive
from .proxy_fence import add_fences
from .ptxas import take_trusted_ptxas
from .toolchain import COMPILE_OPTIONS, get_current_stream, launch_compiled, mark
from .trust import find_fault, forbid_warpgroups

_MOST = 4096  # entries; callers whose sizes never repeat must not fill the memory
_compiling = threading.RLock()  # one thread at a time: how Triton compiles is said by what all threads share
_found: dict[tuple, tuple[CompiledKernel, tuple, object]] = {}


class _Recorded(threading.local):
    launches: list[tuple] | None = None


_recorded = _Recorded()


def launch(kernel, programs: int, *args, **config) -> None:
    """kernel[(programs,)](*args, **config) on the current device, which must be that of the tensors among `args`.

    args: tensors, tensor descriptors, and hashable values: numbers, strings, None, tuples of them; at one place always of one
    type, since the key takes 1, 1.0 and True for the same. config: the kernel's last parameters by name, and options such as
    num_warps.
    """
    if includes_late(args):
        receive()
    key = (id(kernel), *config.items(), *map(_describe_argument, args))
    if found := _found.get(key):
        compiled, last, _ = found
        launch_compiled(compiled, programs, get_current_stream(), (*args, *last))
    else:
        compiled = _compile_and_launch(kernel, programs, args, config)
        # the interpreter returns no kernel, and what was compiled for a GPU that is not there cannot be launched
        if isinstance(compiled, CompiledKernel) and all(a.is_cuda for a in args if isinstance(a, Tensor)):
            if len(_found) >= _MOST:
                _found.clear()
            last = tuple(config[name] for name in kernel.arg_names[len(args) :])
            found = _found[key] = compiled, last, kernel  # with the kernel, whose id another may not get
    if _recorded.launches is not None:
        _recorded.launches.append((compiled, programs, (*args, *last)) if found else None)


def _compile_and_launch(kernel, programs: int, args: tuple, config: dict):
    """The launch by Triton, of a kernel that can be trusted; returns it, None in the interpreter."""
    with _compiling:
        if not isinstance(kernel, JITFunction):  # interpreted
            return kernel[(programs,)](*args, **COMPILE_OPTIONS, **config)
        with add_fences() as fences, take_trusted_ptxas() as ptxas:
            options = {**COMPILE_OPTIONS, **mark(*fences, *ptxas), **config}
            why = find_fault(kernel.warmup(*args, grid=(programs,), **options))
            if why is None:
                return kernel[(programs,)](*args, **options)
        with forbid_warpgroups(kernel.__name__, why) as switch:
            return kernel[(programs,)](*args, **options | switch)


def record_launches(call: Callable, *args) -> tuple[object, list[tuple] | None]:
    """What call(*args) returns, and what it launched in this thread: compiled kernel, programs, all arguments in order; None if
    one of the launches cannot be repeated as it was, or `forget` was called. A recording inside another leaves nothing in it.
    """
    around, _recorded.launches = _recorded.launches, []
    try:
        result = call(*args)
        launches = _recorded.launches
    finally:
        _recorded.launches = around
    return result, None if launches is None or None in launches else launches


def forget() -> None:
    """Ends this thread's recording with nothing, and lets go of the tensors that it has held."""
    _recorded.launches = None


def _describe_argument(arg):
    """What tells an argument from another that needs another kernel; of a descriptor not its tensor's sizes."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.get_device(), arg.data_ptr() % 16
    if hasattr(arg, "block_shape"):
        return arg.base.dtype, arg.base.get_device(), *arg.block_shape
    return arg
