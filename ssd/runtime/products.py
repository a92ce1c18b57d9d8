"""Large products by cuBLAS without a workspace.

With one, cuBLAS deals the tiles of a large product out as it goes, by a counter that a memset clears before. Without, it deals
them beforehand, by a kernel that takes the same time and gives the same bits: so the memset, and the gaps on both sides of it,
are spared (docs/log/decoding.md). torch has a setting of its workspace since 2.13 alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_OP_N, _OP_T, _R_16BF, _COMPUTE_32F, _GEMM_DEFAULT = 0, 1, 14, 68, -1  # of cublas_api.h and library_types.h
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` without a bias or gradients: x (..., k) and weight (n, k) to (..., n). Without a workspace in contiguous bf16.

    Raises:
        RuntimeError: as F.linear, or cuBLAS refuses.
    """
    library = _find_library() if _takes(x, weight) else None
    if library is None:
        return F.linear(x, weight)
    (n, k), m = weight.shape, x.numel() // weight.shape[1]
    out = torch.empty(*x.shape[:-1], n, device=x.device, dtype=x.dtype)
    with torch.cuda.device_of(x):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # of the current stream
        status = library.cublasSetWorkspace_v2(handle, None, ctypes.c_size_t(0))  # torch sets its own at its next product
        status = status or library.cublasGemmEx(  # columns first: out^T = weight x^T
            handle, _OP_T, _OP_N, n, m, k, ctypes.byref(_ONE), *_list_matrix(weight, k), *_list_matrix(x, k),
            ctypes.byref(_ZERO), *_list_matrix(out, n), _COMPUTE_32F, _GEMM_DEFAULT)
    if status:
        raise RuntimeError(f"cuBLAS: got status {status} for x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    return out


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether pointers and sizes say it all: cuBLAS checks nothing. Without the last setting torch has a mode for its calls."""
    return (x.is_cuda and x.device == weight.device and x.dtype == weight.dtype == torch.bfloat16 and weight.dim() == 2
            and x.shape[-1:] == weight.shape[1:] and x.is_contiguous() and weight.is_contiguous() and x.numel() > 0
            and weight.numel() > 0
            and torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is True)


def _list_matrix(t: Tensor, leading: int) -> tuple[ctypes.c_void_p, int, int]:
    """Its address, dtype and leading dimension."""
    return ctypes.c_void_p(t.data_ptr()), _R_16BF, leading


@cache
def _find_library() -> ctypes.CDLL | None:
    """torch's cuBLAS; None, which is said to the logger once, where it is not loaded under its usual name."""
    name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as reason:
        logging.getLogger("ssd").info("large products go through torch, with its workspace: %s", reason)
        return None
