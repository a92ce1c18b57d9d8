"""Which part of the code a kernel belongs to, by the name that profilers give it."""

import re
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parent.parent
OF_OPERATOR = ("ssd/kernels", "ssd/baseline/kernels", "ssd/distributed/kernels", "fused/kernels", "persistent/kernels")
_OF_BLOCK = ("ssd/block/kernels",)
# Old name -> present one. Rows keep the names that they were measured under; tables and classes go by the present ones.
RENAMED = {
    "two_level_scan_kernel": "bmm_chunk_scan_kernel",
    "persistent_scan_kernel": "bmm_chunk_scan_kernel",
    "block_scan_kernel": "bmm_chunk_scan_rows_kernel",
    "walk_states_kernel": "chunk_state_passing_kernel",
    "walk_dstates_kernel": "dstates_passing_kernel",
    "group_dC_kernel": "dC_dCB_kernel",
    "group_dB_dx_kernel": "dB_dx_kernel",
}
UNKNOWN = ("torch", "fla")  # variants whose kernels no name tells from others'
_UPSTREAM = r"_(bmm_chunk|chunk_cumsum|chunk_state|chunk_scan|state_passing)\w*_kernel"


@cache
def operator_pattern() -> str:
    """A regular expression that is found in the names of the SSD's kernels and those of Mamba-1's selective scan, ours and
    mamba_ssm's.
    """
    return rf"^({'|'.join(sorted(names(OF_OPERATOR)))}|{_UPSTREAM})$|selective_scan"


def is_of_operator(name: str) -> bool:
    """Whether it is one of those; of `sum_parts_kernel`, which gated norm launches, too, all are counted."""
    return re.search(operator_pattern(), present_name(name)) is not None


def present_name(name: str) -> str:
    """The name that a kernel has now, from the one in a row."""
    return RENAMED.get(name, name)


def list_ours() -> frozenset[str]:
    """The names of all kernels of this repository, the operator's and those around it."""
    return names(OF_OPERATOR + _OF_BLOCK)


@cache
def names(folders: tuple[str, ...]) -> frozenset[str]:
    """The names of the kernels that are defined in these folders."""
    files = (file for folder in folders for file in (_ROOT / folder).rglob("*.py"))
    return frozenset(name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M))
