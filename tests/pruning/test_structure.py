"""A pruned block is the whole one with what was removed zeroed, to rounding; and what cannot be pruned says so."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from experiments.workloads.graph_mixers import Mamba1, Sequences
from experiments.workloads.vision_mixers import Mamba1 as VisionMamba1
from ssd.modules import Mamba2
from ssd.pruning import KINDS, Block, Kept, choose, find_blocks, prune, score_random
from tests.in_torch import in_torch  # noqa: F401  a fixture
from tests.modules.test_mamba2 import SETTINGS

SIZES = {"d_model": 32, "d_state": 32, "headdim": 8, "chunk_size": 16, "variant": "torch"}


class OfRows(nn.Module):
    """A Mamba-1 block of graphs on rows (batch, seqlen, channels)."""

    def __init__(self):
        super().__init__()
        self.mixer = Mamba1(32, 16, "torch")

    def forward(self, u: Tensor) -> Tensor:
        return self.mixer(u.flatten(0, 1), Sequences.make_alike(*u.shape[:2], u.device)).view(u.shape)


def shake(model: nn.Module) -> nn.Module:
    """Ones and zeros would hide what they multiply."""
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def fresh(make: Callable[[], nn.Module]) -> nn.Module:
    """The same each time; a copy would lack marks of parameters."""
    torch.manual_seed(0)
    return shake(make())


def rows() -> Tensor:
    return torch.randn(2, 23, 32, generator=torch.Generator().manual_seed(1))


def list_removed(kept: Tensor, count: int) -> list[int]:
    return sorted({*range(count)} - {*kept.tolist()})


def zero(block: Block, kept: Kept) -> None:
    """By the layout that mamba_ssm's blocks have, not by the library's tables of it: what x, B and C are made of."""
    module, heads = block.module, list_removed(kept.heads, block.nheads)
    if block.ssd:
        dim, n = block.nheads * block.headdim, block.dstate
        gone = [h * block.headdim + p for h in heads for p in range(block.headdim)]
        gone += [dim + first + g * n + s for first in (0, block.ngroups * n) for g in range(block.ngroups)
                 for s in list_removed(kept.states[g], n)]
    else:
        gone = heads
        module.x_proj.weight.data[[module.dt_proj.weight.shape[1] + s for s in list_removed(kept.states[0], block.dstate)]] = 0
    for parameter in (module.conv1d.weight, module.conv1d.bias) if hasattr(module, "conv1d") else ():
        if parameter is not None:
            parameter.data[gone] = 0


CASES = {**{name: (lambda settings=settings: Mamba2(**SIZES, **settings), KINDS) for name, settings in SETTINGS.items()},
         "Mamba-1": (OfRows, KINDS), "Mamba-1 of images": (lambda: VisionMamba1(32, 2, "torch"), ("states",))}


@pytest.mark.parametrize(("make", "kind"), [pytest.param(make, kind, id=f"{name}, {kind}")
                                            for name, (make, kinds) in CASES.items() for kind in kinds])
def test_a_pruned_block_is_the_whole_one_with_those_channels_zeroed(make, kind):
    whole, pruned, zeroed = (fresh(make) for _ in range(3))
    u = rows()
    (kept,) = prune(pruned, score_random(whole, kind), kind, 0.5).values()
    (block,) = find_blocks(zeroed, kind).values()
    (smaller,) = find_blocks(pruned, kind).values()
    zero(block, kept)
    assert smaller.count(kind) * 2 == block.count(kind)
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in whole.parameters())
    expected = zeroed(u)
    assert_close(pruned(u), expected, rtol=1e-5, atol=2e-5)
    assert (whole(u) - expected).norm() > 0.01 * expected.norm(), "what was removed did nothing"
    marks = [getattr(p, "_no_weight_decay", False) for p in whole.parameters()]
    assert marks == [getattr(p, "_no_weight_decay", False) for p in pruned.parameters()] and any(marks)

    # a planted fault: the column of another state, or of another head, in one of two places
    parameter = smaller.parameter("A_log" if kind == "heads" else "in_proj.weight" if smaller.ssd else "x_proj.weight")
    last = smaller.split(parameter.data, "in_proj.weight" if smaller.ssd else "x_proj.weight", dim=0)["C"] if (
        kind == "states") else parameter.data
    last.copy_(last.roll(1, 0))
    assert (pruned(u) - expected).norm() > 1e-3 * expected.norm()


def test_a_pruned_block_decodes():
    block, u = shake(Mamba2(**SIZES, ngroups=2)), rows()
    for kind in KINDS:
        prune(block, score_random(block, kind), kind, 0.5)
    with torch.no_grad():
        cache = block.new_cache(2)
        steps = torch.stack([block.step(token, cache) for token in u.unbind(1)], 1)
        assert_close(steps, block(u), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "ratio", "said"), [
    ("states", 0.3, r"ratio: got 0.3, which leaves 22.4 of the 32 states of a group in the block, .* multiple of 16.*: 0\.5$"),
    ("states", 1.0, "ratio: got 1.0, which leaves 0 of"), ("states", 0, "ratio: got 0,"), ("states", 0.75, "leaves 8 of"),
    ("heads", 0.9, r"leaves 0\.4 of the 4 heads of a group in .* multiple of 1, .*: 0.25, 0.5, 0.75$"),
    ("rows", 0.5, "kind: got 'rows', expected one of states, heads")])
def test_what_leaves_too_little_is_refused(kind, ratio, said):
    block = Mamba2(**SIZES, ngroups=2)
    before = block.in_proj.weight
    with pytest.raises(ValueError, match=said):
        prune(block, score_random(block), kind, ratio)
    assert block.in_proj.weight is before


def test_what_has_none_of_it_is_refused():
    with pytest.raises(ValueError, match="model: got Linear without states to remove, expected Mamba-2 blocks"):
        find_blocks(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="model: got Mamba1 without heads to remove"):
        find_blocks(VisionMamba1(32, 2, "torch"), "heads")
    other = Mamba2(**SIZES)
    other.in_proj = nn.Linear(32, 201)
    with pytest.raises(ValueError, match=r"model: got \.in_proj\.weight of shape \(201, 32\), expected 200 along axis 0"):
        find_blocks(other)
    blocks = find_blocks(Mamba2(**SIZES))
    with pytest.raises(ValueError, match="scores: got none for"):
        choose(blocks, {}, "states", 0.5)
    with pytest.raises(ValueError, match=r"scores: got \(3,\) for , expected \(1, 32\), finite"):
        choose(blocks, {"": torch.zeros(3)}, "states", 0.5)
    with pytest.raises(ValueError, match=r"scores: got \(1, 32\) with infinite numbers or NaN for "):
        choose(blocks, {"": torch.full((1, 32), torch.nan)}, "states", 0.5)
    with pytest.raises(TypeError, match="scores: got list for , expected a tensor of real numbers"):
        choose(blocks, {"": [1.0]}, "states", 0.5)


@torch.no_grad()
def test_a_norm_of_other_groups_than_the_ssds():
    """One mean of all channels, with two groups of B and C."""
    for group_size in (None, 64):
        pruned, zeroed = (fresh(lambda: Mamba2(**SIZES, ngroups=2)) for _ in range(2))
        pruned.norm.group_size = zeroed.norm.group_size = group_size
        (kept,) = prune(pruned, score_random(zeroed, "heads"), "heads", 0.5).values()
        zero(find_blocks(zeroed)[""], kept)
        got, expected = (torch.stack([block.step(token, cache) for token in rows().unbind(1)])
                         for block in (pruned, zeroed) for cache in [block.new_cache(2)])
        assert_close(got, expected, rtol=1e-5, atol=2e-5)
