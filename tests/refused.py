"""How calls are refused: by the argument's name, with what came and what is accepted."""

import ast
import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

_LINE = re.compile(r"(?:(\S+): )?(\w+ = .*?) +\| (\w+) +\| (.*?) *\|(.*)")


class Refusal(NamedTuple):
    """A line of a table, and the function in brackets above it.

    It has what differs from good arguments, the kind of error, what is said to have come, and what is said to be accepted. The
    argument that is named is the first that differs, or stands before a colon.
    """

    function: str
    argument: str
    changed: dict
    kind: type[Exception]
    came: str
    accepted: str

    def check(self, call: Callable, good: dict) -> None:
        assert_refused(call, good | self.changed, self.argument, self.kind, self.came, self.accepted)


def over_refusals(path: Path, *functions: str):
    """Parametrises a test by the lines of a table, or by those of these functions."""
    cases, function = [], None
    for line in filter(None, path.read_text().splitlines()):
        if line.startswith("["):
            function = line.strip("[]")
        elif not functions or function in functions:
            argument, changes, kind, came, accepted = _LINE.fullmatch(line).groups()
            changed = {name: read_value(value) for name, value in (part.split(" = ", 1) for part in changes.split("; "))}
            argument = argument or next(iter(changed))
            refusal = Refusal(function, argument, changed, getattr(builtins, kind), came, accepted.strip())
            cases.append(pytest.param(refusal, id=f"{function}-{changes}"))
    assert cases, f"{path} has no line of {functions}"
    return pytest.mark.parametrize("refusal", cases)


def read_value(text: str) -> object:
    """A literal of Python, `dtype NAME`, or `zeros SHAPE [DTYPE] [meta]`: a tensor."""
    word, _, rest = text.partition(" ")
    if word == "dtype":
        return getattr(torch, rest)
    if word != "zeros":
        return ast.literal_eval(text)
    shape, dtype, device = re.fullmatch(r"(\(.*\))(?: (?!meta)(\w+))?(?: (meta))?", rest).groups()
    return torch.zeros(ast.literal_eval(shape), dtype=getattr(torch, dtype or "float32"), device=device)


def assert_refused(call: Callable, given: dict, argument: str, kind: type[Exception], came: str, accepted: str) -> None:
    with pytest.raises(kind) as refused:
        call(**given)
    said, _, expected = str(refused.value).partition("expected")
    assert argument in said.split(":")[0].split(", "), f"{said!r} does not begin with {argument!r}"
    assert came in said and accepted in expected, str(refused.value)
