"""What a trial needs to know of one call: its inputs, the call under test, its truth and its mirror."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tensors = dict[str, "Tensor | None"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class Refused(Exception):
    """The variant cannot run this configuration, and says why: it is no failure, and another is drawn."""


@dataclass(frozen=True)
class Problem:
    """One call on one set of inputs.

    Attributes:
        tensors: arguments by name, floating-point ones as leaves, in the layouts that the configuration asks for.
        wanted: those arguments whose gradients are taken; none: no gradient is.
        ways: the outputs that receive a gradient, and their dtypes.
        run: the call under test, outputs by name.
        truth: the same outputs of fp64 arguments, differentiable.
        mirrors: each (tensors, wanted, gradients of `ways`) -> outputs and gradients ("d" and the argument's name) of torch
            code that rounds where kernels may; the first has all, others may have some. Several, since the errors of one may
            be small by luck.
        axes: a letter for each axis of a result: b batch or document, l tokens, h heads or groups; others are not looked at
            one by one.
        summed: results that are sums over tokens, whose errors cancel by luck.
        tokens: summands of these.
        eps: spacing of the operands of matrix products; coarsest: of these and of states that are kept.
        exponent: the largest magnitude of a cumulative decay, known to one fp32 rounding.
        exact: two calls on the same inputs give the same bits.
    """

    tensors: Tensors
    wanted: tuple[str, ...]
    ways: dict[str, torch.dtype]
    run: Callable[[Tensors], dict[str, Tensor]]
    truth: Callable[[Tensors], dict[str, Tensor]]
    mirrors: tuple[Callable[[Tensors, tuple[str, ...], dict[str, Tensor]], dict[str, Tensor]], ...]
    axes: dict[str, str]
    eps: float
    coarsest: float
    summed: tuple[str, ...] = ()
    tokens: int = 1
    exponent: float = 0.0
    exact: bool = True
    layouts: dict[str, str] = field(default_factory=dict)  # of the gradients of `ways`, by the output's name
    seed: int = 0


def compute_gradients(outputs: dict[str, Tensor], tensors: Tensors, wanted: tuple[str, ...],
              cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    """{"d" + name: gradient} of the wanted arguments by autograd; zeros where an output does not depend on one."""
    ways = [name for name in cotangents if outputs[name].requires_grad]
    if not wanted:
        return {}
    leaves = [tensors[name] for name in wanted]
    if not ways:
        return {f"d{name}": torch.zeros_like(t) for name, t in zip(wanted, leaves, strict=True)}
    grads = torch.autograd.grad([outputs[name] for name in ways], leaves,
                                [cotangents[name].to(outputs[name].dtype) for name in ways], allow_unused=True)
    return {f"d{name}": torch.zeros_like(t) if g is None else g for name, t, g in zip(wanted, leaves, grads, strict=True)}
