"""How active heads and states are: scores by which the least active ones are removed.

The paper (arXiv:2511.22849) removes "low-activity states within the SSM component"; its exact score is not public. What follows
is ours. The means are over the tokens of calibration batches, dt has its bias and softplus applied, and |x_h| is the norm over
the channels of head h. A channel of Mamba-1 counts as a head, and all of its channels as one group:

    activity of head h    (R1)  E[1 - exp(dt_h A_h)]: the part of its state that it renews with a token; Mamba-2 alone
    activity of column n  (R2)  E[(sum_h dt_h |x_h|)^2 B_n^2] E[C_n^2], over the heads of a group: what is written to the
                                column, times how strongly it is read; Mamba-2 alone
    energy of h and n     (R3)  E[(dt_h |x_h|)^2 B_n^2] E[C_n^2] / E[1 - exp(2 dt_h A_hn)]: the same for one head, over how
                                fast it forgets, as if tokens were independent. A column has the sum over the heads of its
                                group, a head the sum over columns and E[|D_h x_h|^2], for its skip goes with it

In Mamba-1, whose rates differ by state, activity is the sum of (R3), without the skip. Magnitude and random scores, (R4) and
(R5), look at no data: they are what these are to be compared with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.mamba2 import Mamba2Cache
from .blocks import Block, find_blocks

MEASURED = ("activity", "energy")
SCORES = (*MEASURED, "magnitude", "random")


class Activity:
    """Measures a model's blocks while it runs; as a context manager, within which every forward counts.

    Args:
        model: with Mamba blocks; it is not changed.
        kind: "states" or "heads".

    Blocks are given rows of tokens, (batch, seqlen, channels) or (tokens, channels). The convolution is taken to run through
    documents that share a row, so the first three tokens of a document count a little otherwise than the model sees them. It
    goes on from a `Mamba2Cache`. Forwards with other caches count where they give whole prompts.

    Raises:
        ValueError: no such kind, or the model has none; within it, a padded prompt, or one token with another library's cache.
    """

    def __init__(self, model: nn.Module, kind: str = "states"):
        self.kind, self._blocks = kind, find_blocks(model, kind)
        self._sums: dict[str, dict[str, Tensor]] = {name: {} for name in self._blocks}
        self._hooks = []

    def __enter__(self) -> Activity:
        for name, block in self._blocks.items():
            def measure(_, args, kwargs, name=name, block=block):
                self._add(name, block, find_input(args, kwargs), _find_tokens_before(args, kwargs))

            self._hooks.append(block.module.register_forward_pre_hook(measure, with_kwargs=True))
        return self

    def __exit__(self, *_) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def scores(self, score: str = "activity") -> dict[str, Tensor]:
        """"activity" or "energy" by block: (ngroups, dstate) for states, (nheads,) for heads, fp64 on the CPU.

        Raises:
            ValueError: no such score, or nothing was run.
        """
        if score not in MEASURED:
            raise ValueError(f"score: got {score!r}, expected one of {', '.join(MEASURED)}")
        return {name: self._score(name, block, score).cpu() for name, block in self._blocks.items()}

    def score_pairs(self, name: str) -> Tensor:
        """(R3) of a block, (nheads, dstate)."""
        mean, block = self._compute_means(name), self._blocks[name]
        read = mean["read"].repeat_interleave(block.nheads // block.ngroups, 0)
        return mean["written_by_head"] * read / mean["forgotten"].clamp(min=torch.finfo(torch.float32).tiny)

    def _score(self, name: str, block: Block, score: str) -> Tensor:
        mean = self._compute_means(name)
        if score == "activity" and block.ssd:
            return mean["renewed"] if self.kind == "heads" else mean["written"] * mean["read"]
        pairs = self.score_pairs(name)
        if self.kind == "states":
            return pairs.view(block.ngroups, -1, block.dstate).sum(1)
        return pairs.sum(1) + (mean["skipped"] if score == "energy" else 0)

    def _compute_means(self, name: str) -> dict[str, Tensor]:
        sums = self._sums[name]
        if not sums:
            raise ValueError(f"model: {name} was not run, expected at least one batch within the block")
        return {key: total / sums["tokens"] for key, total in sums.items()}

    @torch.no_grad()
    def _add(self, name: str, block: Block, u: Tensor, before: Tensor | None) -> None:
        rows = u if u.dim() == 3 else u[None]
        rows = rows * getattr(block.module, "ssm_in_multiplier", 1)  # of Falcon-H1, before it projects
        projected = block.module.in_proj(rows) if ("in_proj.weight", 0) in block.axes else rows
        with torch.autocast(u.device.type, enabled=False):  # sums are in fp32, whatever the model computes in
            found = _measure_ssd(block, projected, before) if block.ssd else _measure_scan(block, projected)
        found["tokens"] = torch.tensor(rows.shape[0] * rows.shape[1], dtype=torch.float64, device=rows.device)
        sums = self._sums[name]
        for key, total in found.items():
            sums[key] = sums.get(key, 0) + total.double()


def score_magnitude(model: nn.Module, kind: str = "states") -> dict[str, Tensor]:
    """(R4): the squared norm of what writes a state or head times that of what reads it; of weights alone.

    States: the rows of B and of C in their projection. Heads: the rows of x in in_proj and the columns of out_proj.
    """
    return {name: _weigh(block, kind) for name, block in find_blocks(model, kind).items()}


def score_random(model: nn.Module, kind: str = "states", seed: int = 0) -> dict[str, Tensor]:
    """(R5): uniform numbers, the same for the same model and seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = {name: (b.ngroups, b.dstate) if kind == "states" else (b.nheads,) for name, b in find_blocks(model, kind).items()}
    return {name: torch.rand(size, generator=generator, dtype=torch.float64) for name, size in shape.items()}


def find_input(args: tuple, kwargs: Mapping[str, object]) -> Tensor:
    """What a block was called with first: its rows, whatever they are called."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _find_tokens_before(args: tuple, kwargs: Mapping[str, object]) -> Tensor | None:
    """What the convolution of a block's call begins with, (batch, channels, d_conv - 1), before activation; None: zeros."""
    if kwargs.get("mask") is not None:
        raise ValueError("model: got a padded prompt, expected prompts of one length: padding would count as tokens")
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Mamba2Cache)), None)
    others = any(kwargs.get(name) is not None for name in ("cache_params", "past_key_values"))
    if cache is None and others and find_input(args, kwargs).shape[1] == 1:
        raise ValueError("model: got one token with a cache, expected whole prompts: what was before it is not seen")
    return None if cache is None else cache.conv_state


def _weigh(block: Block, kind: str) -> Tensor:
    projection = "in_proj.weight" if block.ssd or kind == "heads" else "x_proj.weight"
    rows = block.split(block.parameter(projection).detach().double().square().sum(1), projection)
    if kind == "states":
        return (rows["B"] * rows["C"]).view(block.ngroups, block.dstate).cpu()
    columns = block.split(block.parameter("out_proj.weight").detach().double().square().sum(0), "out_proj.weight", 1)["x"]
    return (rows["x"].view(block.nheads, -1).sum(1) * columns.view(block.nheads, -1).sum(1)).cpu()


def _convolve(module: nn.Module, rows: Tensor, before: Tensor | None = None) -> Tensor:
    """(batch, seqlen, channels) through a block's causal convolution and SiLU, in fp32. before: as `_find_tokens_before`."""
    weight, bias = module.conv1d.weight.float(), module.conv1d.bias
    rows = rows.float().mT
    rows = F.pad(rows, (weight.shape[-1] - 1, 0)) if before is None else torch.cat([before.float(), rows], -1)
    return F.silu(F.conv1d(rows, weight, None if bias is None else bias.float(), groups=weight.shape[0])).mT


def _measure_ssd(block: Block, projected: Tensor, before: Tensor | None) -> dict[str, Tensor]:
    """Sums over tokens of what (R1) to (R3) take the means of; projected: by in_proj."""
    module = block.module
    if (scale := getattr(module, "mup_vector", None)) is not None:
        projected = projected * scale
    parts = block.split(projected, "in_proj.weight")
    xBC = block.split(_convolve(module, torch.cat([parts[label] for label in "xBC"], -1), before), "conv1d.weight")
    dt = F.softplus(parts["dt"].float() + module.dt_bias.float())
    dt = dt.clamp(*next((getattr(module, name) for name in ("dt_limit", "time_step_limit") if hasattr(module, name)), (0.0,)))
    x = xBC["x"].unflatten(-1, (block.nheads, block.headdim))
    strength = (dt * x.norm(dim=-1)).unflatten(-1, (block.ngroups, -1)).flatten(0, 1)  # [tokens, ngroups, nheads / ngroups]
    B, C = (xBC[label].unflatten(-1, (block.ngroups, block.dstate)).flatten(0, 1).square() for label in "BC")
    rate = module.A_log.float().exp()
    return {"renewed": -torch.expm1(-dt * rate).sum((0, 1)), "read": C.sum(0),
            "written": torch.einsum("tg, tgn -> gn", strength.sum(-1).square(), B),
            "written_by_head": torch.einsum("tgh, tgn -> ghn", strength.square(), B).flatten(0, 1),
            "forgotten": -torch.expm1(-2 * dt * rate).sum((0, 1))[:, None],
            "skipped": (x * module.D.float().view(block.nheads, -1)).square().sum((0, 1, 3))}


def _measure_scan(block: Block, projected: Tensor) -> dict[str, Tensor]:
    """Sums over tokens of what (R3) takes the means of; projected: by in_proj, or where there is none, what is scanned."""
    module, x = block.module, projected.float()
    if ("in_proj.weight", 0) in block.axes:
        x = _convolve(module, block.split(x, "in_proj.weight")["x"])
    x = x.flatten(0, 1)  # [tokens, channels]
    parts = block.split(F.linear(x, module.x_proj.weight.float()), "x_proj.weight")
    dt = F.softplus(F.linear(parts["rest"], module.dt_proj.weight.float(), module.dt_proj.bias.float()))
    rates = 2 * module.A_log.float().exp()
    return {"written_by_head": (dt * x).square().T @ parts["B"].square(), "read": parts["C"].square().sum(0, keepdim=True),
            "forgotten": torch.stack([-torch.expm1(-dt * rate).sum(0) for rate in rates.T], 1),  # by state: it saves memory
            "skipped": (x * module.D.float()).square().sum(0)}
