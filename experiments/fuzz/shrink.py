"""From a configuration that fails to a small one that fails as well: greedily, a field at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

_ORDER = ("mode", "calls", "options", "documents", "layouts", "dtypes", "state_dtype")  # what explains most goes first


def shrink(config: object, fails: Callable[[object], bool], until: Callable[[], bool] = lambda: False) -> object:
    """The smallest configuration found. fails: whether one still does; until: whether time is up."""
    again = True
    while again:
        again = False
        for name in sorted((f.name for f in fields(config) if f.name not in ("variant", "seed")), key=_rank):
            for value in _simpler(name, getattr(config, name), getattr(type(config)(), name)):
                if until():
                    return config
                candidate = replace(config, **{name: value})
                if candidate != config and fails(candidate):
                    config, again = candidate, True
                    break
    return config


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _simpler(name: str, value: object, default: object) -> Iterator[object]:
    """Values to try in place of this one, the simplest first."""
    if value == default:
        return
    if isinstance(value, bool) or not isinstance(value, (int, tuple, dict)):
        yield default
    elif isinstance(value, int):
        halves = []
        while (size := (halves[-1] if halves else value) // 2) > default:
            halves.append(size)
        yield from (default, *reversed(halves))
        if name != "chunk_size" and value - 1 > default:
            yield value - 1
    elif isinstance(value, dict):
        yield default
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
    else:
        yield default
        if len(value) > 1 and all(isinstance(item, str) for item in value):
            for item in value:
                yield tuple(other for other in value if other != item)
