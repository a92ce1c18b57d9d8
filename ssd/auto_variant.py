"""What "auto" runs: of the variants that take the inputs, the one that is expected to be the fastest (`variant_times`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .runtime import tuning
from .types import Options, SSDInputs
from .variant_times import FALLBACK, Call, Estimate, get_fallback, get_table

if TYPE_CHECKING:
    from .registry import Variant

_MOST = 1024  # forms of call; callers whose sizes never repeat must not fill the memory
_ranked: dict[tuple, tuple[tuple[str, ...], str]] = {}


def rank_variants(inputs: SSDInputs, options: Options, mode: str, keeps: bool, names: tuple[str, ...],
                  get_variant: Callable[[str], Variant]) -> tuple[tuple[str, ...], str]:
    """The variants to try for "auto", best first, and why in this order.

    mode: "fwd" or "bwd". keeps: whether states are kept between the two. names: those that may be chosen on a GPU; of two that
    are expected to be equal, the first goes first.
    """
    i = inputs
    if i.x.device.type == "cpu":
        return ("torch",), "tensors are on the CPU"
    form = (mode, keeps, options, names, i.x.device.index, i.x.shape, i.B.shape, i.chunk_size, i.x.dtype, i.B.dtype, i.C.dtype,
            i.state_dtype, i.z is None, i.has_D_of_channels, i.cu_seqlens is None,
            i.has_document_states)
    ranked = _ranked.get(form)
    if ranked is None:
        if len(_ranked) >= _MOST:
            _ranked.clear()
        kernels = {name: get_variant(name).kernels(i, options, mode, keeps) for name in names}
        ranked = _ranked[form] = rank_kernels(Call.of(i, mode, keeps), kernels, tuning.device_of(i).name)
    return ranked


def rank_kernels(call: Call, kernels: dict[str, str], gpu: str) -> tuple[tuple[str, ...], str]:
    """Rank the variants; those whose kernels' times are unknown come last."""
    table = get_table(gpu)
    known = table or get_fallback()
    expected = {name: known.estimate(call, of) for name, of in kernels.items()}
    order = sorted(kernels, key=lambda name: math.inf if expected[name] is None else expected[name].us)
    first = expected[order[0]]
    if first is None:
        return tuple(order), f"nothing is known of {kernels[order[0]]!r} on {gpu}"
    why = f"expected to take {first.us:.0f} us, {_explain(first, gpu, table is None)}"
    others = ", ".join(f"{name} {of.us:.0f} us" for name in order[1:] if (of := expected[name]) is not None)
    return tuple(order), f"{why}; {others}" if others else why


def _explain(estimate: Estimate, gpu: str, without_table: bool) -> str:
    if without_table:
        return f"by the cost model of {FALLBACK}, since {gpu} has no table"
    if estimate.near is None:
        return f"by the cost model, since no such call was measured on {gpu}"
    if not estimate.distance:
        return f"as measured on {gpu}"
    return f"by the cost model and {gpu}'s nearest measured call, {estimate.near}"
