"""A bridge from what a pruned block computes to what the rest of the model was trained to receive.

The paper is said to have a bridging layer for compatibility; what it is we could not read. Ours costs nothing when the model
runs: a linear map of what reaches out_proj, fitted by least squares on calibration data and added to out_proj. So no layer is
added. Each block is fitted by itself, on what it receives in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .blocks import find_blocks

_HELD_OUT = 4  # one row of tokens in so many is judged by, not fitted to
_RIDGE = 1e-3  # of the mean square of a feature: how strongly the fit keeps to the out_proj that there is


class Bridge:
    """Gathers what the fit takes while the whole model runs; as a context manager, within which every forward counts.

    With z the features that the pruned block gives its out_proj, W, and r = y - W z what the whole block's output y has
    besides, the fit is the D of least E|r - D z|^2 + ridge E|z|^2 |D|^2 / features, over three of four tokens. W + D takes the
    place of W where the error on the other tokens, which the fit has not seen, falls; elsewhere the block stays as it is.

    Args:
        whole: the model before pruning; it is run by the caller, without a cache of states, and not changed.
        pruned: a pruned copy of it; `apply` changes its out_proj.

    Raises:
        ValueError: the two have not the same blocks, share one, or none has an out_proj.
    """

    def __init__(self, whole: nn.Module, pruned: nn.Module):
        self._whole, self._pruned = find_blocks(whole, "heads"), find_blocks(pruned, "heads")
        if self._whole.keys() != self._pruned.keys():
            raise ValueError(f"pruned: got the blocks {', '.join(self._pruned)}, expected {', '.join(self._whole)}")
        if any(block.module is self._pruned[name].module for name, block in self._whole.items()):
            raise ValueError("pruned: got blocks that whole has too, expected a pruned copy of whole, with blocks of its own")
        self._sums: dict[str, list[Tensor]] = {}
        self._hooks = []

    def __enter__(self) -> Bridge:
        for name, block in self._whole.items():
            def gather(_, args, kwargs, output, name=name):
                self._add(name, args, kwargs, output[0] if isinstance(output, tuple) else output)

            self._hooks.append(block.module.register_forward_hook(gather, with_kwargs=True))
        return self

    def __exit__(self, *_) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def apply(self) -> dict[str, tuple[float, float]]:
        """Changes out_proj where that helps. It uses up what was gathered: to apply again takes new batches.

        Returns:
            By block the error on tokens held out, E|r|^2 / E|y|^2, before and after; the same twice where nothing was changed.

        Raises:
            ValueError: a block was not run since the last apply; nothing was changed.
        """
        if missing := self._whole.keys() - self._sums.keys():
            raise ValueError(f"whole: {', '.join(sorted(missing))} was not run, expected at least one batch within the bridge, "
                             "and again after each apply")
        errors, changes = {}, {}
        for name, sums in self._sums.items():
            zz, zr, held_zz, held_zr, rr, yy = (t.double() for t in sums)
            ridge = _RIDGE * zz.diagonal().mean() * torch.eye(len(zz), dtype=zz.dtype, device=zz.device)
            change, singular = torch.linalg.solve_ex(zz + ridge, zr)  # [features, d_model]
            left = rr - 2 * (change * held_zr).sum() + (change * (held_zz @ change)).sum()
            if helps := not singular and bool(left < rr):
                changes[name] = change.T.to(self._pruned[name].module.out_proj.weight.dtype)
            errors[name] = (float(rr / yy), float((left if helps else rr) / yy))
        for name, change in changes.items():
            self._pruned[name].module.out_proj.weight += change
        self._sums.clear()
        return errors

    @torch.no_grad()
    def _add(self, name: str, args: tuple, kwargs: dict, output: Tensor) -> None:
        module = self._pruned[name].module
        projection = module.out_proj
        kwargs = {key: value for key, value in kwargs.items() if key != "A"}  # the whole block's, from `Mamba2LM`
        with _give_features(projection) as weight:
            z = module(*args, **kwargs)
        with torch.autocast(output.device.type, enabled=False):  # sums are in fp32, whatever the models compute in
            z = (z[0] if isinstance(z, tuple) else z).flatten(0, -2).float()
            y = output.flatten(0, -2).float()
            r = y - z @ weight.float().T - (0 if projection.bias is None else projection.bias.float())
            held = torch.arange(len(z), device=z.device) % _HELD_OUT == _HELD_OUT - 1
            fit_z, fit_r, z, r = z[~held], r[~held], z[held], r[held]
            found = [fit_z.T @ fit_z, fit_z.T @ fit_r, z.T @ z, z.T @ r, r.square().sum(), y[held].square().sum()]
        self._sums[name] = [a + b for a, b in zip(self._sums[name], found, strict=True)] if name in self._sums else found


@contextmanager
def _give_features(projection: nn.Linear) -> Iterator[Tensor]:
    """Within, the projection hands on what it is given, and the value is its weight."""
    weight, bias = projection.weight, projection.bias
    features = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    projection.weight, projection.bias = nn.Parameter(features, requires_grad=False), None
    try:
        yield weight
    finally:
        projection.weight, projection.bias = weight, bias
