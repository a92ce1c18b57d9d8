"""Variant `mamba_ssm`: the Triton kernels of Mamba-2's authors, forward and backward."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..registry import Variant
from ..types import SSDInputs
from .patching import INSTALL_MAMBA_SSM

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@contextmanager
def skip_its_init() -> Iterator[None]:
    """Lets modules of mamba_ssm be imported though its `__init__` cannot.

    That loads every model it has, and with them compiled extensions, transformers and more. An empty package stands in
    for it. Afterwards sys.modules is as before, so a later `import mamba_ssm` finds nothing half loaded.
    """
    if "mamba_ssm" in sys.modules:
        yield
        return
    spec = find_spec("mamba_ssm")
    if spec is None:
        raise ImportError("there is no package of that name")
    package = ModuleType("mamba_ssm")
    package.__spec__, package.__path__ = spec, spec.submodule_search_locations
    sys.modules["mamba_ssm"] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
            del sys.modules[name]


try:
    with skip_its_init():
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
except ImportError as error:
    raise ImportError(f"mamba_ssm cannot be imported ({error}); {INSTALL_MAMBA_SSM}", name="mamba_ssm") from error

_HAS_STATE_DTYPE = "state_dtype" in inspect.signature(mamba_chunk_scan_combined).parameters


def _supports(inputs: SSDInputs) -> str | None:
    i = inputs
    if not i.x.is_cuda:
        return f"its kernels need CUDA tensors, got x on {i.x.device}"
    if i.x.dtype not in _DTYPES or not i.x.dtype == i.B.dtype == i.C.dtype:
        return (f"it takes x, B and C in one dtype of {', '.join(map(str, _DTYPES))}, got {i.x.dtype}, {i.B.dtype} and "
                f"{i.C.dtype}")
    if i.cu_seqlens is not None:
        return "it starts no documents from states, and its varlen_states come without gradients"
    if i.state_dtype not in (None, i.C.dtype) and not _HAS_STATE_DTYPE:
        return f"this version has no state_dtype, got {i.state_dtype}; it keeps states in the dtype of C"
    return None


def _apply(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    i = inputs
    more = {"state_dtype": i.state_dtype} if _HAS_STATE_DTYPE else {}
    return mamba_chunk_scan_combined(
        i.x, i.dt, i.A, i.B, i.C, i.chunk_size, D=i.D, z=i.z, dt_bias=i.dt_bias, initial_states=i.initial_states,
        seq_idx=i.seq_idx, dt_softplus=i.dt_softplus, dt_limit=i.dt_limit, return_final_states=True, **more)


# torch.compile would import the whole package to look into it
VARIANT = Variant("mamba_ssm", supports=_supports, apply=torch.compiler.disable(_apply))
