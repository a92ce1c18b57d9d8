"""What configurations share: fields, values, and how the functions of a block become problems."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import torch
from torch import Tensor

from . import modes
from .layouts import LAYOUTS, lay_out
from .limits import Limits, draw_mode, draw_subset
from .problem import DTYPES, Problem, Tensors, compute_gradients

Call = Callable[[Tensors], dict[str, Tensor]]


@dataclass(frozen=True)
class Common:
    """Fields of every configuration; `operator.Config` says what they mean. dtype: of the activations."""

    batch: int = 1
    seed: int = 0
    dtype: str = "fp32"
    dtypes: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    ways: tuple[str, ...] = ("out",)
    mode: str = "plain"
    calls: int = 1

    @property
    def eps(self) -> float:
        return torch.finfo(DTYPES[self.dtype]).eps


def get_integers(c: Common) -> torch.dtype:
    """Of bounds and indices, of a configuration with `int64`."""
    return torch.int64 if c.int64 else torch.int32


class Values:
    """Random values of a configuration's inputs in one turn."""

    def __init__(self, c: Common, turn: int, device: str):
        self._config, self._device = c, device
        self._rng = torch.Generator(device).manual_seed(2 * c.seed + turn)
        self.random = Random(f"{c.seed} {turn}")

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._rng, device=self._device)

    def uniform(self, low: float, high: float, *size: int) -> Tensor:
        return torch.rand(size, generator=self._rng, device=self._device) * (high - low) + low

    def finish(self, made: Tensors, parameters: tuple[str, ...]) -> Tensors:
        """The values in the dtypes and layouts that the configuration asks for; parameters are fp32 where it asks for none."""
        c, result = self._config, {}
        for name, t in made.items():
            if t is not None and t.is_floating_point():
                t = t.to(DTYPES[c.dtypes.get(name, "fp32" if name in parameters else c.dtype)])
            t = t if t is None else lay_out(t, c.layouts.get(name, "contiguous")).detach()
            result[name] = t.requires_grad_() if name in c.wanted and t is not None else t
        return result


def make_problem(c: Common, tensors: Tensors, run: Callable, truth: Callable, mirror: Callable, axes: dict[str, str],
                 ways: dict[str, torch.dtype] | None = None, **more) -> Problem:
    """The problem of a configuration.

    Args:
        run, truth, mirror: (configuration, tensors) to outputs; the mirror by autograd, unless `more` has others.
        ways: outputs besides "out" that may receive a gradient.
        more: other fields of `Problem`.
    """
    wanted = tuple(name for name in c.wanted if tensors[name] is not None)
    given = {name: dtype for name, dtype in ({"out": DTYPES[c.dtype]} | (ways or {})).items() if name in c.ways}
    usual = {"mirrors": (make_mirror(partial(mirror, c)),), "eps": c.eps, "coarsest": c.eps, "seed": c.seed}
    layouts = {name: c.layouts.get(f"d{name}", "contiguous") for name in given}
    return Problem(tensors, wanted, given if wanted else {}, run=partial(run, c), truth=partial(truth, c), axes=axes,
                   layouts=layouts, **usual | more)


def make_mirror(call: Call) -> Callable[[Tensors, tuple[str, ...], dict[str, Tensor]], dict[str, Tensor]]:
    """A mirror: what `call`, in torch, gives by autograd."""

    def mirror(tensors: Tensors, wanted: tuple[str, ...], ways: dict[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: None if t is None else t.detach().requires_grad_(name in wanted) for name, t in tensors.items()}
        with torch.set_grad_enabled(bool(wanted)):
            outputs = call(leaves)
        grads = compute_gradients(outputs, leaves, wanted, ways)
        return {name: t.detach() for name, t in outputs.items()} | grads

    return mirror


def draw_dtypes(rng: Random, limits: Limits, names: tuple[str, ...]) -> dict[str, str]:
    """Dtypes of inputs that have one of their own, in a third of draws."""
    if rng.random() < 0.65:
        return {}
    return {name: rng.choice(limits.dtypes) for name in names if rng.random() < 0.4}


def draw_sizes(rng: Random, limits: Limits, seqlen: int, width: int) -> dict[str, int]:
    """batch and seqlen such that so many elements a token are within the limits."""
    seqlen = max(1, min(seqlen, limits.elements // width))
    return {"seqlen": seqlen, "batch": max(1, min(rng.randint(1, limits.batch), limits.elements // (width * seqlen)))}


def draw_layouts(rng: Random, names: tuple[str, ...]) -> dict[str, str]:
    if rng.random() < 0.4:
        return {}
    return {name: rng.choice(LAYOUTS[1:]) for name in names if rng.random() < 0.5}


def draw_call(rng: Random, limits: Limits, differentiable: tuple[str, ...], ways: tuple[str, ...] = ("out",)) -> dict:
    """The fields that say how a call is made, with gradients of some of these inputs; none: for inference."""
    mode = draw_mode(rng, limits)
    if not differentiable and mode == "checkpoint":
        mode = "no_grad"
    wanted = () if mode in modes.WITHOUT_GRADIENT or not differentiable else draw_subset(rng, differentiable)
    return {"seed": rng.randrange(2**24), "mode": mode, "wanted": wanted, "calls": limits.calls,
            "ways": ways if rng.random() < 0.7 else (rng.choice(ways),)}
