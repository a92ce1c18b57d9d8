"""Debug checks of values. With SSD_CHECK=1 in the environment a call of the operator reads every input, output and gradient.

Reading waits for the GPU, so the checks are off by default, and never run while torch compiles or a CUDA graph is captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .switches import is_on

ENABLED = is_on("SSD_CHECK", False)


def check_inputs(tensors: dict[str, Tensor | None]) -> None:
    """Raises:
        ValueError: A > 0, or a value that is not finite; the message names the argument and the first such place.
    """
    if _is_off():
        return
    for name, t in tensors.items():
        if t is not None:
            _check_finite(name, t, "input")
            _check_gradient(name, t)
    if (tensors["A"] > 0).any():
        at = int((tensors["A"] > 0).nonzero()[0])
        raise ValueError(f"A: got {float(tensors['A'][at]):g} for head {at}, expected at most 0: states would grow")


def check_outputs(tensors: tuple[Tensor | None, ...]) -> None:
    """Raises:
        ValueError: a value that is not finite although every input is: it left the range of its dtype.
    """
    if not _is_off():
        for name, t in zip(("out", "final_states", "varlen_states", "states"), tensors, strict=True):
            if t is not None:
                _check_finite(name, t, "output")
                _check_gradient(name, t)


def reads_values() -> bool:
    """True when a call may wait for the GPU to read what it was given."""
    return ENABLED and not _is_off()


def _is_off() -> bool:
    # a process that has not started CUDA captures nothing, and a fork of one that has cannot even ask
    return torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _check_gradient(name: str, t: Tensor) -> None:
    """Of the next backward through t: that of an output before those of inputs, which then are not taken for the cause."""
    def check(gradient: Tensor | None) -> None:
        handle.remove()
        if gradient is not None:
            _check_finite(f"d{name}", gradient, "gradient")

    if torch.is_grad_enabled() and t.requires_grad:
        handle = t.register_hook(check)


def _check_finite(name: str, t: Tensor, what: str) -> None:
    t = t.detach()
    if not t.is_floating_point() or bool((odd := ~t.isfinite()).sum() == 0):
        return
    at = tuple(odd.nonzero()[0].tolist())
    raise ValueError(f"{name}: got {float(t[at])} at {at}, and {int(odd.sum())} of {t.numel()} values that are not finite; "
                     f"expected a finite {what}, within the range of {t.dtype}")
