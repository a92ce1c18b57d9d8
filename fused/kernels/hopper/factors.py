"""Decays of pairs of tokens as products of two factors, in Gluon, for Hopper.

exp(A_i - A_j) = row_i column_j with row_i = exp(A_i - A_last / 2) and column_j = exp(A_last / 2 - A_j): two multiplications a
pair, where an exponential of a difference is an addition, a bound and a slow instruction. The last of row is exp(A_last / 2),
the root of the sub-chunk's decay, which also makes row_i exp(A_i), and column_j exp(A_last - A_j).

Factors lie between 2^-MOST and 2^MOST, so that all pairs are finite, those above the diagonal too. In a sub-chunk that decays
by more than 2^(-2 MOST), or that begins with empty places (chunk_cumsum), both are A_i instead, for powers of 2 of differences,
and the last of row is below 0.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ssd.runtime.gluon_names import block_barrier

from .group_tiles import find_tile
from .ring import mark_full, slot_of, wait_empty
from .roles import LOG2E, decay

MOST = gl.constexpr(40.0)


class Factors(NamedTuple):
    """Shared memory [LINES, 64] fp32 by slot of `vectors`: the factors, and dt."""

    rows: gl.shared_memory_descriptor
    columns: gl.shared_memory_descriptor
    dt: gl.shared_memory_descriptor


@gluon.jit
def fetch_factors(ring, factors, dA_cumsum, dt, sizes, SLICES: gl.constexpr, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr):
    """As `group_tiles.fetch_vectors`, of factors."""
    m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [BLOCK_M // 32], [0]))
    step = 0
    for t in range(gl.program_id(0), sizes.ntiles, gl.num_programs(0)):
        tile = find_tile(t, sizes, SPLITS)
        at = tile.row * BLOCK_M
        a, dt_k = gl.load(dA_cumsum + at + m), gl.load(dt + at + m)
        first, last = gl.load(dA_cumsum + at), gl.load(dA_cumsum + at + BLOCK_M - 1)
        for k in range(tile.count * SLICES):
            line = slot_of(ring, step)
            wait_empty(ring, step)
            exponent, half = a * LOG2E, last * (0.5 * LOG2E)
            row, column = exponent, exponent
            if gl.minimum(first, last) * LOG2E > -2 * MOST:
                row, column = gl.exp2(exponent - half), gl.exp2(half - exponent)
            factors.rows.index(line).store(row)
            factors.columns.index(line).store(column)
            factors.dt.index(line).store(dt_k)
            block_barrier()
            mark_full(ring, line)
            at = (tile.row + gl.minimum(k + 1, tile.count * SLICES - 1) // SLICES * sizes.nsub) * BLOCK_M
            a, dt_k = gl.load(dA_cumsum + at + m), gl.load(dt + at + m)
            first, last = gl.load(dA_cumsum + at), gl.load(dA_cumsum + at + BLOCK_M - 1)
            step += 1


@gluon.jit
def load_root(factors, line, LAYOUT: gl.constexpr):
    """The last of rows, a number."""
    M: gl.constexpr = factors.rows.shape[1]
    return gl.max(factors.rows.index(line).slice(M - 1, 1).load(LAYOUT), 0)


@gluon.jit
def decay_pairs(t, row, column, root):
    """t times exp(A_i - A_j), for i >= j."""
    return (t * row) * column if root > 0 else t * decay(row - column)


@gluon.jit
def decay_tokens(row, root):
    """exp(A_i)."""
    return gl.where(root > 0, row * root, decay(row))


@gluon.jit
def decay_to_end(column, root):
    """exp(A_last - A_j)."""
    return gl.where(root > 0, column * root, decay(root - column))
