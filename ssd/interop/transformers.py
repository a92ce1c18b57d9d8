"""patch_transformers: the Mamba-2 layers of six families of Hugging Face models run this repository's functions.

A modelling file calls its kernels as globals of its own. From 5.15 they are bound when it is imported; before that, when a
mixer is built. So the globals are overwritten, in files that are loaded at once and in others right after their import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType, SimpleNamespace

from ..options import Options
from .functions import functions
from .patching import Library, Patch, check_version, put

FAMILIES = ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2")
FIRST, LAST = (5, 0), (5, 23)
_MODULES = {f"transformers.models.{family}.modeling_{family}" for family in FAMILIES}
_BOUND_AT_IMPORT = (5, 15)
_GLOBALS = {  # from 5.15 on: what a modelling file calls them -> upstream's names
    "mamba2_chunk_scan": "mamba_chunk_scan_combined",
    "mamba2_split_conv1d_scan_combined": "mamba_split_conv1d_scan_combined",
    "mamba2_selective_state_update": "selective_state_update",
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
}


def patch_transformers(variant: str = "auto", options: Options | None = None) -> Patch:
    """Runs the Mamba-2 layers of transformers' models on this repository's functions, on GPUs and on the CPU.

    For models built before or after, and modelling files imported before or after. `with patch_transformers():` undoes it
    at the end of the block; as a plain call it lasts until `.undo()`. Patches nest: the newest one's settings count.

    Args:
        variant: what runs the SSD, one of `ssd.variant_names()`, or "auto".
        options: of the variant, such as `ssd.Options(keep_bytes=2**29)` for faster training with states kept; the defaults
            unless given.

    Raises:
        ValueError: no such variant.
        TypeError: options that are none.
        ImportError: transformers is missing, or of a version that this was not tested with; nothing was changed.
        RuntimeError: a modelling file has not the functions that files of its version have; nothing was changed.
    """
    return _LIBRARY.patch(variant, options)


def _install(undo: ExitStack) -> None:
    version = check_version("transformers", FIRST, LAST, "pip install transformers")

    def place(module: ModuleType) -> None:
        with _LIBRARY.alone:
            if _LIBRARY.patched:  # else somebody found the file under a patch, and runs it after its end
                _place(undo, module, version)

    for name in sorted(_MODULES & sys.modules.keys()):
        _place(undo, sys.modules[name], version)
    hook = _AfterImport(_MODULES, place)
    sys.meta_path.insert(0, hook)
    undo.callback(sys.meta_path.remove, hook)


def _place(undo: ExitStack, module: ModuleType, version: tuple[int, int]) -> None:
    """Overwrites the globals of one modelling file."""
    found = vars(module)
    if version >= _BOUND_AT_IMPORT:
        if missing := _GLOBALS.keys() - found.keys():
            raise RuntimeError(f"{module.__name__} has no {', '.join(sorted(missing))}, as it should from transformers 5.15 on")
    else:  # a mixer built under the patch outlives it, so names that only its `__init__` makes are left as without kernels
        for name in (*_FUNCTIONS, "is_fast_path_available"):
            found.setdefault(name, None)
        if load := found.get("lazy_load_kernel"):
            put(undo, found, "lazy_load_kernel", _load_ours(load))
    for name, value in list_globals(_FUNCTIONS, version).items():
        put(undo, found, name, value)


def list_globals(functions: dict[str, Callable], version: tuple[int, int]) -> dict[str, object]:
    """What globals of a modelling file become, so that it calls these functions, which have upstream's names."""
    if version >= _BOUND_AT_IMPORT:
        return {name: functions[upstream] for name, upstream in _GLOBALS.items()}
    return {**functions, "is_fast_path_available": True}


def _load_ours(load: Callable) -> Callable:
    """`lazy_load_kernel` of 5.0 to 5.14, which a mixer asks for kernels when it is built."""
    ours = SimpleNamespace(**_FUNCTIONS)
    return lambda name, *args, **kwargs: ours if name in ("mamba-ssm", "causal-conv1d") else load(name, *args, **kwargs)


def _keep_known_arguments(function: Callable) -> Callable:
    """Mixers hand on every keyword that the model was called with; `function` is called with those in its signature.

    Some of a mixer's functions take cu_seqlens and some do not, so that documents would be kept apart in one alone.
    """
    known = tuple(signature(function).parameters)

    @wraps(function)
    def pass_known(*args, **kwargs):
        if kwargs.get("cu_seqlens") is not None and kwargs.get("seq_idx") is None:
            raise ValueError("cu_seqlens: got a tensor without seq_idx, expected seq_idx, by which these models keep documents "
                             "of a row apart")
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return pass_known


def choose_functions(known: Mapping[str, Callable]) -> dict[str, Callable]:
    """Those that transformers' mixers call, as they call them."""
    return {name: _keep_known_arguments(known[name]) for name in _GLOBALS.values()}


class _AfterImport(MetaPathFinder):
    """Finds the named modules as the other finders do, and calls `action` on each after it ran."""

    def __init__(self, names: set[str], action: Callable[[ModuleType], None]):
        self.names, self.action = names, action

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the instance's, which hides the class's
            run(module)
            self.action(module)

        loader.exec_module = exec_module


_LIBRARY = Library("transformers", _install)
_OURS = functions(lambda: _LIBRARY.settings)
_FUNCTIONS = choose_functions(_OURS)
