"""What can be drawn, by the name that a configuration has as `part`, and configurations as JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from types import ModuleType

from . import draw, operator, serving
from .block import BLOCK_PARTS
from .block import draw as draw_block

PARTS: dict[str, ModuleType | type] = {"operator": operator, **BLOCK_PARTS, "serving": serving}
DRAWS: dict[str, Callable] = {"operator": draw.draw, "block": draw_block, "serving": serving.draw}  # by what --part may say


def part_of(config: object) -> str:
    """The name of the part that a configuration is of."""
    return next(name for name, part in PARTS.items() if type(config) is part.Config)


def label(config: object) -> str:
    """The name under which a configuration is counted: the operator's variant, or the part of the block."""
    name, variant = part_of(config), getattr(config, "variant", None)
    return variant if name == "operator" else name if variant is None else f"{name} {variant}"


def to_json(config: object) -> str:
    """One line, which `from_json` reads; fields that have their defaults are left out."""
    default = asdict(type(config)())
    changed = {name: value for name, value in asdict(config).items() if value != default[name]}
    return json.dumps({"part": part_of(config)} | changed)


def from_json(line: str) -> object:
    """The configuration of a line.

    Raises:
        ValueError: it is no JSON object, or of no part, or names a field that the part has not.
    """
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"got {line[:60]!r}, expected a configuration as a JSON object: {error}") from None
    if not isinstance(given, dict) or given.get("part") not in PARTS:
        raise ValueError(f"got {line[:60]!r}, expected a JSON object with a part of {', '.join(PARTS)}")
    part = PARTS[given.pop("part")]
    known = {f.name for f in fields(part.Config)}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"got {', '.join(unknown)}, expected fields of {', '.join(sorted(known))}")
    return part.Config(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
