"""bmm_chunk_scan, equations (9), (26), (27) and (5): bmm_chunk and chunk_scan in one, the paper's fusion.

A program takes a segment of one chunk from the state before it, block by block: C B^T never reaches memory, and pairs of tokens
cost as in chunks of BLOCK_M tokens. `segment` has the formulas.

Reads x, z (batch, seqlen, nheads, headdim), B, C (batch, seqlen, ngroups, dstate), any strides; CB (batch, blocks, ngroups,
BLOCK_M, BLOCK_M), or None to compute it in the tile; D (nheads,) or (nheads, headdim); dt, dA_cumsum (batch, nheads, blocks,
BLOCK_M) fp32; prev_states, H, (batch, nchunks, nheads, headdim, dstate). Writes out (batch, seqlen, nheads, headdim) in the
dtype of x and, where a backward will need it, y, the output before the gate.
"""

import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.arguments import COUNTS, Strides, allocate_outputs, cdiv, strides
from ssd.kernels.device import load_state_t, state_offset, unpack
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace
from ssd.types import Options, SSDInputs

from .segment import Tokens, get_form, scan_segment

CONFIGS = ConfigSpace(
    "bmm_chunk_scan",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 64, 256, 4, 2), (64, 64, 256, 4, 3), (64, 64, 256, 8, 2), (64, 32, 256, 4, 2)),
    staged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_P")),
    unstaged=(("BLOCK_N", "BLOCK_P"), ("BLOCK_M", "BLOCK_M"), ("BLOCK_M", "BLOCK_P")),
    whole_dstate=True, state_in_registers=True,
)


@triton.jit
def scan_chunk(number, tokens, prev_states, out, y, strides, seqlen, nchunks, FORM: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes out, and y unless it is None, of one chunk and one tile of headdim, those of that number."""
    tile, h, c, b = unpack(number, (FORM.headdim + BLOCK_P - 1) // BLOCK_P, FORM.nheads, nchunks)
    offs_n, offs_p = tl.arange(0, BLOCK_N), tile * BLOCK_P + tl.arange(0, BLOCK_P)
    state = load_state_t(prev_states + state_offset(b, c, h, nchunks, FORM), offs_p, offs_n, FORM).to(tl.float32)
    first = c.to(tl.int32) * FORM.chunk
    scan_segment(state, first, tl.minimum(first + FORM.chunk, seqlen), b, h, offs_n, offs_p, tokens, None, out, y, strides,
                 seqlen, nchunks, FORM, BLOCK_M)


@triton.jit(do_not_specialize=COUNTS)
def bmm_chunk_scan_kernel(x, z, B, C, CB, D, dt, dA_cumsum, seq_idx, prev_states, out, y, strides, seqlen, nchunks, ntiles,
                          FORM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    tokens = Tokens(x, z, B, C, D, CB, dt, dA_cumsum, seq_idx)
    if ntiles is None:
        scan_chunk(tl.program_id(0), tokens, prev_states, out, y, strides, seqlen, nchunks, FORM, BLOCK_M, BLOCK_P, BLOCK_N)
    else:
        for number in range(tl.program_id(0), ntiles, tl.num_programs(0)):
            scan_chunk(number, tokens, prev_states, out, y, strides, seqlen, nchunks, FORM, BLOCK_M, BLOCK_P, BLOCK_N)


def bmm_chunk_scan(i: SSDInputs, CB: Tensor | None, dt: Tensor, dA_cumsum: Tensor, prev_states: Tensor, options: Options,
                   save: bool, programs: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Returns out and, with z and where a backward may follow (`save`), y.

    dA_cumsum restarts every BLOCK_M tokens of this kernel's config. programs: at most so many programs take the chunks in turn;
    None: one each. Chunks are numbered so that programs side by side take the heads of one group, then of the next, then the
    next chunk: B and C are read from memory once.
    """
    out, y = allocate_outputs(i, save)
    config = CONFIGS.pick(i)
    ntiles = cdiv(i.headdim, config["BLOCK_P"]) * i.nheads * i.nchunks * i.batch
    launch(
        bmm_chunk_scan_kernel, min(ntiles, programs or ntiles),
        i.x, i.z, i.B, i.C, CB, i.D, dt, dA_cumsum, i.seq_idx, prev_states, out, y,
        Strides(x=i.x.stride(), z=strides(i.z), B=i.B.stride(), C=i.C.stride(), D=strides(i.D)), i.seqlen, i.nchunks,
        programs and ntiles, get_form(i, options), **config.launch)
    return out, y
