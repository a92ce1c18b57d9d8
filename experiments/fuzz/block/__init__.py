"""What surrounds the operator in a block, and whole blocks: a module, or a class, for each function that is drawn.

Each has `Config`, `problem`, `draw_shared` (what a family of configurations has in common) and `draw_member` (one of a family).
"""

from dataclasses import replace
from random import Random

from ..limits import Limits
from . import conv1d, conv1d_documents, gated_norm, mamba2, mamba2_documents, selective_scan, updates

BLOCK_PARTS = {"conv1d": conv1d, "conv1d_update": updates.Conv, "gated_norm": gated_norm, "selective_scan": selective_scan,
               "state_update": updates.State, "mamba2": mamba2, "conv1d_documents": conv1d_documents,
               "mamba2_documents": mamba2_documents}
_NUMBERED = 6  # parts whose families are drawn by their number among theirs, which other parts do not change


def draw(seed: int, index: int, variants: list[str], device: str, size: int) -> list:
    """The family of that number in the run of that seed. The functions take turns; whole blocks have a variant each."""
    names = list(BLOCK_PARTS)
    turn, place = divmod(index, len(names))
    name = names[place]
    rng = Random(f"block {seed} {turn * _NUMBERED + place}" if place < _NUMBERED else f"{name} {seed} {turn}")
    part, limits = BLOCK_PARTS[name], Limits.of_block(device)
    shared = part.draw_shared(rng, limits)
    if hasattr(shared, "variant"):
        shared = replace(shared, variant=variants[turn % len(variants)])
    return [part.draw_member(rng, shared, limits) for _ in range(size)]
