"""`Options`: the switches of the kernels, those that every variant knows and those that each declares; and `keep_bytes`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import make_dataclass
from difflib import get_close_matches
from pathlib import Path
from runpy import run_path

from .variants import VARIANTS

SHARED = {
    "tf32": "Multiply fp32 operands with 10-bit mantissas (TF32). Off, three TF32 products recover fp32 accuracy. No effect on "
            "fp16 and bf16 inputs.",
    "low_precision_states": "Keep states between chunks in C's dtype where `state_dtype` does not say. Off, in fp32.",
    "save_states": "Keep states for the backward: as large as x with one every 128 tokens at dstate 128. Off, the backward "
                   'computes them again. Variant "auto" keeps them only where keep_bytes allows.',
    "replay": "Repeat the recorded launches of an earlier call of the same form. Off, launch everything from Python. The "
              "environment variable SSD_REPLAY=0 turns replay off in the whole process.",
}
KEEP_BYTES = ('Bytes of states that a call of variant "auto" may keep for its backward, 0 or more. A call whose states take '
              "more keeps none, and its backward computes them again. Other variants do not read it.")
_BESIDE_SSD = Path(__file__).parents[1]
_OFF = ("tf32",)  # unless asked for; every other switch is on


def suggest(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'tf32'?`, for the end of a message, or nothing where no known name is near."""
    near = get_close_matches(str(name), known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


class _Switches:
    def __new__(cls, *_, **given):
        for name in given.keys() - cls.__dataclass_fields__.keys():
            known = cls.__dataclass_fields__
            raise TypeError(f"options: got {name!r}, expected one of {', '.join(known)}{suggest(name, known)}")
        return super().__new__(cls)

    def __post_init__(self):
        switches = dict(vars(self))
        keep_bytes = switches.pop("keep_bytes")
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name}: got {value!r}, expected True or False")
        if isinstance(keep_bytes, bool) or not isinstance(keep_bytes, int):
            raise TypeError(f"keep_bytes: got {keep_bytes!r}, expected an int")
        if keep_bytes < 0:
            raise ValueError(f"keep_bytes: got {keep_bytes}, expected 0 or more")

    @property
    def precision(self) -> str:
        """`input_precision` of tl.dot for fp32 operands."""
        return "tf32" if self.tf32 else "tf32x3"


def _declare() -> type:
    texts = dict(SHARED)
    for entry in VARIANTS.values():
        if entry.options is not None:
            texts |= run_path(str(_BESIDE_SSD / entry.options))["OPTIONS"]
    declared = [*((name, bool, name not in _OFF) for name in texts), ("keep_bytes", int, 0)]
    cls = make_dataclass("Options", declared, bases=(_Switches,), frozen=True)
    cls.__module__ = __name__
    attributes = "\n".join(f"    {name}: {text}" for name, text in (*texts.items(), ("keep_bytes", KEEP_BYTES)))
    cls.__doc__ = f"""Switches of the kernels, a bool for each optimisation, to be turned off alone and ablated; and a budget.

A variant ignores the switches that it does not know; `ssd.get_variant(name).options` lists those that it does, but
for tf32, which all of ours know.

Attributes:
{attributes}

Raises:
    TypeError: an unknown field, with the nearest known one, or a field of another type, by name.
    ValueError: keep_bytes below 0.
"""
    return cls


Options = _declare()


def check_options(options: object) -> None:
    """Raises:
        TypeError: they are neither None nor `Options`.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options: got {type(options).__name__}, expected ssd.Options")
