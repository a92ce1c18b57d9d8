"""Where the buffers of a recorded call lie: those that no launch needs at the same time share memory.

A buffer lives from the first launch that uses it to the last. The launches of one stream run one after the other, so what comes
after that may use its memory; but one that begins early does so beside the launch before, and what it uses lives from then on.
A result's memory, too, is free until the first launch that uses the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 512  # bytes, of what torch allocates


class Buffer(NamedTuple):
    """Memory that launches number `first` to `last` use."""

    nbytes: int
    first: int
    last: int


class Place(NamedTuple):
    """`offset` bytes into the memory of a result, by its number, or into the scratch memory, number -1."""

    room: int
    offset: int


SCRATCH = -1


def place_buffers(buffers: Sequence[Buffer], results: Sequence[Buffer]) -> tuple[list[Place], int]:
    """A place for each buffer, and the bytes of the scratch memory. The largest buffers take the lowest free places first.

    results: only their sizes and first launches matter; they live on.
    """
    places: dict[int, Place] = {}
    for n in sorted(range(len(buffers)), key=lambda n: -buffers[n].nbytes):
        for room in (*range(len(results)), SCRATCH):
            beside = [(places[m].offset, _round_up(buffers[m].nbytes)) for m in places
                      if places[m].room == room and _overlap(buffers[m], buffers[n])]
            offset = _find_gap(sorted(beside), buffers[n].nbytes)
            fits = room == SCRATCH or offset + buffers[n].nbytes <= results[room].nbytes
            if fits and (room == SCRATCH or buffers[n].last < results[room].first):
                places[n] = Place(room, offset)
                break
    placed = [places[n] for n in range(len(buffers))]
    ends = [place.offset + _round_up(b.nbytes) for b, place in zip(buffers, placed, strict=True) if place.room == SCRATCH]
    return placed, max(ends, default=0)


def check_apart(buffers: Sequence[Buffer], places: Sequence[Place], results: Sequence[Buffer]) -> None:
    """Raises RuntimeError where two buffers, or a buffer and a result, share memory while both live."""
    for n, (buffer, place) in enumerate(zip(buffers, places, strict=True)):
        if place.room != SCRATCH and buffer.last >= results[place.room].first:
            raise RuntimeError(f"buffer {n} lies in result {place.room}, which launch {results[place.room].first} uses before "
                               f"the buffer's last launch, {buffer.last}")
        for m in range(n):
            same = places[m].room == place.room and _overlap(buffers[m], buffer)
            if same and places[m].offset < place.offset + buffer.nbytes and place.offset < places[m].offset + buffers[m].nbytes:
                both = max(buffer.first, buffers[m].first)
                raise RuntimeError(f"buffers {m} and {n} share memory, and both live at launch {both}")


def _overlap(one: Buffer, other: Buffer) -> bool:
    return one.first <= other.last and other.first <= one.last


def _find_gap(taken: list[tuple[int, int]], nbytes: int) -> int:
    """The lowest offset at which so many bytes are free. taken: (offset, bytes), in order of offsets."""
    offset = 0
    for start, length in taken:
        if start - offset >= nbytes:
            break
        offset = max(offset, start + length)
    return offset


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
