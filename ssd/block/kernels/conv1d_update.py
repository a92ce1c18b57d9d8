"""conv1d_update, docs/block.md, equations (C9) to (C11): the next tokens of a sequence, and its state moved on in place.

Reads x (batch, dim, seqlen), weight (dim, width), any strides; bias (dim,), cache_seqlens and conv_state_indices (batch,),
contiguous. Reads and writes conv_state (slots, dim, state_len), writes out (batch, dim, seqlen), any strides.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import cdiv
from ...runtime.dependent_launch import begin_early, let_next_begin, wait_for_last
from ...runtime.launch import launch
from .conv1d import BLOCK, convolve, load_filter, sigmoid


@triton.jit
def conv1d_update_kernel(x, x_strides, conv_state, state_strides, weight, weight_strides, bias, cache_seqlens,
                         conv_state_indices, out, out_strides, seqlen, state_len, nslots, DIM: tl.constexpr,
                         WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_begin(EARLY)
    wait_for_last(EARLY)
    NTILES: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    b = tl.cast(tl.program_id(0) // NTILES, tl.int64)
    channels = tl.program_id(0) % NTILES * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    slot = b
    if conv_state_indices is not None:
        slot = tl.load(conv_state_indices + b).to(tl.int64)
    in_dim = channels < DIM
    live = in_dim & (slot >= 0) & (slot < nslots)
    x += b * x_strides[0] + channels * x_strides[1]
    out += b * out_strides[0] + channels * out_strides[1]
    conv_state += slot * state_strides[0] + channels * state_strides[1]
    weights, offset = load_filter(weight, weight_strides, bias, channels, in_dim, WIDTH)
    start = tl.zeros([], tl.int64)  # where the oldest entry is
    if cache_seqlens is not None:
        start += (tl.load(cache_seqlens + b) % state_len + state_len) % state_len  # within the ring, also for one below 0

    past = ()
    for i in tl.static_range(WIDTH - 1):
        at = (start + state_len - (WIDTH - 1) + i) % state_len
        past += (tl.load(conv_state + at * state_strides[2], mask=live, other=0.0).to(tl.float32),)
    tl.debug_barrier()  # what was read may now be overwritten, by whichever thread
    if cache_seqlens is None:
        for i in tl.range(0, state_len - seqlen):
            to = tl.cast(i, tl.int64)
            entry = tl.load(conv_state + (to + seqlen) * state_strides[2], mask=live, other=0.0)
            tl.debug_barrier()
            tl.store(conv_state + to * state_strides[2], entry, mask=live)
    for t in tl.range(0, seqlen):
        token = tl.cast(t, tl.int64)
        row = tl.load(x + token * x_strides[2], mask=live, other=0.0)
        at = (start + token) % state_len if cache_seqlens is not None else state_len - seqlen + token
        # only the last state_len tokens, each at a place of its own
        tl.store(conv_state + at * state_strides[2], row.to(conv_state.dtype.element_ty),
                 mask=live & (token >= seqlen - state_len))
        past += (row.to(tl.float32),)
        y = convolve(past, weights, offset, WIDTH)
        if SILU:
            y *= sigmoid(y)
        tl.store(out + token * out_strides[2], tl.where(live, y, 0.0).to(out.dtype.element_ty), mask=in_dim)
        past = past[1:]


def conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cache_seqlens: Tensor | None,
                  conv_state_indices: Tensor | None, out: Tensor) -> None:
    """Writes out and conv_state."""
    (batch, dim, seqlen), width, (nslots, _, state_len) = x.shape, weight.shape[1], conv_state.shape
    launch(
        conv1d_update_kernel, batch * cdiv(dim, BLOCK),
        x, x.stride(), conv_state, conv_state.stride(), weight, weight.stride(), bias, cache_seqlens, conv_state_indices,
        out, out.stride(), seqlen, state_len, nslots, dim, width, silu, BLOCK=BLOCK, num_warps=1,
        **begin_early(x.device.index))
