"""How long sequences are cut so that their blocks fill a GPU.

A block of stationary_scan walks one segment of a sequence. All segments but the last are first walked without their outputs,
to know the state that enters the next one; this pass goes in finer pieces, since each of its blocks does less.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPS_PER_SM = 8  # that run at once: blocks of these kernels take every register a thread may have
_STATE_PASS = 0.4  # time of a walk without outputs, against one with them: two of five products, no exponential per pair
_WORTH = 0.9  # of the time of whole sequences: a cut that saves less is not worth a launch
_MOST_SEGMENTS = 16
_MOST_PIECES = 4  # of a segment; the next one starts by reading them all


@dataclass(frozen=True)
class Schedule:
    """How each sequence is cut.

    Attributes:
        nsegments: segments of a sequence, none empty; all but the last are `segment` tokens long.
        pieces: pieces of a segment.
        piece: tokens of a piece.
    """

    nsegments: int
    pieces: int
    piece: int

    @property
    def segment(self) -> int:
        return self.pieces * self.piece

    @property
    def npieces(self) -> int:
        """Pieces of a sequence whose end states must be known: those of all segments but the last."""
        return (self.nsegments - 1) * self.pieces


def resident_blocks(sms: int, num_warps: int) -> int:
    """How many blocks run side by side."""
    return sms * max(1, WARPS_PER_SM // num_warps)


def whole(seqlen: int) -> Schedule:
    """Sequences in one segment."""
    return Schedule(1, 1, seqlen)


def segmented(seqlen: int, block: int, programs: int, resident: int) -> Schedule:
    """The cut that is expected to take the least time.

    Args:
        block: tokens of a sub-chunk; a piece is a whole number of them.
        programs: blocks that one segment of every sequence takes.
        resident: how many blocks run side by side.
    """
    nblocks = -(-seqlen // block)
    wanted = min(range(1, min(nblocks, _MOST_SEGMENTS) + 1), key=lambda n: _time(n, programs, resident))
    if _time(wanted, programs, resident) > _WORTH * _time(1, programs, resident):
        return whole(seqlen)
    pieces = max(1, min(_MOST_PIECES, 2 * resident // (programs * (wanted - 1)), nblocks // wanted))
    length = -(-nblocks // (wanted * pieces))
    return Schedule(-(-nblocks // (pieces * length)), pieces, length * block)


def _time(nsegments: int, programs: int, resident: int) -> float:
    """Of both passes, where a block alone takes 1 for a whole sequence: the scan goes in rounds, the state pass evenly."""
    scan = -(-programs * nsegments // resident) / nsegments
    return scan + _STATE_PASS * programs / resident * (nsegments - 1) / nsegments
