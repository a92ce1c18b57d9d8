"""The backward on Hopper where a state is large, above a dstate of 128: in spans of 128 tokens, so that half as many states are
read and written as in sub-chunks.

    chunk_cumsum and the walks of hopper_states, of spans; hopper_ends for what passes through the states at the ends of spans,
    hopper_pairs for pairs of tokens in one; chunk_cumsum_bwd; and where several blocks share a group sum_parts of dB and dC.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ssd.kernels.arguments import output
from ssd.kernels.chunk_cumsum_bwd import chunk_cumsum_bwd
from ssd.kernels.sum_parts import sum_first
from ssd.runtime.tuning import Device
from ssd.types import SSDGrads, SSDInputs

from .hopper import describe, describe_states, get_width
from .kernels.head_sums import keep_contiguous
from .schedule import choose_splits


def run_spans(i: SSDInputs, descriptors: tuple, dx: Tensor, H: Tensor, G: Tensor, dt: Tensor, dA_cumsum: Tensor,
              arrivals: Tensor, device: Device, into: SSDGrads) -> tuple[Tensor | None, ...]:
    """Fills dx; returns dB, dC, ddt, dA, ddt_bias and dD of inputs whose chunks are spans. H: the states before each span or
    sub-chunk; G: the gradients of those after each span; into: places, of which those are taken that the kernels can write to.
    """
    from .kernels.hopper.ends import hopper_ends
    from .kernels.hopper.pairs import hopper_pairs

    x, dy, B, C = (t.base for t in descriptors)
    tiles, heads = i.batch * dt.shape[2] * i.ngroups, i.nheads // i.ngroups
    ends_splits, pairs_splits = (choose_splits(n * tiles, heads, device.sms, device.name) for n in (2, 1))
    # the first split of the pairs adds to the last of the ends
    parts = torch.empty(2, ends_splits + pairs_splits - 1, *i.B.shape, device=dt.device, dtype=torch.float32)
    dB_parts, dC_parts = parts
    is_one = parts.shape[1] == 1
    dB, dC = (output(t, keep_contiguous(place) if is_one else place) for t, place in ((i.B, into.dB), (i.C, into.dC)))
    places = (dB[None], dC[None]) if is_one else parts[:, ends_splits - 1 :]
    width = get_width(i.dstate)
    v_x, r, s = hopper_ends(i, describe(x), describe(dy), describe(B, width), describe(C, width), describe_states(H),
                            describe_states(G), dt, dA_cumsum, H.shape[1], dx, dB_parts[:ends_splits],
                            dC_parts[:ends_splits], device.sms)
    step, state, inner, skip = hopper_pairs(i, describe(x), describe(dy), describe(B), describe(C), describe(dx), dt,
                                            dA_cumsum, v_x, r[-1], *places, *parts[:, ends_splits - 1], device.sms)
    no_parts = dt.new_empty(0, *dt.shape)  # of col, which is in `inner`
    ddt, dA, ddt_bias, dD = chunk_cumsum_bwd(i, step, r, state, s, inner, no_parts, arrivals, into.ddt, skip)
    if not is_one:
        sum_first(dB_parts, dB)
        sum_first(dC_parts, dC)
    return dB, dC, ddt, dA, ddt_bias, dD
