"""Launches that begin while the one before ends (programmatic dependent launch, from Hopper on).

The programs of such a kernel start as soon as those of the kernel before have started and leave room, and may do what no
earlier launch decides: load weights, say. Then they wait until the kernel before has ended. In a kernel that began early
at least one program waits before it ends itself, so a kernel that has ended means that all before it have.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import tuning

_FIRST = float("inf") if triton.knobs.runtime.interpret else tuning.HOPPER


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """What earlier launches wrote may be read from here on, and what they read may be overwritten."""
    if EARLY:
        gdc_wait()


def begin_early(index: int | None) -> dict[str, bool]:
    """The config of a launch of a kernel with the parameter EARLY, on a device by its index."""
    early = tuning.current_device(index).major >= _FIRST
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}
