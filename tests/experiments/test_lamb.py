"""LAMB: its formula, parameter by parameter, and timm's where that is installed."""

import pytest
import torch

from experiments.lamb import Lamb


def make(seed: int = 0) -> list[dict]:
    """Two groups: weights that decay, of which one is 0, and one that does not."""
    torch.manual_seed(seed)
    decaying, other = [torch.randn(5, 4), torch.zeros(3, 3)], [torch.randn(7)]
    return [{"params": [torch.nn.Parameter(t) for t in group], "weight_decay": decay} for group, decay in
            ((decaying, 0.1), (other, 0.0))]


def take_steps(optimizer: torch.optim.Optimizer, scale: float) -> list[torch.Tensor]:
    """Weights after five steps with gradients so large, and of the last parameter none in the first."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    random = torch.Generator().manual_seed(1)
    for step in range(5):
        for p in every:
            p.grad = scale * torch.randn(p.shape, generator=random)
        if step == 0:
            every[1].grad.zero_()
        optimizer.step()
    return [p.detach() for p in every]


class ByHand(torch.optim.Optimizer):
    """The formula of arXiv:1904.00962, algorithm 2, in fp64, with the gradient clipped."""

    def __init__(self, groups: list[dict], lr: float):
        super().__init__(groups, {})
        self.lr, self.count, self.moments = lr, 0, {}

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        norm = sum(p.grad.double().square().sum() for group in self.param_groups for p in group["params"]) ** 0.5
        for group in self.param_groups:
            for p in group["params"]:
                g, (m, v) = p.grad.double() / max(norm, 1), self.moments.get(p, (0, 0))
                self.moments[p] = m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
                update = m / (1 - 0.9**self.count) / ((v / (1 - 0.95**self.count)) ** 0.5 + 1e-6)
                if group["weight_decay"]:
                    update += group["weight_decay"] * p.double()
                    own, its = p.double().norm(), update.norm()
                    update *= own / its if own and its else 1
                p -= self.lr * update


@pytest.mark.parametrize("scale", [1e-2, 10.0], ids=["small", "clipped"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_it_is_the_formula(scale, as_tensor):
    found = take_steps(Lamb(make(), torch.tensor(0.1) if as_tensor else 0.1, (0.9, 0.95)), scale)
    torch.testing.assert_close(found, take_steps(ByHand(make(), 0.1), scale))


def test_it_is_timms():
    timm = pytest.importorskip("timm.optim")
    found = take_steps(Lamb(make(), 0.1, (0.9, 0.95)), 1.0)
    torch.testing.assert_close(found, take_steps(timm.Lamb(make(), 0.1, betas=(0.9, 0.95)), 1.0))


def test_without_gradients_nothing_happens():
    groups = make()
    before = [p.detach().clone() for group in groups for p in group["params"]]
    groups[0]["params"][0].grad = torch.ones(5, 4)
    Lamb(groups, 0.1, (0.9, 0.95)).step()
    after = [p.detach() for group in groups for p in group["params"]]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, True]
