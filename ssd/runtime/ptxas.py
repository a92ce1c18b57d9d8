"""Which ptxas compiles the kernels in plain Triton for Hopper.

Triton brings two: `ptxas`, which it takes for Hopper up to 3.8, and the newer `ptxas-blackwell`. Those before 12.9 make
products read at addresses that are not theirs: of registers that nothing has written, which a search of machine code sees, and
of registers that hold something else by then, which it does not (docs/log/compilers.md, "A descriptor of something else"). So
where Triton's choice is older than 12.9, kernels of ours with wgmma are compiled by the newer one.

    Triton      ptxas    ptxas-blackwell
    3.6.0       12.8     12.9
    3.7.1       12.8     13.1
    3.8.0       12.9     13.3
    3.9.0       12.9     13.4, which it takes for Hopper too

Gluon kernels keep Triton's choice: those after 12.9 spill more of their registers, and the machine code of their few forms is
searched by the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton import knobs

from .toolchain import change_stages, get_ptxas
from .versions import release

OLDEST = (12, 9)
_VARIABLE = "TRITON_PTXAS_PATH"  # of Triton, where a user says which; it is in none of Triton's keys


@contextmanager
def take_trusted_ptxas() -> Iterator[tuple[str, ...]]:
    """What is compiled inside of plain kernels with wgmma is compiled by a ptxas without those faults, if there is one; yields
    the marks of it (`toolchain.mark`). Of one thread at a time: the environment is one for all.
    """
    if torch.version.hip is not None or (taken := choose_ptxas()) == get_ptxas(90):
        yield ()
        return

    def change(stages: dict) -> None:
        make_cubin = stages["cubin"]

        def make(ptx, metadata):
            if "wgmma.mma_async" not in ptx:
                return make_cubin(ptx, metadata)
            os.environ[_VARIABLE] = taken.path
            try:
                return make_cubin(ptx, metadata)
            finally:
                del os.environ[_VARIABLE]

        stages["cubin"] = make

    with change_stages(change):
        yield (f"ptxas {taken.version}",)


def choose_ptxas() -> knobs.NvidiaTool:
    """That of plain kernels with wgmma: Triton's choice, or a user's, unless the newer one is to be taken in its place."""
    own = get_ptxas(90)
    if _VARIABLE in os.environ or release(own.version) >= OLDEST:
        return own
    try:
        newer = knobs.nvidia.ptxas_blackwell
    except RuntimeError:  # there is none
        return own
    return newer if release(newer.version) >= OLDEST else own
