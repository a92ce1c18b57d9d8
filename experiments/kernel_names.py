"""Whose a kernel is, by the name that profilers give it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_OF_OPERATOR = ("ssd/kernels", "fused/kernels", "persistent/kernels")
_OF_BLOCK = ("ssd/block/kernels",)
_UPSTREAM = re.compile(r"_(bmm_chunk|chunk_cumsum|chunk_state|chunk_scan|state_passing)\w*_kernel")


def is_of_operator(name: str) -> bool:
    """Whether it is one of the SSD's or of Mamba-1's selective scan, ours or mamba_ssm's."""
    return name in names(_OF_OPERATOR) or _UPSTREAM.fullmatch(name) is not None or "selective_scan" in name


def ours() -> frozenset[str]:
    """Of all kernels of this repository, the operator's and those around it."""
    return names(_OF_OPERATOR + _OF_BLOCK)


@cache
def names(folders: tuple[str, ...]) -> frozenset[str]:
    """Of the kernels that are written in these folders of the repository."""
    files = (file for folder in folders for file in (_ROOT / folder).glob("*.py"))
    return frozenset(name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M))
