"""Large products by cuBLAS without a workspace.

With one, cuBLAS deals tiles of a large product to whoever is ready, by a counter that it clears before; without, it deals them
beforehand. Both kernels take the same time, but the clearing takes 6 to 10 us of each product (docs/log/decoding.md), and torch
has a setting of the workspace since 2.13 alone.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_TRANSPOSED, _AS_IT_IS, _BF16, _IN_FP32, _ANY_ALGORITHM = 1, 0, 14, 68, -1  # of cublas_api.h and library_types.h
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear`, for inference: by cuBLAS without a workspace for contiguous tensors in bf16.

    Raises:
        RuntimeError: as F.linear, or cuBLAS refuses.
    """
    library = _find_library() if _takes(x, weight) else None
    if library is None:
        return F.linear(x, weight)
    (n, k), m = weight.shape, x.numel() // weight.shape[1]
    out = torch.empty(*x.shape[:-1], n, device=x.device, dtype=x.dtype)
    with torch.cuda.device_of(x):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # of the current stream, with torch's workspace
        status = library.cublasSetWorkspace_v2(handle, None, ctypes.c_size_t(0))  # until torch takes the handle again
        status = status or library.cublasGemmEx(  # columns first: out^T = weight x^T
            handle, _TRANSPOSED, _AS_IT_IS, n, m, k, ctypes.byref(_ONE), *_describe(weight, k), *_describe(x, k),
            ctypes.byref(_ZERO), *_describe(out, n), _IN_FP32, _ANY_ALGORITHM)
    if status:
        raise RuntimeError(f"cublasGemmEx: got status {status} for {tuple(x.shape)} by {tuple(weight.shape)}")
    return out


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether pointers say it all: cuBLAS checks nothing."""
    return (x.is_cuda and x.device == weight.device and x.dtype == weight.dtype == torch.bfloat16 and weight.dim() == 2
            and x.shape[-1:] == weight.shape[1:] and x.is_contiguous() and weight.is_contiguous() and x.numel() > 0
            and weight.numel() > 0 and torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is True)


def _describe(t: Tensor, row: int) -> tuple:
    return ctypes.c_void_p(t.data_ptr()), _BF16, row


@cache
def _find_library() -> ctypes.CDLL | None:
    """The one that torch has loaded."""
    name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as reason:
        logging.getLogger("ssd").info("products of prompts go through torch, which takes 6 to 10 us more for each: %s", reason)
        return None
