"""Mamba-2's SSD operator: one function, several implementations of it, and patches that put it into other libraries."""

from importlib import import_module

from . import runtime  # noqa: F401  before anything imports what an older torch or Triton lacks

# isort: split
from .api import ssd_chunk_scan
from .interop.patching import patched
from .registry import get_variant, variant_names
from .types import Options

__version__ = "0.1.0"
__all__ = ["Options", "get_variant", "patch_mamba_ssm", "patch_transformers", "patch_vllm", "patched", "ssd_chunk_scan",
           "variant_names"]

_LAZY = {"patch_mamba_ssm": "ssd.interop.patch_mamba_ssm", "patch_transformers": "ssd.interop.transformers",
         "patch_vllm": "ssd.interop.patch_vllm"}


def __getattr__(name: str):
    """The patches, with the kernels of a whole block that they bring, when they are first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
