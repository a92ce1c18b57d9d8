"""What the roles of the Gluon kernels for Hopper share: small device functions.

A warpgroup holds a slice of a state: 64 channels of one head (wgmma's least number of rows) and a part of dstate, mostly all of
it. A block walks pairs of slices: of two neighbouring heads of one group where headdim is at most 64, else of one head. Tiles
are 64 channels and 64 or 128 states wide; the TMA fills what lies outside a head with zeros, and leaves it out where it writes.
Where a group has an odd number of heads, both warpgroups of a block walk its last one and write the same bits to the same
place. A dstate above 128 is walked in two parts of 128 (the last may be less), as all but the gate is a sum over states: (26)
to (32) hold for each part by itself.

A block walks runs: parts of the sequences of pairs, in sub-chunks of 64 tokens. Which runs a block walks stands in a table
(blocks, nruns, 6) int32, padded with empty runs; `Run` names its columns.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssd import types
from ssd.runtime.gluon_names import async_load, async_store, reinterpret

from ... import schedule

LOG2E = gl.constexpr(1.4426950408889634)
LEAST_Z = gl.constexpr(types.LEAST_Z)
RUN_FIELDS = gl.constexpr(schedule.RUN_FIELDS)


class Form(NamedTuple):
    """What a kernel is compiled for."""

    HEADDIM: int
    DSTATE: int
    SLICES: int  # of a head: 1 or 2
    ODD: bool  # whether the number of heads of a group is
    D_ROWS: bool  # whether D has two dimensions
    PARTS: int  # of dstate, each as wide as a tile


@gluon.constexpr_function
def make_form(headdim, dstate, rows, width, odd=False, D_rows=False):
    return Form(headdim, dstate, (headdim + rows - 1) // rows, odd, D_rows, (dstate + width - 1) // width)


class Run(NamedTuple):
    """Sub-chunks first to last (exclusive) of a pair of slices of row b.

    piece, npieces: the pieces of the sequence before the run whose end states enter it, npieces of them from number `piece` on;
    of a run that computes a piece, `piece` is its number.
    """

    b: gl.tensor
    pair: gl.tensor
    first: gl.tensor
    last: gl.tensor
    piece: gl.tensor
    npieces: gl.tensor


@gluon.jit
def load_run(runs, k):
    """Run k of the table."""
    run = runs + k * RUN_FIELDS
    return Run(gl.load(run), gl.load(run + 1), gl.load(run + 2), gl.load(run + 3), gl.load(run + 4), gl.load(run + 5))


@gluon.jit
def decay(exponent):
    """2^exponent of an exponent that only rounding makes positive: clamped at 0, in one instruction. NaN stays NaN."""
    return gl.exp2(gl.inline_asm_elementwise("min.NaN.f32 $0, $1, $2;", "=r,r,r", [exponent, 0.0], gl.float32, True, 1))


@gluon.jit
def make_gate(z):
    """silu(z), with LEAST_Z for the size of z where that is less (`SSDSaved.out`): two elements of bf16 at a time."""
    if z.dtype == gl.bfloat16:
        gl.static_assert(LEAST_Z == 2.0**-64, "0x1F80 in bf16")
        z = gl.inline_asm_elementwise("""{
            .reg .b32 least;
            mov.b32 least, 0x1F801F80;
            max.NaN.xorsign.abs.bf16x2 $0, $1, least;
            }""", "=r,r", [z], gl.bfloat16, True, 2).to(gl.float32)
    else:
        z = gl.inline_asm_elementwise("max.NaN.xorsign.abs.f32 $0, $1, $2;", "=r,r,r", [z.to(gl.float32), LEAST_Z], gl.float32,
                                      True, 1)
    root = gl.rsqrt(1.0 + gl.exp2(-LOG2E * z))  # a division would scale its operands first
    return z * (root * root)


@gluon.jit
def log2(v):
    """One instruction, where gl.log2 takes 25; relative error 2^-22, so that of a step of 1e-4 is 2e-6."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [v], gl.float32, True, 1)


@gluon.jit
def prefetch(at, nbytes):
    """Begins to bring memory into L2, once for a warp; does nothing unless `at` is on 16 bytes. nbytes: a multiple of 16."""
    gl.inline_asm_elementwise("""{
        .reg .pred is_one, is_aligned;
        .reg .b64 rest;
        and.b64 rest, $1, 15;
        elect.sync _|is_one, 0xffffffff;
        setp.eq.and.s64 is_aligned, rest, 0, is_one;
        @is_aligned cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""", "=r,l,r", [at, nbytes], gl.int32, False, 1)


@gluon.jit
def load_steps(dA_cumsum, dt, at, m, BLOCK_M: gl.constexpr):
    """Of the sub-chunk of one head at offset `at`: dA_cumsum [M], dt [M], and the last dA_cumsum."""
    return gl.load(dA_cumsum + at + m), gl.load(dt + at + m), gl.load(dA_cumsum + at + BLOCK_M - 1)


@gluon.jit
def get_head(pair, U: gl.constexpr, heads_per_group, form: gl.constexpr):
    """The head of slice U of a pair. Pairs of a group are neighbours; a lone last head is both heads of its pair."""
    if form.SLICES == 2:
        head = pair
    elif form.ODD:
        pairs = (heads_per_group + 1) // 2
        head = pair // pairs * heads_per_group + gl.minimum(pair % pairs * 2 + U, heads_per_group - 1)
    else:
        head = pair * 2 + U
    return head


@gluon.jit
def split_pair(pair, form: gl.constexpr):
    """The pair of slices, and the part of dstate, of a walk of states: both parts of a pair are neighbours."""
    part = 0
    if form.PARTS > 1:
        part = pair % form.PARTS
        pair = pair // form.PARTS
    return pair, part


@gluon.constexpr_function
def tile_bytes(desc):
    """What an mbarrier is to expect of a tile of the descriptor, whatever its dtype; 0 of None."""
    if desc is None:
        return 0
    elements = desc.dtype.primitive_bitwidth // 8
    for size in desc.block_shape:
        elements *= int(size)
    return elements


@gluon.jit
def fetch_slice(desc, b, token, k, SLICES: gl.constexpr, bar, buffer):
    """Into buffer [64, width]: the tokens from `token` on of slice k of all heads. Rows past seqlen and channels past a head's
    are 0.

    desc: of (batch, seqlen, heads * channels) where slices fill the heads, else of (batch, seqlen, heads, channels).
    """
    if len(desc.block_shape) == 3:
        async_load(desc, [b, token, k * desc.block_shape[2]], bar, buffer)
    else:
        async_load(desc, [b, token, k // SLICES, k % SLICES * desc.block_shape[3]], bar, buffer)


@gluon.jit
def write_slice(desc, b, token, k, SLICES: gl.constexpr, buffer):
    """From buffer, as `fetch_slice`. What is outside is not written."""
    if len(desc.block_shape) == 3:
        async_store(desc, [b, token, k * desc.block_shape[2]], buffer)
    else:
        async_store(desc, [b, token, k // SLICES, k % SLICES * desc.block_shape[3]], buffer)


@gluon.jit
def allocate_tiles(desc, N: gl.constexpr):
    """Shared memory for N tiles of a descriptor, [N, 1, 64, width] or [N, 1, 64, 1, width]; None if that is None."""
    if desc is None:
        tiles = None
    elif len(desc.block_shape) == 3:
        tiles = gl.allocate_shared_memory(
            desc.dtype, [N, desc.block_shape[0], desc.block_shape[1], desc.block_shape[2]], desc.layout)
    else:
        tiles = gl.allocate_shared_memory(
            desc.dtype, [N, desc.block_shape[0], desc.block_shape[1], desc.block_shape[2], desc.block_shape[3]], desc.layout)
    return tiles


@gluon.jit
def locate_state(states, at, LAYOUT: gl.constexpr, SLICE: gl.constexpr, part, form: gl.constexpr, ROWS: gl.constexpr,
                 WIDTH: gl.constexpr):
    """Where a slice's elements of a part of state number `at` are, pointers [ROWS, WIDTH].

    Added up in this order, an address takes one register and a constant; as one offset, a register for each column.
    """
    p, n = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    first = states + at.to(gl.int64) * (form.HEADDIM * form.DSTATE) + (SLICE * ROWS * form.DSTATE + part * WIDTH)
    return (first + gl.expand_dims(p, 1) * form.DSTATE) + gl.expand_dims(n, 0)


@gluon.jit
def state_mask(LAYOUT: gl.constexpr, SLICE: gl.constexpr, part, form: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Which of a slice's elements [ROWS, WIDTH] of a part are in the state; None if all are."""
    if form.HEADDIM % ROWS == 0 and form.DSTATE % WIDTH == 0:
        mask = None
    else:
        p = SLICE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        n = part * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        mask = gl.expand_dims(p < form.HEADDIM, 1) & gl.expand_dims(n < form.DSTATE, 0)
    return mask


@gluon.jit
def load_masked(at, mask):
    """What is there, 0 outside of the mask, which may be None."""
    return gl.load(at) if mask is None else gl.load(at, mask=mask, other=0.0)


@gluon.jit
def store_masked(at, values, mask):
    """`values` there but for what is outside of the mask, which may be None."""
    if mask is None:
        gl.store(at, values)
    else:
        gl.store(at, values, mask=mask)


@gluon.jit
def get_tile(tiles, slot, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Tile `slot` of those of `allocate_tiles`, which the TMA fills or reads, as [ROWS, WIDTH]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], tiles.dtype)
    return reinterpret(tiles.index(slot), [ROWS, WIDTH], LAYOUT)
