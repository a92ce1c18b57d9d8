"""Names of this repository's kernels and the class that each belongs to, read from the source tree."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FOLDERS = ("ssd/kernels", "ssd/block/kernels", "fused/kernels", "persistent/kernels")
# Of ssd/block/kernels, by how a file's name begins; everything else computes the SSM.
_AROUND = {"conv1d": "conv1d", "gated_norm": "norm"}


@cache
def our_kernels() -> dict[str, str]:
    """{name of a kernel as the profiler shows it: class}: every function of the kernel folders whose name ends in `_kernel`."""
    found = {}
    for folder in _FOLDERS:
        for path in sorted((_ROOT / folder).glob("*.py")):
            kind = next((kind for start, kind in _AROUND.items() if path.stem.startswith(start)), "ssm")
            functions = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))
            found |= {node.name: kind for node in functions if node.name.endswith("_kernel")}
    return found
