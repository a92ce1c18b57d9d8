"""patch_mamba_ssm: mamba_ssm's functions, and the models that call them, run this repository's.

Modules take the functions from each other by name, so a function is replaced wherever it is found: in mamba_ssm, and in
Megatron-LM and flash-linear-attention, which import it from there. One that is imported later takes ours.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from ..options import Options
from .functions import functions
from .patching import INSTALL_MAMBA_SSM, Library, Patch, check_version, put, replace_functions

FIRST, LAST = (2, 2), (2, 3)
_HOLDERS = ("mamba_ssm", "causal_conv1d", "megatron", "fla")
_CUDA = "selective_scan_cuda"
_SOURCES = {
    "mamba_ssm.ops.triton.ssd_combined": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "mamba_ssm.ops.triton.selective_state_update": ("selective_state_update",),
    "mamba_ssm.ops.selective_scan_interface": ("selective_scan_fn", "mamba_inner_fn"),
}
_CONVOLVING = ("mamba_ssm.modules.mamba2", "mamba_ssm.modules.mamba_simple")  # without causal_conv1d they hold None
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


def patch_mamba_ssm(variant: str = "auto", options: Options | None = None) -> Patch:
    """Runs mamba_ssm's SSD and selective scan, its `Mamba2`, `Mamba` and what else calls them on this repository's functions.

    mamba_ssm need not have been built with CUDA: `selective_scan_cuda`, which nothing calls under the patch, may be absent, and
    so may causal_conv1d. `with patch_mamba_ssm():` undoes it at the end of the block; as a plain call it lasts until `.undo()`.
    Patches nest: the newest one's variant and options count. mamba_ssm is imported; what could not be without the patch is out
    of `sys.modules` while none is in force, and the same modules come back with the next, with the models built from them.

    Modules of mamba_ssm, causal_conv1d, Megatron-LM and fla are patched whenever they were imported. A name that another
    module took by `from mamba_ssm... import` before the patch is upstream's, and one that it took under it remains ours.

    Args:
        variant: what runs the SSD, one of `ssd.variant_names()`, or "auto"; with "mamba_ssm" upstream's own kernels.
        options: of the variant, such as `ssd.Options(keep_bytes=2**29)` for faster training with states kept; the defaults
            unless given; without effect on upstream's.

    Raises:
        ValueError: no such variant.
        TypeError: options that are none.
        ImportError: mamba_ssm is missing, cannot be imported, or is of a version that this was not tested with; nothing was
            changed.
    """
    return _LIBRARY.patch(variant, options)


def _install(undo: ExitStack) -> None:
    check_version("mamba_ssm", FIRST, LAST, INSTALL_MAMBA_SSM)
    if _CUDA not in sys.modules and find_spec(_CUDA) is None:
        put(undo, sys.modules, _CUDA, _make_absent_extension())
        if "mamba_ssm" not in sys.modules:
            sys.modules.update(_aside)
            undo.callback(_put_aside)
    _import_whole("mamba_ssm")
    import_module("ssd.interop.mamba_ssm")  # the variant "mamba_ssm" must find upstream's functions
    upstream = {name: getattr(import_module(source), name) for source, names in _SOURCES.items() for name in names}
    for module in map(vars, map(import_module, _CONVOLVING)):
        for name in _CONVOLUTIONS:
            if module[name] is None:
                put(undo, module, name, _FUNCTIONS[name])
            else:
                upstream[name] = module[name]
    replace_functions(undo, _HOLDERS, [(function, _FUNCTIONS[name]) for name, function in upstream.items()])


def _put_aside() -> None:
    """Hide mamba_ssm from transformers, which else takes its kernels on the CPU too, where they do not run."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        _aside[name] = sys.modules.pop(name)


def _import_whole(package: str) -> None:
    """Imports it, or leaves none of its modules behind: half of it would let a later import go further than it should."""
    loaded = set(sys.modules)
    try:
        import_module(package)
    except ImportError as error:
        for name in sys.modules.keys() - loaded:
            if name.split(".")[0] == package:
                del sys.modules[name]
        raise ImportError(f"{package} cannot be imported: {error}", name=package) from error


def _make_absent_extension() -> ModuleType:
    """Stands in for Mamba-1's CUDA extension, which mamba_ssm imports at once, until one of its functions is wanted."""
    module = ModuleType(_CUDA)
    module.__spec__ = ModuleSpec(_CUDA, loader=None)

    def refuse(name: str):
        raise AttributeError(f"{_CUDA}.{name}: Mamba-1's CUDA extension is not installed. Under ssd.patch_mamba_ssm() Mamba-1 "
                             "runs without it, through selective_scan_fn and mamba_inner_fn; only direct calls of it do not")

    module.__getattr__ = refuse
    return module


_aside: dict[str, ModuleType] = {}
_LIBRARY = Library("mamba_ssm", _install)
_FUNCTIONS = functions(lambda: _LIBRARY.settings)
