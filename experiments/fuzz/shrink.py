"""From a configuration that fails to a small one that fails as well."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import islice

_KEPT = ("variant", "seed")
# what takes no other kernels, and so little time; then the rest as it comes
_FIRST = ("mode", "calls", "batch", "seqlen", "wanted", "ways", "layouts", "decay", "gates", "cuts", "ndocs", "decoded")


def shrink(config: object, failing: Callable[[list], list[bool]], until: Callable[[], bool] = lambda: False,
           width: int = 16) -> object:
    """The smallest configuration found by making fields simpler as long as it still fails.

    failing: which of at most `width` configurations fail; they are tried at once, since each may take kernels of its own.
    until: True when time is up.
    """
    candidates = _simpler(config)
    while not until() and (wave := list(islice(candidates, width))):
        failed = [c for c, fails in zip(wave, failing([c for _, c in wave]), strict=True) if fails]
        if failed:
            together = config
            for name, candidate in reversed(failed):  # of one field, the first is the simplest
                together = replace(together, **{name: getattr(candidate, name)})
            config = together if len(failed) > 1 and failing([together])[0] else failed[0][1]
            candidates = _simpler(config)
    return config


def _simpler(config: object) -> Iterator[tuple[str, object]]:
    """Each field that can be made simpler, by name, and the configuration with that, the simplest first."""
    default = type(config)()
    names = [f.name for f in fields(config) if f.name not in _KEPT]
    for name in sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST)):
        for value in _values(name, getattr(config, name), getattr(default, name)):
            yield name, replace(config, **{name: value})


def _values(name: str, value: object, default: object) -> Iterator[object]:
    """What to try in place of a field's value, the simplest first."""
    if value == default:
        return
    yield default
    if isinstance(value, int) and not isinstance(value, bool):
        sizes = [value // 2] if name == "chunk_size" else [value - (value >> n) for n in range(1, value.bit_length())]
        yield from (size for size in sizes if size > default)
    elif isinstance(value, dict) and len(value) > 1:
        for key in value:
            yield {other: v for other, v in value.items() if other != key}
    elif isinstance(value, tuple) and len(value) > 1 and all(isinstance(item, str) for item in value):
        for item in value:
            yield tuple(other for other in value if other != item)
