"""The optimizer LAMB (arXiv:1904.00962), which a CUDA graph can hold: nothing in it waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MOST = 1.0  # of the gradient's norm, over all parameters


class Lamb(torch.optim.Optimizer):
    """As timm's `Lamb` is by default: the whole gradient is clipped at norm 1, and what decays takes steps in proportion to its
    own norm. Each group counts its steps, in a tensor.

    Args:
        groups: of parameters on one device, each with its `weight_decay`.
        lr: the learning rate, in a tensor if a CUDA graph is to heed its changes.
        betas, eps: as of Adam.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float | Tensor, betas: tuple[float, float], eps: float = 1e-6):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            group["step"] = torch.zeros((), device=group["params"][0].device if group["params"] else None)

    @torch.no_grad()
    def step(self) -> None:
        norm = nn.utils.get_total_norm([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters, (norm / _MOST).clamp(min=1.0))

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor], shrink: Tensor) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        means, squares = ([self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        group["step"] += 1
        grads = torch._foreach_div([p.grad for p in parameters], shrink)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_div_(scales, (1 - beta2 ** group["step"]).sqrt())
        torch._foreach_add_(scales, group["eps"])
        updates = torch._foreach_div(means, 1 - beta1 ** group["step"])
        torch._foreach_div_(updates, scales)
        if decay:
            torch._foreach_add_(updates, parameters, alpha=decay)
            ratios = [(own / of_update).masked_fill((own == 0) | (of_update == 0), 1.0)
                      for own, of_update in zip(torch._foreach_norm(parameters), torch._foreach_norm(updates), strict=True)]
            torch._foreach_mul_(updates, ratios)
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_sub_(parameters, updates)
