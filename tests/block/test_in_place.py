"""Results may be changed in place in training, as those of torch's own functions: their gradients are then of what they became.

A model does so where it adds a residual or masks tokens. No backward here reads a result that the caller has.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssd import ssd_chunk_scan
from ssd.block import RMSNormGated, causal_conv1d_fn, mamba_inner_fn, rms_norm_gated, selective_scan_fn
from ssd.block.split_conv1d_scan import split_conv1d_scan
from ssd.modules import Mamba2
from ssd.runtime import replay
from tests.inputs import OURS, generator

BATCH, SEQLEN, HEADS, HEADDIM, DSTATE = 2, 9, 2, 16, 16
DIM = HEADS * HEADDIM
FEW = 4  # channels of a selective scan, which takes its time in the interpreter


class Given:
    """Random leaves, the same ones whenever they are drawn again."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int):
        self.rng = generator(device, "in place", seed)
        self.device, self.dtype = device, dtype
        self.leaves: list[Tensor] = []

    def leaf(self, *shape: int) -> Tensor:
        t = torch.randn(shape, generator=self.rng, device=self.device).to(self.dtype)
        self.leaves.append(t.requires_grad_())
        return t

    def rate(self, *shape: int) -> Tensor:
        return -self.leaf(*shape).exp()


def scan(given: Given, variant: str, gate: bool = False):
    tokens = BATCH, SEQLEN
    x, dt, A = given.leaf(*tokens, HEADS, HEADDIM), given.leaf(*tokens, HEADS), given.rate(HEADS)
    B, C = given.leaf(*tokens, 1, DSTATE), given.leaf(*tokens, 1, DSTATE)
    return ssd_chunk_scan(x, dt, A, B, C, 16, D=given.leaf(HEADS), z=given.leaf(*x.shape) if gate else None,
                          initial_states=given.leaf(BATCH, HEADS, HEADDIM, DSTATE), dt_softplus=True,
                          return_final_states=True, variant=variant)


def scan_of_documents(given: Given):
    x, dt, A = given.leaf(1, SEQLEN, HEADS, HEADDIM), given.leaf(1, SEQLEN, HEADS), given.rate(HEADS)
    ends = torch.tensor([0, 4, SEQLEN], dtype=torch.int32, device=x.device)
    B, C = given.leaf(1, SEQLEN, 1, DSTATE), given.leaf(1, SEQLEN, 1, DSTATE)
    return ssd_chunk_scan(x, dt, A, B, C, 16, cu_seqlens=ends, dt_softplus=True, return_final_states=True,
                          return_varlen_states=True)


def convolution(given: Given, layout=lambda x: x):
    x = layout(given.leaf(BATCH, DIM, SEQLEN))
    return causal_conv1d_fn(x, given.leaf(DIM, 4), given.leaf(DIM), initial_states=given.leaf(BATCH, DIM, 3),
                            return_final_states=True, activation="silu")


def norm(given: Given, *rows: int):
    return (rms_norm_gated(given.leaf(*rows, DIM), given.leaf(DIM), given.leaf(DIM), given.leaf(*rows, DIM), group_size=16),)


def norm_module(given: Given):
    module = RMSNormGated(DIM, device=given.device, dtype=given.dtype)
    given.leaves.append(module.weight)
    return (module(given.leaf(BATCH, SEQLEN, DIM), given.leaf(BATCH, SEQLEN, DIM)),)


def selective_scan(given: Given):
    u, delta, z = (given.leaf(BATCH, FEW, SEQLEN) for _ in range(3))
    B, C = given.leaf(BATCH, 2, SEQLEN), given.leaf(BATCH, 2, SEQLEN)
    return selective_scan_fn(u, delta, given.rate(FEW, 2), B, C, given.leaf(FEW), z, delta_softplus=True,
                             return_last_state=True)


def inner(given: Given):
    return (mamba_inner_fn(given.leaf(BATCH, 2 * FEW, SEQLEN), given.leaf(FEW, 1, 4), given.leaf(FEW), given.leaf(5, FEW),
                           given.leaf(FEW, 1), given.leaf(6, FEW), None, given.rate(FEW, 2), D=given.leaf(FEW)),)


def split(given: Given, norm: bool, project: bool):
    convolved = DIM + 2 * DSTATE
    return split_conv1d_scan(
        given.leaf(BATCH, SEQLEN, DIM + convolved + HEADS), given.leaf(convolved, 4), None, given.leaf(HEADS),
        given.rate(HEADS), given.leaf(HEADS), 16, headdim=HEADDIM, return_final_states=True, return_conv_states=True,
        rmsnorm_weight=given.leaf(DIM) if norm else None, outproj_weight=given.leaf(6, DIM) if project else None)


def block(given: Given):
    torch.manual_seed(0)
    module = Mamba2(DIM, d_state=DSTATE, headdim=HEADDIM, expand=1, chunk_size=16, device=given.device, dtype=given.dtype)
    given.leaves += module.parameters()
    return (module(given.leaf(BATCH, SEQLEN, DIM)),)


FUNCTIONS = {
    **{f"scan, {variant}": lambda given, variant=variant: scan(given, variant) for variant in (*OURS, "torch", "auto")},
    "scan with a gate": lambda given: scan(given, "auto", gate=True),
    "scan of documents": scan_of_documents,
    "convolution": convolution,
    "convolution, channels last": lambda given: convolution(given, lambda x: x.mT.contiguous().mT),
    "norm": lambda given: norm(given, BATCH, SEQLEN),
    "norm of rows": lambda given: norm(given, SEQLEN),
    "norm of one row": norm,
    "norm, a module": norm_module,
    "selective scan": selective_scan,
    "inner": inner,
    "split, a gate": lambda given: split(given, norm=False, project=False),
    "split, a norm": lambda given: split(given, norm=True, project=False),
    "split, projected": lambda given: split(given, norm=True, project=True),
    "block": block,
}
_KERNELS_ALONE = [f"scan, {variant}" for variant in OURS]
_NOT_REPLAYED = ("scan, torch", "selective scan", "inner", "convolution")  # what is no launch is between theirs
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


def gradients(function, change, given: Given, copied: bool) -> list[Tensor]:
    """Outputs as they have become, and the gradients; copied: of copies that are changed instead of what a function gave."""
    outs = [out.clone() if copied else out for out in function(given)]
    for out in outs:
        change(out, given.leaf(*out.shape))
    loss = sum((out.float() * torch.randn(out.shape, generator=given.rng, device=given.device)).sum() for out in outs)
    found = torch.autograd.grad(loss, given.leaves, allow_unused=True)
    return [*(out.detach() for out in outs), *(t for t in found if t is not None)]


def check(function, change, device: str, dtype: torch.dtype, seed: int = 0) -> None:
    got, wanted = (gradients(FUNCTIONS[function], CHANGES[change], Given(device, dtype, seed), copied)
                   for copied in (False, True))
    assert len(got) == len(wanted) > 2
    for a, b in zip(got, wanted, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-9 if dtype == torch.float64 else 0, atol=0)  # torch may sum in another order


@pytest.mark.parametrize(("function", "change"), [
    *((function, "twice") for function in FUNCTIONS), *((function, change) for function in ("scan, fused", "norm")
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
            check(function, change, device, torch.bfloat16, seed)
    assert any(isinstance(t, replay.Recording) for t in replay._recordings.values()) == (function not in _NOT_REPLAYED)
