"""What surrounds the operator in a block, and whole blocks: a module, or a class, for each function that is drawn.

Each has `Config`, `problem`, `draw_shared` (what a family of configurations has in common) and `draw_member` (one of a family).
"""

from dataclasses import replace
from random import Random

from ..limits import Limits
from . import conv1d, gated_norm, mamba2, selective_scan, updates

BLOCK_PARTS = {"conv1d": conv1d, "conv1d_update": updates.Conv, "gated_norm": gated_norm, "selective_scan": selective_scan,
               "state_update": updates.State, "mamba2": mamba2}


def draw(seed: int, index: int, variants: list[str], device: str, size: int) -> list:
    """The family of that number in the run of that seed. The functions take turns; whole blocks have a variant each."""
    names = list(BLOCK_PARTS)
    rng, name = Random(f"block {seed} {index}"), names[index % len(names)]
    part, limits = BLOCK_PARTS[name], Limits.of_block(device)
    shared = part.draw_shared(rng, limits)
    if name == "mamba2":
        shared = replace(shared, variant=variants[index // len(names) % len(variants)])
    return [part.draw_member(rng, shared, limits) for _ in range(size)]
