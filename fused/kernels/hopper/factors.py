"""Decays of pairs of tokens as products of two factors, in Gluon, for Hopper.

exp(A_i - A_j) = of_i of_j with of_i = exp(A_i - A_last / 2) and of_j = exp(A_last / 2 - A_j): two multiplications a pair, where
an exponential of a difference is an addition, a bound and a slow instruction. The last of of_i is exp(A_last / 2), the root of
the sub-chunk's decay, which also makes of_i exp(A_i), and of_j exp(A_last - A_j).

Factors lie between 2^-MOST and 2^MOST, so that all pairs are finite, those above the diagonal too. In a sub-chunk that decays
by more than 2^(-2 MOST), or that begins with empty places (chunk_cumsum), both are A_i instead, for powers of 2 of differences,
and the last of of_i is below 0.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .roles import LOG2E, decay

MOST = gl.constexpr(40.0)


class Factors(NamedTuple):
    """Shared memory [LINES, 64] fp32 by slot of `vectors`: the factors, and dt."""

    of_i: gl.shared_memory_descriptor
    of_j: gl.shared_memory_descriptor
    dt: gl.shared_memory_descriptor


@gluon.jit
def store_factors(factors, line, A, first, last):
    """first, last: of A."""
    of_i, of_j = A * LOG2E, A * LOG2E
    if gl.minimum(first, last) * LOG2E > -2 * MOST:
        of_i, of_j = gl.exp2((A - last * 0.5) * LOG2E), gl.exp2((last * 0.5 - A) * LOG2E)
    factors.of_i.index(line).store(of_i)
    factors.of_j.index(line).store(of_j)


@gluon.jit
def load_root(factors, line, LAYOUT: gl.constexpr):
    """The last of of_i, a number."""
    M: gl.constexpr = factors.of_i.shape[1]
    return gl.max(factors.of_i.index(line).slice(M - 1, 1).load(LAYOUT), 0)


@gluon.jit
def decay_pairs(t, of_i, of_j, root):
    """t times exp(A_i - A_j), for i >= j."""
    return (t * of_i) * of_j if root > 0 else t * decay(of_i - of_j)


@gluon.jit
def decay_tokens(of_i, root):
    """exp(A_i)."""
    return gl.where(root > 0, of_i * root, decay(of_i))


@gluon.jit
def decay_to_end(of_j, root):
    """exp(A_last - A_j)."""
    return gl.where(root > 0, of_j * root, decay(root - of_j))
