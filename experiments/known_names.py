"""The names of variants without importing `ssd`: --help and a mistyped name are answered before torch is loaded."""

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path


def variant_names() -> tuple[str, ...]:
    """What `ssd.variant_names()` gives, from the file of names alone unless the registry was imported before."""
    if registry := sys.modules.get("ssd.registry"):
        return registry.variant_names()
    return _read_names()


@cache
def _read_names() -> tuple[str, ...]:
    return tuple(run_path(str(Path(find_spec("ssd").origin).with_name("variants.py")))["VARIANTS"])


def refuse_unknown(option: str, name: str, known: Iterable[str]) -> None:
    """Raises:
        ValueError: the name is not known; says the option, what came, and what is accepted.
    """
    known = list(known)
    if name not in known:
        raise ValueError(f"{option}: got {name!r}, expected one of {', '.join(known)}{suggest(name, known)}")


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'fused'?`, or nothing where no known name is near or begins so."""
    known = list(known)
    near = get_close_matches(name, known, 1) or [other for other in known if name and other.startswith(name)]
    return f"; did you mean {near[0]!r}?" if near else ""
