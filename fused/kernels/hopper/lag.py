"""Decays of a state that are put off, in Gluon, for Hopper.

To multiply a state by each step's decay takes a thread as many instructions as it holds elements. So it holds R with
S = exp(lag) R: a step adds A_last, the log of its decay, to lag; its tokens enter R with weights that are larger by exp(-lag);
and what is read of R is scaled where it is scaled by exp(A_i) anyway. R is scaled before lag would fall below -MOST. A state of
which one step leaves less than exp(-MOST), 1e-19, where fp32 rounds by 6e-8, is left out of the next one.

The role that makes weights and the slices each reckon lag. If one scaled where the other did not, results would be off by
exp(MOST); so lag is a sum of numbers that both load, and of nothing that a compiler could round in two ways.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .roles import LOG2E

MOST = gl.constexpr(44.0)  # exp(44) = 1e19: R S's size times that, and what is summed up of it, are far from fp32's end, 3e38


@gluon.constexpr_function
def puts_off(dtype, states):
    """Whether a scan's decays are put off: not in fp16, which has too few exponents, nor where states are written."""
    return dtype == gl.bfloat16 and states is None


@gluon.jit
def add_decay(lag, A_last):
    """lag after a step if R is not scaled, 0 where the step leaves nothing of it; and whether it leaves something."""
    is_left = A_last > -MOST
    return gl.where(is_left, lag + A_last, 0.0), is_left


@gluon.jit
def get_next_lag(lag, A_last):
    """lag after a step."""
    lag, _ = add_decay(lag, A_last)
    return gl.where(lag < -MOST, 0.0, lag)


@gluon.jit
def decay_state(state, lag, A_last, LAZY: gl.constexpr):
    """R before a step's tokens enter it, and lag; and whether anything of R is left, or it is to be overwritten."""
    if LAZY:
        lag, is_left = add_decay(lag, A_last)
        if lag < -MOST:
            state = state * gl.exp2(lag * LOG2E)
            lag = 0.0
    else:
        state = state * gl.exp2(A_last * LOG2E)
        is_left = True
    return state, lag, is_left


@gluon.jit
def settle_decay(state, lag, LAZY: gl.constexpr):
    """S of R."""
    return state * gl.exp2(lag * LOG2E) if LAZY else state
