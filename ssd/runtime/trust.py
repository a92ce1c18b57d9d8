"""Kernels of matrix products are launched only after their machine code was searched for what ptxas is known to do wrong.

On Hopper, Triton multiplies by wgmma, whose operands ptxas names by descriptors in uniform registers, or reads from registers
while the instructions after it run. Three of its faults have made results wrong, at sizes that no list of tests would have had:

    fault               what happens                                                       ptxas
    another's register  a product's address is made of what holds something else by then   12.8
    an unset register   a product's address is made of what nothing has written            12.8
    a lost operand      a loop overwrites what its next turn multiplies by                 12.8 to 13.0

The last two are plain to see in machine code, by `lost_operands` and `foreign_descriptors`. Of the first only what reaches the
upper half of an address is seen, as it did where it was met. So nothing that ptxas 12.8 makes of wgmma is launched: `ptxas`
takes the newer one that Triton brings too. A kernel in which a fault is found, at whatever size and by whatever ptxas, is
compiled without wgmma instead, and the logger "ssd" says so: mma.sync takes its operands from registers alone and has none of
these faults. So is a kernel for which there is no newer ptxas, or that cannot be searched, for want of nvdisasm.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from triton import knobs
from triton.compiler import CompiledKernel

from .foreign_descriptors import find_foreign_descriptors
from .lost_operands import find_lost_operands
from .machine_code import find_once, inspect
from .ptxas import OLDEST, choose_ptxas
from .toolchain import mark
from .versions import release

_SWITCH = "DISABLE_MMA_V3"  # of Triton, which has it in its keys on disk, but not in memory
_log = logging.getLogger("ssd")


def find_fault(compiled: CompiledKernel) -> str | None:
    """What is wrong with the machine code of a kernel in plain Triton, or why that is not known; None if nothing is."""
    if "ttir" not in compiled.asm or "wgmma.mma_async" not in compiled.asm["ptx"]:
        return None
    if release(version := choose_ptxas().version) < OLDEST:
        return f"ptxas {version} makes products read at addresses that are not theirs, which 12.9 and newer do not"
    if _find_nvdisasm() is None:
        return "nvdisasm, which comes with Triton and with the CUDA toolkit, is not there to show what ptxas made of it"
    return find_once(_search, compiled.kernel, find_foreign_descriptors, find_lost_operands)


@contextmanager
def forbid_warpgroups(kernel: str, why: str) -> Iterator[dict]:
    """What is compiled inside, with the options that this gives, multiplies by mma.sync; a warning names the kernel and why. Of
    one thread at a time: the environment is one for all.
    """
    _log.warning("%s is compiled without wgmma, which takes more time: %s", kernel, why)
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        yield mark("without wgmma")
    finally:
        os.environ.pop(_SWITCH) if before is None else os.environ.update({_SWITCH: before})


def _search(cubin: bytes) -> str | None:
    """The first fault in a kernel's machine code."""
    sass = inspect(_find_nvdisasm(), "-c", cubin)
    if foreign := find_foreign_descriptors(sass):
        return f"ptxas makes the address of a product of what something else has written, or nothing ({foreign[0]})"
    if lost := find_lost_operands(sass):
        return f"ptxas overwrites what the next turn of a loop multiplies by ({lost[0]})"
    return None


@cache
def _find_nvdisasm() -> str | None:
    try:
        return knobs.nvidia.nvdisasm.path
    except RuntimeError:
        return shutil.which("nvdisasm")
