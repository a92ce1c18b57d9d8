"""Where documents that are packed in a row begin and end."""

from random import Random

_NEAR = 0.6  # of boundaries, near another one


def draw_bounds(rng: Random, seqlen: int, ndocs: int, near: int) -> list[int]:
    """cu_seqlens of ndocs documents: of any length, many of at most `near` tokens, of one, or of none."""
    bounds = [0, seqlen]
    for _ in range(ndocs - 1):
        beside = rng.choice(bounds) + rng.randint(-near, near)
        bounds.append(min(max(beside, 0), seqlen) if rng.random() < _NEAR else rng.randint(0, seqlen))
    return sorted(bounds)
