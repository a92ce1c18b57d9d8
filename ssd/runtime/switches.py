"""Switches in the environment, which are read when the package is imported."""

import os


def is_on(name: str, default: bool) -> bool:
    """Whether the environment variable is 1.

    Raises:
        ValueError: it is neither 0, 1 nor empty.
    """
    value = os.environ.get(name) or str(int(default))
    if value not in ("0", "1"):
        raise ValueError(f"{name}: got {value!r} in the environment, expected 0 or 1")
    return value == "1"
