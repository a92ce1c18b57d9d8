"""patch_vllm: the Mamba-2 layers of vLLM run this repository's scan on prompts."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from inspect import signature

from ..registry import check_known, is_peer, variant_names
from .patching import Library, Patch, check_version, replace_functions
from .vllm import mamba_chunk_scan_combined_varlen

FIRST, LAST = (0, 12), (0, 33)
_SOURCE, _NAME = "vllm.model_executor.layers.mamba.ops.ssd_combined", "mamba_chunk_scan_combined_varlen"
_ARGUMENTS = [name for name in signature(mamba_chunk_scan_combined_varlen).parameters if name != "variant"]


def patch_vllm(variant: str = "auto") -> Patch:
    """Runs vLLM's `mamba_chunk_scan_combined_varlen`, the scan of prompts in its Mamba-2 layers, on this repository's.

    It is replaced in its own module and wherever vLLM's loaded modules took it by name; modules that are loaded later take
    ours. `with patch_vllm():` undoes it at the end of the block; as a plain call it lasts until `.undo()`. Patches nest: the
    newest one's variant runs. It reaches this process alone, and vLLM runs models in others: see docs/drop-in.md.

    Args:
        variant: what runs the scan, one of `ssd.variant_names()` that is this project's, or "auto".

    Raises:
        ValueError: no such variant, or another project's.
        ImportError: vllm is missing, cannot be imported, or is of a version that this was not tested with; nothing was changed.
        RuntimeError: its function has other arguments than those of its version; nothing was changed.
    """
    check_known(variant, (*(name for name in variant_names() if not is_peer(name)), "auto"))
    return _LIBRARY.patch(variant)


def _install(undo: ExitStack) -> None:
    check_version("vllm", FIRST, LAST, "pip install vllm")
    try:
        theirs = getattr(import_module(_SOURCE), _NAME)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"vllm: {_SOURCE}.{_NAME} cannot be imported: {error}", name="vllm") from error
    found = [*signature(theirs).parameters]
    if found not in (_ARGUMENTS, _ARGUMENTS[:-2]):  # the last two are new in 0.33
        raise RuntimeError(f"{_SOURCE}.{_NAME} takes {', '.join(found)}, expected {', '.join(_ARGUMENTS)}")
    replace_functions(undo, ("vllm",), [(theirs, _scan)])


@wraps(mamba_chunk_scan_combined_varlen)
def _scan(*args, **kwargs):
    return mamba_chunk_scan_combined_varlen(*args, **kwargs, variant=_LIBRARY.variant)


_LIBRARY = Library("vllm", _install)
