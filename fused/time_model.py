"""How long the kernels of this folder and of `persistent` take, as far as a schedule needs to know it.

`schedule` asks these formulas which cut takes least time. Their constants are one file for each GPU, `configs/<gpu>.json`,
which `python -m experiments tune` measures and writes. A GPU without a file gets the constants of the H200. What cuts
they led to, and how these fared beside others, is in docs/log/schedule.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ssd.kernels.arguments import cdiv

CONFIGS = Path(__file__).parent / "configs"
FALLBACK = "h200"
_BYTES_OF_A_STATE = 10  # an element between chunks: written and read in fp32, written in 16 bits


class Step(NamedTuple):
    """What a walk takes for one sub-chunk, in microseconds.

    Attributes:
        alone: its latency, where few blocks walk.
        shared: its part of the memory's time, for each block that walks.
    """

    alone: float
    shared: float

    def among(self, blocks: int) -> float:
        """The time of a sub-chunk in each of so many blocks side by side."""
        return (self.alone**4 + (self.shared * blocks) ** 4) ** 0.25


class Cut(NamedTuple):
    """How sequences on Hopper are cut, and the state pass dealt out; in sub-chunks.

    Attributes:
        each: that a segment has, but the last of a sequence may be shorter.
        share: that a block of the state pass has. None: the sequences lie end to end, block after block takes about as many of
            the next (`end_to_end`), and a segment ends where either ends; a block of the pass has what lies between two
            beginnings of segments.
    """

    each: int
    share: int | None

    @property
    def end_to_end(self) -> bool:
        return self.share is None


@dataclass(frozen=True)
class TimeModel:
    """The constants of one GPU, in microseconds unless said otherwise.

    Attributes:
        scan_step: of a walk on Hopper that writes outputs.
        kept_scan_step: of one that also writes the state before each sub-chunk, or whose first state is late.
        every_state_step: of a walk on Hopper that writes the state, or its gradient, before each sub-chunk.
        few_states_step: of a walk on Hopper that writes few states.
        segment_start: the first tiles of a segment.
        state_pass_launch: the launch of the state pass, which walks the pieces.
        state_pass_step: a sub-chunk in the state pass.
        piece_join: a segment reads the end of one piece before it.
        two_level_start: a block of the two-level scan finds its state and first tiles. In its sub-chunks.
        group_tile: a tile of the group backward beside its heads. In the time of one head.
        group_partial_sum: what a tile takes more where its sums are one of several parts. In the time of one head.
        walk_states_step: a sub-chunk of chunk_state_passing.
        walk_dstates_step: a sub-chunk of dstates_passing.
        chunks_launch: one launch more, its beginning and its end, where chunks take the place of a walk.
        chunks_step: a chunk of the recurrence between chunks.
        chunks_bytes_per_us: memory bandwidth for the states of chunks.
        plain_state_pass: time of a plain walk without outputs. In the time of one with them.
    """

    scan_step: Step
    kept_scan_step: Step
    every_state_step: Step
    few_states_step: Step
    segment_start: float
    state_pass_launch: float
    state_pass_step: float
    piece_join: float
    two_level_start: float
    group_tile: float
    group_partial_sum: float
    walk_states_step: float
    walk_dstates_step: float
    chunks_launch: float
    chunks_step: float
    chunks_bytes_per_us: float
    plain_state_pass: float

    @classmethod
    def read(cls, text: str) -> TimeModel:
        """The constants from the text of a file.

        Raises:
            ValueError: the text lacks a constant, or has one too many; the message names them.
        """
        constants = json.loads(text)
        names = {f.name for f in fields(cls)}
        if wrong := names ^ set(constants):
            raise ValueError(f"time model: got {sorted(set(constants))}, missing or unknown: {sorted(wrong)}")
        return cls(**{name: Step(*value) if isinstance(value, list) else value for name, value in constants.items()})

    def write(self) -> str:
        """The constants as the text of a file."""
        lines = ",\n".join(f'  "{f.name}": {json.dumps(getattr(self, f.name))}' for f in fields(self))
        return f"{{\n{lines}\n}}\n"

    def time_cut(self, step: Step, sequences: int, nsub: int, blocks: int, cut: Cut) -> float:
        """Sequences of nsub sub-chunks on Hopper, cut so; `each` is nsub where nothing is cut."""
        before = cdiv(nsub, cut.each) - 1  # segments that others follow
        if cut.share is None:  # the start of the pass, and of one run; a segment more of some sequences counts for nothing
            return (2 * self.segment_start + cut.each * step.among(blocks) + self.piece_join * before
                    + self.state_pass_launch + self.state_pass_step * cut.each)
        runs = sequences * (before + 1)
        rounds = cdiv(runs, blocks)
        scan = rounds * (self.segment_start + cut.each * step.among(min(runs, blocks)))
        if not before:
            return scan
        straddling = cut.each % cut.share > 0  # shares then end inside a segment
        joins = (cdiv(before * cut.each, cut.share) + straddling) * (rounds + 1) / 2
        return (scan + self.piece_join * joins + self.state_pass_launch + self.segment_start * (1 + straddling)
                + self.state_pass_step * cut.share)

    def time_two_level(self, sequences: int, nsub: int, blocks: int, segment: int) -> float:
        """The two-level scan on Hopper in segments of so many sub-chunks; in sub-chunks."""
        return cdiv(sequences * cdiv(nsub, segment), blocks) * (segment + self.two_level_start)

    def time_group(self, tiles: int, heads: int, blocks: int, splits: int) -> float:
        """The group backward on Hopper with the heads of each group in so many splits; in the time of one head."""
        each = heads if splits == 1 else cdiv(heads, splits) + self.group_partial_sum
        return cdiv(tiles * splits, blocks) * (each + self.group_tile)

    def time_plain_walk(self, step: float, programs: int, resident: int, nsub: int) -> float:
        """chunk_state_passing or dstates_passing, whose step is given: every program walks nsub sub-chunks."""
        return cdiv(programs, resident) * nsub * step

    def time_chunks(self, nchunks: int, elements: int) -> float:
        """The kernels that take a walk's place: chunks on their own and a recurrence; elements: of all states together."""
        return self.chunks_launch + nchunks * self.chunks_step + elements * _BYTES_OF_A_STATE / self.chunks_bytes_per_us

    def time_plain_cut(self, nsegments: int, programs: int, resident: int) -> float:
        """stationary_scan and its state pass, where a block alone takes 1 for a whole sequence. The scan goes in rounds, the
        state pass evenly.
        """
        scan = cdiv(programs * nsegments, resident) / nsegments
        return scan + self.plain_state_pass * programs / resident * (nsegments - 1) / nsegments


@cache
def get_time_model(gpu: str) -> TimeModel:
    """The model of a GPU, by the name that `tuning.Device` gives it."""
    path = CONFIGS / f"{gpu}.json"
    return TimeModel.read((path if path.exists() else CONFIGS / f"{FALLBACK}.json").read_text())
