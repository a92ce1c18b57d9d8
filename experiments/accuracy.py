"""Errors against fp64, taken over a part of a call that is exact by itself.

Sequences, and groups of heads, do not influence each other, and the scan is causal. So the first tokens of the heads of
one group of one sequence are a whole problem, whose answer the full call must contain. For gradients the full call gets
an output gradient that is zero elsewhere: then even sums over tokens and sequences (dA, dD, ddt_bias) must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ssd.reference import compute_grads_in_fp64, compute_in_fp64
from ssd.types import SSDInputs

_LEAVES = ("x", "dt", "A", "B", "C", "D", "dt_bias", "z")
_NOTHING = 1e-30  # a truth below this is zero to every dtype here, as decay makes it
_TRUTH_CHUNK = 64  # fp64 holds whole chunk squares; small chunks keep them small


def leaves_of(inputs: dict) -> dict[str, Tensor]:
    """The tensors among a call's arguments whose gradients are taken, by name."""
    return {name: inputs[name] for name in _LEAVES if name in inputs}


@dataclass(frozen=True, order=True)
class Error:
    """Relative to the truth: rms to its root mean square, max to its largest element."""

    rms: float
    max: float

    @staticmethod
    def of(got: Tensor, truth: Tensor) -> Error:
        difference, truth = got.double() - truth, truth.double()
        return Error(*(float(difference.norm(p) / truth.norm(p).clamp(min=_NOTHING)) for p in (2, math.inf)))

    @staticmethod
    def worst(errors: list[Error]) -> Error:
        # Not max(): a comparison with NaN is false, and NaN must win.
        rms, largest = torch.tensor([[e.rms, e.max] for e in errors], dtype=torch.float64).amax(0).tolist()
        return Error(rms, largest)


@dataclass(frozen=True)
class Part:
    """The first `tokens` tokens of the last `ngroups` groups of the last `batch` sequences.

    The last ones, since they have the largest offsets.
    """

    batch: int
    tokens: int
    nheads: int
    ngroups: int

    def cut(self, name: str, t: Tensor) -> Tensor:
        """The part of an input, or of its gradient, of that name."""
        if name in ("x", "dt", "z"):
            return t[-self.batch :, : self.tokens, -self.nheads :]
        if name in ("B", "C"):
            return t[-self.batch :, : self.tokens, -self.ngroups :]
        return t[-self.nheads :]


class Truth:
    """The fp64 answer for a part of the inputs, computed when first asked for.

    Attributes:
        dout: the output gradient, zero outside the part, that `grad_errors` compares under.
    """

    def __init__(self, inputs: dict, dout: Tensor, part: Part):
        self.part = part
        tensors = {name: part.cut(name, t.detach()) for name, t in leaves_of(inputs).items()}
        self._leaves = tuple(tensors)
        self._inputs = SSDInputs(**inputs | tensors, chunk_size=_TRUTH_CHUNK)
        self.dout = torch.zeros_like(dout)
        part.cut("x", self.dout).copy_(part.cut("x", dout))

    @cached_property
    def _out(self) -> Tensor:
        with torch.no_grad():
            return compute_in_fp64(self._inputs)[0]

    @cached_property
    def _grads(self) -> dict[str, Tensor]:
        with torch.no_grad():
            grads = compute_grads_in_fp64(self._inputs, self.part.cut("x", self.dout))
        return {name: getattr(grads, f"d{name}") for name in self._leaves}

    def out_error(self, scan: Callable[[], Tensor]) -> Error:
        """Of the output of a call on the full inputs."""
        with torch.no_grad():
            return Error.of(self.part.cut("x", scan()), self._out)

    def grad_errors(self, scan: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, Error]:
        """Of every gradient of a call on the full inputs; `leaves` as `leaves_of` orders them."""
        grads = dict(zip(self._leaves, torch.autograd.grad(scan(), leaves, self.dout), strict=True))
        return {name: Error.of(self.part.cut(name, grads[name]), self._grads[name]) for name in self._leaves}
