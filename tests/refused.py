"""How calls are refused: by the argument's name, with what came and what is accepted."""

from collections.abc import Callable

import pytest
import torch


def name_of(value: object) -> str:
    """For the ids of parametrised tests."""
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else getattr(value, "__name__", str(value))


def assert_refused(call: Callable, given: dict, argument: str, kind: type[Exception], came: str, accepted: str) -> None:
    with pytest.raises(kind) as refused:
        call(**given)
    said, _, expected = str(refused.value).partition("expected")
    assert argument in said.split(":")[0].split(", "), f"{said!r} does not begin with {argument!r}"
    assert came in said and accepted in expected, str(refused.value)
