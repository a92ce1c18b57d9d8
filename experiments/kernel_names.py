"""Whose a kernel is, by the name that profilers give it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_OF_OPERATOR = ("ssd/kernels", "ssd/baseline/kernels", "fused/kernels", "persistent/kernels")
_OF_BLOCK = ("ssd/block/kernels",)
UNKNOWN = ("torch", "fla")  # variants whose kernels no name tells from others'
_UPSTREAM = r"_(bmm_chunk|chunk_cumsum|chunk_state|chunk_scan|state_passing)\w*_kernel"


@cache
def of_operator() -> str:
    """A regular expression that is found in the names of the SSD's kernels and those of Mamba-1's selective scan, ours and
    mamba_ssm's.
    """
    return rf"^({'|'.join(sorted(names(_OF_OPERATOR)))}|{_UPSTREAM})$|selective_scan"


def is_of_operator(name: str) -> bool:
    """Whether it is one of those; of `sum_parts_kernel`, which gated norm launches, too, all are counted."""
    return re.search(of_operator(), name) is not None


def ours() -> frozenset[str]:
    """Of all kernels of this repository, the operator's and those around it."""
    return names(_OF_OPERATOR + _OF_BLOCK)


@cache
def names(folders: tuple[str, ...]) -> frozenset[str]:
    """Of the kernels that are written in these folders of the repository."""
    files = (file for folder in folders for file in (_ROOT / folder).rglob("*.py"))
    return frozenset(name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M))
