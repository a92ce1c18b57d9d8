"""A fence that Triton 3.6 leaves out on Hopper, put back.

wgmma reads shared memory through the async proxy, cp.async and ordinary stores write it through the generic one, so a
fence.proxy.async must stand between them. Triton 3.6 has it before a loop, not inside one where the tiles of the next turn are
written; 3.7 has it there. Without it a product may read what its tile held before. No test has failed for the want of it
(docs/log/compilers.md, "A fence left out").

Triton 3.6 keeps what it compiled, in memory and on disk, under keys that know the options of a compilation and nothing of the
hook. So what has the fence is marked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton import knobs

from .toolchain import TRITON, change_stages

_WGMMA = "wgmma.fence.sync.aligned;"  # before the first product of a group
_FENCE = "fence.proxy.async.shared::cta;"
_LEFT_OUT = TRITON < (3, 7) and torch.version.hip is None and not knobs.runtime.interpret


@contextmanager
def add_fences() -> Iterator[tuple[str, ...]]:
    """What is compiled inside of plain kernels has the fence before each group of products; yields the marks of it
    (`toolchain.mark`). Gluon kernels have the fences that they need.
    """
    if not _LEFT_OUT:
        yield ()
        return
    with change_stages(_add):
        yield (_FENCE,)


def _add(stages: dict) -> None:
    make_ptx = stages["ptx"]
    stages["ptx"] = lambda src, metadata: make_ptx(src, metadata).replace(_WGMMA, f"{_FENCE}\n\t{_WGMMA}")
