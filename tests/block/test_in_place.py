"""Results may be changed in place in training, as those of torch's own functions: their gradients are then of what they became.

A model does so where it adds a residual or masks tokens. No backward here reads a result that the caller has, but for that of a
scan with a gate: there torch raises an error, as it does for its own exp or tanh.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from ssd.block import RMSNormGated, mamba_inner_fn
from ssd.block.split_conv1d_scan import split_conv1d_scan
from ssd.modules import Mamba2
from ssd.runtime import replay
from tests.block import test_gated_norm, test_mamba_inner
from tests.functions import BLOCK, Function, scan
from tests.inputs import OURS, Case, generator
from tests.interop import test_split

USUAL = Case(D="h", dt_softplus=True, initial_states=True)
GATED = Case(D="h", dt_softplus=True, initial_states=True, z=True)


def compose(call, drawn, **settings) -> Function:
    """A function whose tensors are all leaves, drawn on the CPU in fp32."""
    leaves = tuple(name for name, t in drawn().items() if isinstance(t, Tensor))
    return Function(lambda **given: call(**given, **settings), lambda tokens, device, dtype: {
        name: t.to(device) if isinstance(t, Tensor) else t for name, t in drawn().items()}, leaves)


def module(made: nn.Module, **sizes) -> Function:
    """A module, whose parameters are arguments too."""
    parameters = dict(made.named_parameters())

    def call(**given):
        return functional_call(made, {name: given[name] for name in parameters}, tuple(given[name] for name in sizes))

    return compose(call, lambda: {name: t.detach() for name, t in parameters.items()} | {
        name: torch.randn(size) for name, size in sizes.items()})


def norm_of(*rows: int) -> Function:
    inputs = test_gated_norm.inputs(rows, 32, "before", True, torch.float32, "cpu")
    return compose(BLOCK["gated_norm"].call, lambda: test_gated_norm.name_arguments(inputs, 16, "before"))


def split(**settings) -> Function:
    return compose(split_conv1d_scan, lambda: test_split.draw_arguments(conv_bias=False, final=True, **settings),
                    return_conv_states=True)


FUNCTIONS = {
    **{f"scan, {variant}": scan(variant, USUAL) for variant in (*OURS, "torch", "auto")},
    "scan with a gate": scan("auto", GATED),
    "scan of documents": scan("auto", Case(documents="varlen", dt_softplus=True)),
    "conv1d, channels first": BLOCK["conv1d"]._replace(inputs=lambda *of: {
        name: t.contiguous() if isinstance(t, Tensor) else t for name, t in BLOCK["conv1d"].inputs(*of).items()}),
    **BLOCK,
    "norm of rows": norm_of(9),
    "norm of one row": norm_of(),
    "norm, a module": module(RMSNormGated(32), x=(2, 9, 32), z=(2, 9, 32)),
    "inner": compose(mamba_inner_fn, test_mamba_inner.draw_arguments),
    "split, a gate": split(norm=False, outproj=False, outproj_bias=False),
    "split, a norm": split(outproj=False, outproj_bias=False),
    "split, projected": split(),
    "block": module(Mamba2(32, d_state=16, headdim=16, expand=1, chunk_size=16), u=(2, 9, 32)),
}
GATED_SCANS = ("scan with a gate", "split, a gate")
_KERNELS_ALONE = ["middle", *(f"scan, {variant}" for variant in OURS)]
_NOT_REPLAYED = ("scan, torch", "selective_scan", "inner", "conv1d, channels first")  # what is no launch is between theirs
# of an output and a leaf of its shape
CHANGES = {
    "mul_": lambda out, leaf: out.mul_(2),
    "add": lambda out, leaf: out.__iadd__(leaf),
    "slice": lambda out, leaf: out.__setitem__((..., 0), 0),
    "masked": lambda out, leaf: out.masked_fill_(leaf > 0, 0),
    "a view": lambda out, leaf: out.transpose(0, -1)[0].mul_(3),
    "twice": lambda out, leaf: out.neg_().add_(leaf),
}


class Watching(TorchDispatchMode):
    """Around which functions run as custom ops."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def gradients(call, change, given: dict, leaves: dict[str, Tensor], copied: bool) -> list[Tensor]:
    """Outputs as they have become, and the gradients; copied: of copies that are changed instead of what a function gave."""
    outs = call(**given | leaves)
    outs = [out.clone() if copied else out for out in (outs if isinstance(outs, tuple) else (outs,))]
    rng = generator(str(outs[0].device), "in place")
    added, weights = ([torch.randn(out.shape, generator=rng, device=out.device) for out in outs] for _ in range(2))
    added = [t.to(out.dtype).requires_grad_() for t, out in zip(added, outs, strict=True)]
    for out, leaf in zip(outs, added, strict=True):
        change(out, leaf)
    loss = sum((out.float() * weight).sum() for out, weight in zip(outs, weights, strict=True))
    found = torch.autograd.grad(loss, (*leaves.values(), *added), allow_unused=True)
    return [*(out.detach() for out in outs), *(t for t in found if t is not None)]


def check(function: str, change: str, device: str, dtype: torch.dtype, factor: float = 1.0) -> None:
    call, inputs, names = FUNCTIONS[function][:3]
    given = inputs(9, device, torch.float32)
    leaves = {name: (given[name] * factor).to(dtype).requires_grad_() for name in names if given[name] is not None}
    if function in GATED_SCANS:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*output 0 of chunk_scan"):
            gradients(call, CHANGES[change], given, leaves, copied=False)
        return
    got, wanted = (gradients(call, CHANGES[change], given, leaves, copied) for copied in (False, True))
    assert len(got) == len(wanted) > 2
    for a, b in zip(got, wanted, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-9 if dtype == torch.float64 else 0, atol=0)  # torch may sum in another order


@pytest.mark.parametrize(("function", "change"), [
    *((function, "twice") for function in FUNCTIONS), *((function, change) for function in ("scan, fused", "gated_norm")
                                                        for change in CHANGES if change != "twice")])
def test_changed_in_place(function, change, device):
    check(function, change, device, torch.float32)


@pytest.mark.parametrize("way", ("op", "torch form"))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_way(function, way, device):
    """As a custom op, which torch.compile and modes take, and where no kernel runs."""
    if way == "torch form" and function in _KERNELS_ALONE:
        pytest.skip("takes no fp64")
    dtype = torch.float64 if way == "torch form" else torch.float32
    with Watching() if way == "op" else nullcontext():
        check(function, "add", "cpu" if way == "torch form" else device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_replayed(function, device):
    """Launches are repeated from the third call on; what they write into is new in each."""
    replay.clear()
    for seed in range(5):
        for change in CHANGES:
            check(function, change, device, torch.bfloat16, factor=1 + seed / 8)
    assert any(isinstance(t, replay.Recording) for t in replay._recordings.values()) == (function not in _NOT_REPLAYED)
