"""document_passing, equations (8) and (14) along each document: states pass from row to row of it, and gradients back.

    H_{r+1} = exp(A_last) H_r + S_r,    G_r = exp(A_last) G_{r+1} + dH_r,    dS_r = G_{r+1}

A document has the rows first_rows[d] to first_rows[d + 1] - 1; those behind the last document belong to none, and have zeros.
Reads first_rows (ndocs + 2,) int32; states, S, or dprev_states, dH, (nrows, 1, nheads, headdim, dstate) fp32; dA_cumsum (nrows,
nheads, 1, row) fp32; and the states that documents start from, or the gradients of those that they end with, (ndocs, nheads,
headdim, dstate), any dtype and strides. Writes prev_states, H, in the dtype asked for, or dstates, dS, in the dtype of x,
(nrows, nheads, headdim, dstate); and the states that documents end with, or the gradients of those that they start from,
(ndocs, nheads, headdim, dstate) fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv, get_sizes, strides
from ...kernels.device import decay, unpack_program
from ...runtime.launch import launch
from ...types import SSDInputs
from .state_passing import offsets_any_strides

_BLOCK = 1024  # elements of a state that a program takes


@triton.jit(do_not_specialize=COUNTS)
def document_passing_kernel(entering, added, dA_cumsum, first_rows, kept, leaving, entering_strides, ndocs, BACK: tl.constexpr,
                            SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """BACK: from the last row of a document to its first."""
    SIZE: tl.constexpr = SIZES.headdim * SIZES.dstate
    tile, h, d, _ = unpack_program((SIZE + BLOCK - 1) // BLOCK, SIZES.nheads, ndocs + 1)
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    of_document = inside & (d < ndocs)
    carried = tl.zeros([BLOCK], tl.float32)
    if entering is not None:
        at_any = offsets_any_strides(entering_strides, d, h, offs, SIZES.dstate)
        carried = tl.load(entering + at_any, mask=of_document, other=0.0).to(tl.float32)
    first, end = tl.load(first_rows + d), tl.load(first_rows + d + 1)
    for n in range(0, end - first):
        row = (end - 1 - n if BACK else first + n).to(tl.int64) * SIZES.nheads + h
        at = row * SIZE + offs
        tl.store(kept + at, carried.to(kept.dtype.element_ty), mask=inside)
        factor = decay(tl.load(dA_cumsum + row * SIZES.chunk + SIZES.chunk - 1))
        carried = factor * carried + tl.load(added + at, mask=inside, other=0.0)
    tl.store(leaving + (d * SIZES.nheads + h) * SIZE + offs, carried, mask=of_document)


def pass_states(i: SSDInputs, initial_states: Tensor | None, states: Tensor, dA_cumsum: Tensor,
                first_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns prev_states, in i.states_dtype, and final_states. i: the rows, each a chunk."""
    return _pass(i, initial_states, states, dA_cumsum, first_rows, i.states_dtype, False)


def pass_states_bwd(i: SSDInputs, dfinal_states: Tensor | None, dprev_states: Tensor, dA_cumsum: Tensor,
                    first_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns dstates and dinitial_states."""
    return _pass(i, dfinal_states, dprev_states, dA_cumsum, first_rows, i.x.dtype, True)


def _pass(i: SSDInputs, entering: Tensor | None, added: Tensor, dA_cumsum: Tensor, first_rows: Tensor, dtype: torch.dtype,
          back: bool) -> tuple[Tensor, Tensor]:
    ndocs, size = first_rows.shape[0] - 2, i.headdim * i.dstate
    kept = torch.empty_like(added[:, 0], dtype=dtype)
    leaving = added.new_empty(ndocs, *kept.shape[1:])
    launch(document_passing_kernel, cdiv(size, _BLOCK) * i.nheads * (ndocs + 1), entering, added, dA_cumsum, first_rows, kept,
           leaving, strides(entering), ndocs, back, get_sizes(i), _BLOCK, num_warps=4)
    return kept, leaving
