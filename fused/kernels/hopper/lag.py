"""Decays of a state that are deferred, in Gluon, for Hopper.

To multiply a state by each step's decay takes a thread as many instructions as it holds elements. So it holds R, and lag, with
S = exp(lag) R. A step adds A_last, the log of its decay, to lag, and its tokens enter R with weights larger by exp(-lag); what
is read of R is scaled where it is scaled by exp(A_i) anyway. When lag falls below -MOST_LAG, R is scaled by exp(lag), and lag
is 0 again. A step that leaves less than exp(-MOST_LAG), 8e-20, of a state leaves nothing: what it adds then overwrites R.

|R| <= exp(44) |S| = 1.3e19 |S|, so R and the sums of R C^T overflow only where |S| or |S C^T| is above 2.6e19. lag loses at
most 1.9e-6 a step to rounding. A NaN or an infinity shows in the outputs of its own sub-chunk; a step that leaves nothing takes
it out of the state as well.

The role that makes weights and the slices each reckon lag. If one scaled where the other did not, results would be off by
exp(MOST_LAG); so lag is a sum of numbers that both load, and of nothing that a compiler could round in two ways.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .roles import LOG2E

MOST_LAG = gl.constexpr(44.0)


@gluon.constexpr_function
def defers_decay(dtype, states):
    """Whether a scan does so: not in fp16, which has too few exponents, nor where it writes states."""
    return dtype == gl.bfloat16 and states is None


@gluon.jit
def advance_lag(lag, A_last):
    """lag after a step; the lag by which R is scaled in it, if that is below -MOST_LAG; and whether anything of R is left."""
    is_left = A_last > -MOST_LAG
    total = gl.where(is_left, lag + A_last, 0.0)
    return gl.where(total < -MOST_LAG, 0.0, total), total, is_left


@gluon.jit
def decay_state(state, lag, A_last, DEFERRED: gl.constexpr):
    """R before a step's tokens enter it, lag, and whether their product adds to R or overwrites it."""
    is_left = True
    if DEFERRED:
        lag, total, is_left = advance_lag(lag, A_last)
        if total < -MOST_LAG:
            state = state * gl.exp2(total * LOG2E)
    else:
        state = state * gl.exp2(A_last * LOG2E)
    return state, lag, is_left


@gluon.jit
def defer_decay(exponent, w, lag, A_last):
    """A step's exponent of what is read of R, in powers of 2, and weights of what enters R, with lag; and lag after it."""
    exponent += lag * LOG2E
    lag, _, _ = advance_lag(lag, A_last)
    return exponent, w * gl.exp2(lag * -LOG2E), lag


@gluon.jit
def apply_decay(state, lag, DEFERRED: gl.constexpr):
    """The state S = exp(lag) R."""
    return state * gl.exp2(lag * LOG2E) if DEFERRED else state
