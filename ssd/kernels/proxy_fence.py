"""A fence that Triton 3.6 leaves out on Hopper, put back.

wgmma reads shared memory through the async proxy, cp.async and ordinary stores write it through the generic one, so a
fence.proxy.async must stand between them. Triton 3.6 has it before a loop, not inside one where the tiles of the next turn are
written; 3.7 has it there. Without it a product may read what its tile held before: in group_dB_dx half of dx was wrong at some
sizes (docs/kernel-log.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import triton
from triton import knobs

_WGMMA = "wgmma.fence.sync.aligned;"  # before the first product of a group
_FENCE = "fence.proxy.async.shared::cta;"
_lock = threading.Lock()


@contextmanager
def fenced() -> Iterator[None]:
    """What is compiled inside has the fence before each group of products."""
    if not _is_left_out():
        yield
        return
    with _lock:  # Triton's hook is one for all threads
        others = knobs.runtime.add_stages_inspection_hook

        def add(*args) -> None:
            if others is not None:
                others(*args)
            _add(*args)

        knobs.runtime.add_stages_inspection_hook = add
        try:
            yield
        finally:
            knobs.runtime.add_stages_inspection_hook = others


@cache
def _is_left_out() -> bool:
    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and hasattr(knobs.runtime, "add_stages_inspection_hook")


def _add(backend, stages: dict, options, language, capability) -> None:
    """Triton's hook for those who add to its stages, of which each maps what the one before made. Gluon kernels, which begin
    with a later one, have the fences that they need.
    """
    if "ttir" in stages and "ptx" in stages:
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda src, metadata: make_ptx(src, metadata).replace(_WGMMA, f"{_FENCE}\n\t{_WGMMA}")
