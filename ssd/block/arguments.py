"""Checks of arguments that the functions of a block share, and which tensors their kernels take."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from ..types import DTYPES

INTERPRETED = knobs.runtime.interpret


def takes_kernels(x: Tensor) -> bool:
    """Whether kernels run here, compiled or interpreted, and not the torch form."""
    return x.dtype != torch.float64 and (x.is_cuda or INTERPRETED)


def check_tensor(name: str, t: object, shape: tuple[int, ...], x: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES,
                 beside: str = "x") -> None:
    """As `check_form`; where kernels are interpreted, also refuses what they would get wrong."""
    check_form(name, t, shape, x, dtypes, beside)
    check_interpretable(name, t)


def check_form(name: str, t: object, shape: tuple[int, ...], x: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES,
               beside: str = "x") -> None:
    """Refuses what is not a tensor of this shape, one of the dtypes, and on the device of x, whose name is `beside`."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}, expected a tensor of shape {shape}")
    check_dtype(name, t, dtypes)
    if t.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {shape} to go with {beside} {tuple(x.shape)}")
    if t.device != x.device:
        raise ValueError(f"{name}: got a tensor on {t.device}, expected {x.device}, the device of {beside}")


def check_size(name: str, size: object) -> None:
    """Refuses what is not an int of at least 1."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise (ValueError if type(size) is int else TypeError)(f"{name}: got {size!r}, expected an int of at least 1")


def check_number(name: str, value: object) -> None:
    """Refuses what is neither an int nor a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {value!r}, expected a number")


def check_dtype(name: str, t: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Refuses a tensor of another dtype than these."""
    if t.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {t.dtype}, expected one of {', '.join(map(str, dtypes))}")


def check_floating(name: str, dtype: object) -> None:
    """Refuses what is no dtype that tensors of a block may have."""
    if dtype not in DTYPES:
        raise TypeError(f"{name}: got {dtype!r}, expected one of {', '.join(map(str, DTYPES))}")


def check_interpretable(name: str, t: Tensor) -> None:
    """Refuses bf16 where kernels are interpreted, which would compute it wrongly."""
    if INTERPRETED and t.dtype == torch.bfloat16:
        raise TypeError(f"{name}: got {t.dtype}, expected fp16 or fp32 with TRITON_INTERPRET=1, which gets bf16 wrong")


def check_apart(name: str, t: Tensor) -> None:
    """Refuses a tensor to be overwritten of which several elements share memory."""
    strides = t.stride()
    for axis, stride in enumerate(strides if 0 in strides else ()):  # caches have many tensors, and hardly ever one
        if not stride and t.shape[axis] > 1:
            raise ValueError(f"{name}: got a stride of 0 along axis {axis}, expected a place for each element, since all are "
                             "overwritten")


def check_rows(name: str, indices: Tensor | None, state: str, rows: int) -> None:
    """Refuses an index of a row that `state` has not. Only on the CPU: on a GPU looking would wait for it."""
    if indices is not None and indices.device.type == "cpu" and (last := int(indices.max())) >= rows:
        raise ValueError(f"{name}: got {last}, expected below {rows}, the number of rows of {state}")


def check_not_negative(name: str, numbers: Tensor | None) -> None:
    """Refuses a number below 0, on the CPU as `check_rows`."""
    if numbers is not None and numbers.device.type == "cpu" and (least := int(numbers.min())) < 0:
        raise ValueError(f"{name}: got {least}, expected at least 0")
