"""Decays of a state that are put off, in Gluon, for Hopper.

To multiply a state by each step's decay takes a thread as many instructions as it holds elements. So it holds R with
S = 2^lag R: a step adds its decay to lag, its tokens enter R with weights that are larger by 2^-lag, and what is read of R is
scaled where it is scaled by exp(A_i) anyway. R is scaled before lag would fall below -MOST. A state of which one step leaves
less than 2^-MOST, which is 2^-40 of what fp32 rounds by, is left out of the next one.

The role that makes weights and the slices each reckon lag, by the same operations and so to the bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MOST = gl.constexpr(64.0)  # so that R overflows only where S would above 2^64


@gluon.constexpr_function
def puts_off(dtype, states):
    """Whether a scan's decays are put off: not in fp16, which has too few exponents, nor where states are written."""
    return dtype == gl.bfloat16 and states is None


@gluon.jit
def add_decay(lag, end):
    """lag and a step's decay 2^end together, or 0 where it leaves nothing; and whether it leaves something."""
    is_left = end > -MOST
    return gl.where(is_left, lag + end, 0.0), is_left


@gluon.jit
def get_next_lag(lag, end):
    """lag after a step whose decay is 2^end."""
    lag, _ = add_decay(lag, end)
    return gl.where(lag < -MOST, 0.0, lag)


@gluon.jit
def decay_state(state, lag, end, LAZY: gl.constexpr):
    """The state before it gets what a step adds, with lag; and whether anything of it is left, or it is to be overwritten."""
    if LAZY:
        lag, is_left = add_decay(lag, end)
        if lag < -MOST:
            state = state * gl.exp2(lag)
            lag = 0.0
    else:
        state = state * gl.exp2(end)
        is_left = True
    return state, lag, is_left


@gluon.jit
def settle_decay(state, lag, LAZY: gl.constexpr):
    """S of R."""
    return state * gl.exp2(lag) if LAZY else state
