"""What the tests of the block's functions share: a call with its gradients, judged against fp64 and the torch form."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.errors import assert_near
from tests.inputs import generator

Results = dict[str, Tensor]


def run(function: Callable, given: dict, leaves: tuple[str, ...], named: tuple[str, ...] = ("out",),
        ways: tuple[Tensor, ...] | None = None, pull: float = 1.0) -> tuple[Results, tuple[Tensor, ...]]:
    """Outputs and gradients by name, and the cotangents: noise, and `pull` times what a loss that pulls to zero would send."""
    wanted = {name: given[name].detach().requires_grad_() for name in leaves if given[name] is not None}
    outs = function(**given | wanted)
    outs = (outs if isinstance(outs, tuple) else (outs,))[: len(named)]
    if ways is None:
        rng = generator(str(outs[0].device), "ways")
        ways = tuple((torch.randn(t.shape, generator=rng, device=t.device) + pull * t.detach()).to(t.dtype) for t in outs)
    torch.autograd.backward(outs, [way.to(t.dtype) for way, t in zip(ways, outs, strict=True)])
    got = dict(zip(named, (t.detach() for t in outs), strict=False))
    return got | {f"d{name}": leaf.grad for name, leaf in wanted.items()}, ways


def convert_to_fp64(given: dict, leaves: tuple[str, ...]) -> dict:
    """The same arguments with fp64 leaves."""
    return given | {name: given[name].double() for name in leaves if given[name] is not None}


def assert_right(function: Callable, mirror: Callable, definition: Callable, given: dict, leaves: tuple[str, ...],
                 named: tuple[str, ...], sums: tuple[str, ...], tokens: int) -> None:
    """tests/errors.py's rule. sums: results summed over `tokens` in another order than the mirror's, whose rounding counts as
    one over that many.
    """
    got, ways = run(function, given, leaves, named)
    expected, _ = run(mirror, given, leaves, named, ways)
    truth, _ = run(definition, convert_to_fp64(given, leaves), leaves, named, ways)
    assert got.keys() == expected.keys() == truth.keys()
    for name, value in got.items():
        assert_near(name, value, truth[name], expected[name], tokens if name in sums else 1)


def assert_within(function: Callable, definition: Callable, given: dict, named: tuple[str, ...], bound: float) -> None:
    """All outputs and gradients are off by less than `bound` of their norms, and a gradient has the dtype of its tensor."""
    leaves = tuple(name for name, t in given.items() if isinstance(t, Tensor) and t.is_floating_point())
    got, ways = run(function, given, leaves, named, pull=0.0)
    truth, _ = run(definition, convert_to_fp64(given, leaves), leaves, named, ways)
    assert [t.dtype for t in (got[f"d{name}"] for name in leaves)] == [given[name].dtype for name in leaves]
    for name, t in truth.items():
        assert got[name].shape == t.shape and (got[name] - t).norm() <= bound * t.norm(), name


def move(given: dict, device: str, dtype: torch.dtype | None = None) -> dict:
    """The same arguments on a device, floating-point tensors in a dtype."""
    return {name: t.to(device, dtype if t.is_floating_point() else None) if isinstance(t, Tensor) else t
            for name, t in given.items()}


def assert_same_bits(got: Results, expected: Results) -> None:
    assert got.keys() == expected.keys()
    assert not [name for name, t in expected.items() if not torch.equal(got[name], t)]
