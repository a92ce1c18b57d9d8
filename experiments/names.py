"""The names of variants without importing them: --help and a mistyped name are answered before torch is loaded."""

from __future__ import annotations

import ast
import sys
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_TABLE = "VARIANTS"  # of ssd/variants.py, whose keys are the names


def variant_names() -> tuple[str, ...]:
    """What `ssd.variant_names()` gives, read from the table's source unless the registry was imported before."""
    if registry := sys.modules.get("ssd.registry"):
        return registry.variant_names()
    return _read_names()


@cache
def _read_names() -> tuple[str, ...]:
    source = Path(find_spec("ssd").origin).with_name("variants.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == _TABLE:
            return tuple(map(ast.literal_eval, node.value.keys))
    from ssd import variant_names

    return variant_names()


def suggest(name: str, known: tuple[str, ...] | list[str]) -> str:
    """`; did you mean 'fused'?`, or nothing where no known name is near."""
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
