"""How far a result may be from the truth: as a whole, and in each head and each block of tokens.

As a whole the rule is that of the tests (tests/errors.py):

    error(result) <= 2 error(mirror) + one rounding,   and   RMS <= 1e-2,

relative to the truth, in RMS and maximum. One wrong head of many, or one wrong row, can hide in that, so each is also judged
by itself. A head whose true gradient is small by cancellation has errors of the size of what cancelled, and those of the mirror
are one draw of many. So the norm of a slice's error may be what the mirror's is there, a few roundings of the slice's own norm,
and the mirror's error spread evenly over the tensor, all added up:

    |e_s| <= 3 |m_s| + 4 one |t_s| + share sqrt(n_s / n) (|m| + one |t|),

where e, m and t are the result's error, the mirror's and the truth, n counts elements, and s is of the slice. In a result of
few elements luck can leave the mirror without an error, so two roundings of the operands over sqrt(n) come on top everywhere;
of a result with a row for each token, n counts rows: C B^T of a pair is rounded once for a whole row. So is the exponent of a
decay, for a whole state: one fp32 rounding of the largest over the square root of the number of rows comes on top as well, of
those whose truth is not 0: with a document a token and a gradient of the last state alone, that is one row a head.
In the maximum and in slices, one rounding is at least that of the operands and of the states that are kept: where a document is
a token, a result of any dtype is a product of two of them, and kernels keep states at tokens where the mirror has none.
A gradient that is zero because two terms cancel may be a few fp32 roundings of these (`compute_slacks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .problem import Problem

BLOCK = 32  # tokens judged together
_CAP = 1e-2
_FP32 = torch.finfo(torch.float32).eps
# An fp32 kernel may sum in another order, and has its own softplus, TF32 products, and exponentials, whose error grows with
# what they are of; tests/errors.py, whose inputs are tamer, has 16.
_FP32_ROUNDINGS = 64
_HELD = 0.98  # of the largest number of a dtype
_FEW = 64  # elements, of which one may be far off by luck
_SPREAD = 3  # RMS errors of the mirror that the largest error may have more, since the mirror's is one draw
_NOTHING = 1e-30  # a truth below this is zero to every dtype here
_LUCK = 2  # roundings over sqrt(n)
_CANCELLED, _SMALL = 16, 0.1  # fp32 roundings; an argument's least RMS value that they are relative to
_MIRRORS, _ROUNDINGS = 3, 4
_SHARE, _SHARE_OF_SUMS = 1.5, 6.0  # of the error spread evenly; sums over tokens have few elements, and luck plays a part


@dataclass(frozen=True, order=True)
class Check:
    """One comparison: how much of the bound was taken, 1 being all of it, and what was compared."""

    ratio: float
    what: str

    @property
    def passed(self) -> bool:
        return self.ratio <= 1


@dataclass(frozen=True)
class _Rounding:
    """What one more rounding may add, relative, in RMS and maximum."""

    rms: float
    max: float

    @staticmethod
    def of(eps: float) -> _Rounding:
        return _Rounding(eps / 4, eps / 2)


def compute_slacks(problem: Problem, outputs: dict[str, Tensor], cotangents: dict[str, Tensor]) -> dict[str, float]:
    """By the gradient's name, the norm of an error that rounding terms which cancel may leave in it.

    An output that is linear in an argument w has <dw, w> = <dout, out>, so |dout| |out| / |w| is what such terms add up to.
    """
    scale = sum(float(t.double().norm() * outputs[name].norm()) for name, t in cotangents.items())
    return {f"d{name}": _CANCELLED * _FP32 * scale / max(float(t.detach().double().norm()), _SMALL * t.numel() ** 0.5)
            for name, t in problem.tensors.items() if name in problem.wanted}


def compare(name: str, value: Tensor, truth: Tensor, mirrors: list[Tensor], problem: Problem,
            slack: float = 0.0) -> list[Check]:
    """Every comparison of one result with its truth; one check of infinite ratio where they cannot be compared.

    slack: of `compute_slacks`.
    """
    if value.shape != truth.shape:
        return [Check(float("inf"), f"{name}: shape {tuple(value.shape)}, expected {tuple(truth.shape)}")]
    if value.dtype != mirrors[0].dtype:
        return [Check(float("inf"), f"{name}: {value.dtype}, expected {mirrors[0].dtype}")]
    if not value.numel():
        return []
    truth = truth.double()
    held = truth.abs() < _HELD * torch.finfo(value.dtype).max  # what the dtype cannot hold may be infinite
    bad = held & ~value.isfinite()
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        said = f"{name}: {int(bad.sum())} of {value.numel()} elements are not finite, the first at {first}"
        return [Check(float("inf"), said)]
    off, *allowed = (torch.where(held, t.double() - truth, 0.0) for t in (value, *mirrors))
    truth = torch.where(held, truth, 0.0)
    one, count, axes = _find_rounding(name, value, problem), value.numel(), problem.axes[name]
    rows = prod(size for size, axis in zip(value.shape, axes, strict=True) if axis in "blh")
    lucky = _LUCK * problem.coarsest * (rows if {"l", "h"} <= set(axes) else count) ** -0.5
    lucky += problem.exponent * _FP32 * _count_rows(truth, axes) ** -0.5
    operand = _Rounding.of(problem.coarsest)
    rms, of_slices = (v + problem.exponent * _FP32 / 4 for v in (one.rms, max(one.rms, operand.rms)))
    e, t = (_sum_by_slice(v.square(), axes) for v in (off, truth))
    m = [_sum_by_slice(v.square(), axes) for v in allowed]
    m = {kind: torch.stack([each[kind] for each in m]).amax(0) for kind in e}
    e_all, m_all, t_all = (float(v["whole"].sqrt()) for v in (e, m, t))
    largest = float(off.abs().amax()), max(float(v.abs().amax()) for v in allowed), float(truth.abs().amax())
    cap = _CAP if count >= _FEW else None
    highest = max(one.max, operand.max) + problem.exponent * _FP32 / 2
    checks = [_check_whole(name, "rms", e_all, m_all, t_all, rms + lucky, cap, slack),
              _check_whole(name, "max", *largest, highest + lucky, spread=slack + _SPREAD * m_all * count**-0.5)]
    share = _SHARE_OF_SUMS if name in problem.summed else _SHARE
    for kind in e.keys() - {"whole"}:
        bound = slack + _MIRRORS * m[kind].sqrt() + _ROUNDINGS * of_slices * t[kind].sqrt()
        bound = bound + share * e[kind].numel() ** -0.5 * (m_all + (rms + lucky) * max(t_all, _NOTHING))
        ratios = e[kind].sqrt() / bound.clamp(min=_NOTHING)
        where = tuple(int(n) for n in torch.unravel_index(ratios.argmax(), ratios.shape))
        got, most, other, whole = (float(v[where]) for v in (e[kind].sqrt(), bound, m[kind].sqrt(), t[kind].sqrt()))
        checks.append(Check(float(ratios[where]), f"{name}, {kind} {where}: error {got:.3g}, bound {most:.3g}, "
                            f"mirror {other:.3g}, truth {whole:.3g}"))
    return checks


def _check_whole(name: str, kind: str, off: float, allowed: float, truth: float, rounding: float, cap: float | None = None,
           spread: float = 0.0) -> Check:
    truth = max(truth, _NOTHING)
    got, bound = off / truth, (2 * allowed + spread) / truth + rounding
    if cap is not None and (allowed + spread) / truth <= cap / 4:  # where the mirror itself is near it, the dtype is at its end
        bound = min(bound, cap)
    return Check(got / bound, f"{name}: {kind} error {got:.3g}, bound {bound:.3g}, mirror {allowed / truth:.3g}")


def _find_rounding(name: str, value: Tensor, problem: Problem) -> _Rounding:
    """Of the result's dtype, though of nothing finer than fp32, which the kernels compute in; of a sum, at least one rounding
    of what every summand is made of.
    """
    eps = max(torch.finfo(value.dtype).eps, _FP32)
    if name in problem.summed:
        eps = max(eps, 2 * problem.eps)
    if eps <= 2 * _FP32:
        eps *= _FP32_ROUNDINGS * (problem.tokens**0.5 if name in problem.summed else 1)
    return _Rounding.of(eps)


def _count_rows(truth: Tensor, axes: str) -> int:
    """Tokens of heads, or heads where there is no axis of tokens, whose truth is not 0; at least 1."""
    return max(int(_sum_within_rows(truth != 0, axes).count_nonzero()), 1)


def _sum_within_rows(t: Tensor, axes: str) -> Tensor:
    """Over all axes but batch, tokens and heads."""
    for axis in reversed([n for n, letter in enumerate(axes) if letter not in "blh"]):
        t = t.sum(axis)
    return t


def _sum_by_slice(squares: Tensor, axes: str) -> dict[str, Tensor]:
    """Sums of squares: of the whole, by batch and head, and by batch and block of tokens. axes: as `Problem.axes`."""
    squares = _sum_within_rows(squares, axes)
    kept = "".join(letter for letter in axes if letter in "blh")
    found = {"whole": squares.sum()}
    if "h" in kept:
        over = [n for n, letter in enumerate(kept) if letter == "l"]
        found["head"] = squares.sum(over) if over else squares
    if "l" in kept:
        rows = squares.sum(kept.index("h")) if "h" in kept else squares
        axis = kept.replace("h", "").index("l")
        missing = -rows.shape[axis] % BLOCK
        rows = torch.nn.functional.pad(rows.movedim(axis, -1), (0, missing))
        found["rows"] = rows.unflatten(-1, (-1, BLOCK)).sum(-1)
    return found
