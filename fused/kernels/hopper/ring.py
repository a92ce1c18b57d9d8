"""Rings: slots of shared memory that one role fills in turn and others read and give back, in Gluon, for Hopper.

Slot s of a ring has two mbarriers. `full` completes a phase when the slot has been filled, `empty` when all its readers have
given it back. Whoever uses the slots in turn counts steps from 0: step n uses slot n % SLOTS in its round n // SLOTS, and waits
for the phase of that round. To fill a slot in round 0 nothing must be waited for, hence the other parity.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Ring(NamedTuple):
    """The mbarriers of a ring, [slots, 1] each. A ring of several lanes has slots / lanes of them for each lane in a row."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers, each of whose phases COUNT arrivals complete."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def make_ring(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """A ring of SLOTS slots that one role fills and READERS roles give back."""
    return Ring(make_barriers(SLOTS, 1), make_barriers(SLOTS, READERS))


@gluon.jit
def slot_of(ring, step, LANE: gl.constexpr = 0, LANES: gl.constexpr = 1):
    """The slot that step number `step` of a lane uses."""
    SLOTS: gl.constexpr = ring.full.shape[0] // LANES
    return LANE * SLOTS + step % SLOTS


@gluon.jit
def wait_full(ring, step, LANE: gl.constexpr = 0, LANES: gl.constexpr = 1):
    """Waits until the slot of this step has been filled for it."""
    SLOTS: gl.constexpr = ring.full.shape[0] // LANES
    mbarrier.wait(ring.full.index(slot_of(ring, step, LANE, LANES)), (step // SLOTS) & 1)


@gluon.jit
def wait_empty(ring, step, LANE: gl.constexpr = 0, LANES: gl.constexpr = 1):
    """Waits until all readers of the round before have given back the slot of this step."""
    SLOTS: gl.constexpr = ring.full.shape[0] // LANES
    mbarrier.wait(ring.empty.index(slot_of(ring, step, LANE, LANES)), (step // SLOTS) & 1 ^ 1)


@gluon.jit
def mark_full(ring, slot):
    """Hands a filled slot to its readers. For what they read by wgmma or TMA, a fence and a barrier of the warps come first."""
    mbarrier.arrive(ring.full.index(slot), count=1)


@gluon.jit
def mark_empty(ring, slot):
    """Gives a slot back. All that was loaded from it must have been used, or the next filling may overtake the load."""
    mbarrier.arrive(ring.empty.index(slot), count=1)


@gluon.jit
def next_slot(slot, kept, phases, bars, FREE: gl.constexpr):
    """The slot after `slot` that is not the kept one, once its mbarrier in `bars` lets it be read, or with FREE be filled.

    A kept slot sits out the rounds of the others, so that a step number no longer tells the round. Bit k of `phases` is the
    phase that the mbarrier of slot k is to complete next; returned with that of the new slot flipped.
    """
    SLOTS: gl.constexpr = bars.shape[0]
    slot = (slot + 1) % SLOTS
    slot = (slot + (slot == kept).to(gl.int32)) % SLOTS
    mbarrier.wait(bars.index(slot), phases >> slot & 1 ^ FREE)
    return slot, phases ^ (1 << slot)


@gluon.jit
def next_full(slot, kept, phases, ring):
    """The next slot to read, as `next_slot`."""
    return next_slot(slot, kept, phases, ring.full, 0)


@gluon.jit
def next_empty(slot, kept, phases, ring):
    """The next slot to fill, as `next_slot`."""
    return next_slot(slot, kept, phases, ring.empty, 1)
