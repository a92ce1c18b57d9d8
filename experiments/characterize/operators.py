"""Which operator a kernel belongs to, for the breakdown of a step (Figure 1 of the paper, see `classes`).

Rules are tried by the kernel's name first, then by the CPU operators that launched it, then by the scopes around them; what
none knows is `other`. Within each list the first rule that matches any of the names decides, so that SSM comes before GEMM
(`bmm_chunk`), convolution before GEMM (`implicit_gemm`), and embedding before the index_select inside it. By its name an
elementwise kernel of an optimizer is elementwise: the phase of a kernel says whose it is.
"""

import re
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path

from ..kernel_names import list_ours, present_name
from .scopes import PREFIX

CLASSES = ("gemm", "ssm", "conv1d", "conv", "attention", "norm", "elementwise", "reduce", "embedding", "loss", "optimizer",
           "memcpy", "other")

Rule = tuple[str, re.Pattern]  # a class, and what is searched for in a name
_AROUND = {"conv1d": "conv1d", "gated_norm": "norm"}  # by how a name begins; all others compute the SSM


def _read_rules(section: str) -> list[Rule]:
    """Those of a section of operators.ini, in its order."""
    parser = ConfigParser(interpolation=None)
    parser.read_string(Path(__file__).with_suffix(".ini").read_text())
    return [(kind, re.compile(pattern.replace("\n", ""))) for kind, pattern in parser[section].items()]


def _compile_ours(kind: str) -> Rule:
    """For this repository's kernels of a class, whose names are read from the source tree."""
    found = sorted(name for name in list_ours() if _kind_of_ours(name) == kind)
    return kind, re.compile(rf"^({'|'.join(found)})$")


def _kind_of_ours(name: str) -> str:
    return next((kind for start, kind in _AROUND.items() if name.startswith(start)), "ssm")


KERNEL_RULES = [*map(_compile_ours, ("ssm", "conv1d", "norm")), *_read_rules("kernel")]
OP_RULES = _read_rules("operator")
SCOPE_RULES = [("optimizer", re.compile(rf"^Optimizer\.step|^{PREFIX}optimizer$")),
               *((kind, re.compile(rf"^{PREFIX}{kind}$")) for kind in ("loss", "embedding", "attention", "norm", "ssm"))]


def classify(name: str, ops: Iterable[str] = (), scopes: Iterable[str] = (), rules: Iterable[Rule] = KERNEL_RULES) -> str:
    """The class of a kernel.

    Args:
        ops: names of the CPU operators around its launch.
        scopes: names of the scopes around it.
        rules: those for the kernel's name.
    """
    for said, applied in (((present_name(name),), rules), (tuple(ops), OP_RULES), (tuple(scopes), SCOPE_RULES)):
        for kind, pattern in applied:
            if any(pattern.search(one) for one in said):
                return kind
    return "other"
