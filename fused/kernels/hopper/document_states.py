"""How documents' states enter the walks of hopper_states and hopper_pieces, in Gluon, for Hopper: by the TMA.

At a block where a walk enters a document, the producer fetches the document's states of both slices of a pair, before the
block's own tiles, into a slot of their own: as soon as the walks have given back the one before. Where no states are given it
says that the slot is full all the same, and what is taken from there is zero.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ssd.runtime.gluon_names import async_load, reinterpret

from .ring import Ring, mark_full, wait_empty, wait_full
from .roles import get_head, split_pair, tile_bytes


class Entries(NamedTuple):
    """The slot that documents' states enter by, and its ring. Both None where rows are walked."""

    states: gl.shared_memory_descriptor  # [2, 64, dstate] fp32; states of 16 bits fill half of it
    ring: Ring


@gluon.jit
def as_box(buffer, desc):
    """Shared memory, or the first part of it, as a box of `desc` [1, 64, width], whatever was in it."""
    shape: gl.constexpr = [1, desc.block_shape[1], desc.block_shape[2]]
    LAYOUT: gl.constexpr = desc.layout  # in Triton 3.6 no constexpr by itself
    return reinterpret(buffer, shape, LAYOUT, desc.dtype)


@gluon.jit
def as_tile(buffer, desc):
    """The same memory as [64, width]."""
    ROWS: gl.constexpr = desc.block_shape[1]
    WIDTH: gl.constexpr = desc.block_shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], desc.dtype)
    return reinterpret(buffer, [ROWS, WIDTH], LAYOUT, desc.dtype)


@gluon.jit
def fetch_document_states(desc, document, pair, entries, entry, work, form: gl.constexpr):
    """Into the slot of `entries`, for the entry of this number: the states of a document that `desc` describes, or nothing."""
    wait_empty(entries.ring, entry)
    bar = entries.ring.full.index(0)
    if desc is None:
        mark_full(entries.ring, 0)
    else:
        mbarrier.expect(bar, 2 * tile_bytes(desc))
        pair, part = split_pair(pair, form)
        for u in gl.static_range(2):
            state = document * work.nheads + get_head(pair, u, work.heads_per_group, form)
            row = u * (form.SLICES - 1) * desc.block_shape[1]
            async_load(desc, [state, row, part * desc.block_shape[2]], bar, as_box(entries.states.index(u), desc))


@gluon.jit
def take_document_state(desc, entries, entry, STATE: gl.constexpr, U: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Slice U [P, N] fp32 of what `fetch_document_states` fetched. It must have been used before the slot is given back."""
    wait_full(entries.ring, entry)
    if desc is None:
        state = gl.zeros([ROWS, WIDTH], gl.float32, STATE)
    else:
        state = as_tile(entries.states.index(U), desc).load(STATE).to(gl.float32)
    return state


@gluon.jit
def allocate_entry(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """The slot of `Entries`, for the states of both slices of a pair."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.float32)
    return gl.allocate_shared_memory(gl.float32, [2, ROWS, WIDTH], LAYOUT)
