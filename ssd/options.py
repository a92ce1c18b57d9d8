"""`Options`, the switches of the kernels: those that every variant knows, and those that each variant declares."""

from __future__ import annotations

from dataclasses import make_dataclass
from difflib import get_close_matches
from pathlib import Path
from runpy import run_path

from .variants import VARIANTS

SHARED = {
    "tf32": "Multiply fp32 operands with 10-bit mantissas (TF32). Off, three TF32 products recover fp32 accuracy. No effect on "
            "fp16 and bf16 inputs.",
    "low_precision_states": "Keep states between chunks in C's dtype where `state_dtype` does not say. Off, in fp32.",
    "save_states": "Keep states for the backward: as large as x with one every 128 tokens at dstate 128. Off, and always with "
                   'variant "auto", the backward computes them again.',
    "replay": "Repeat the recorded launches of an earlier call of the same form. Off, launch everything from Python. The "
              "environment variable SSD_REPLAY=0 turns replay off in the whole process.",
}
_BESIDE_SSD = Path(__file__).parents[1]
_OFF = ("tf32",)  # unless asked for; every other option is on


class _Switches:
    def __new__(cls, *_, **given):
        for name in given.keys() - cls.__dataclass_fields__.keys():
            near = get_close_matches(name, cls.__dataclass_fields__, 1)
            raise TypeError(f"options: got {name!r}, expected one of {', '.join(cls.__dataclass_fields__)}"
                            + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().__new__(cls)

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, bool):
                raise TypeError(f"{name}: got {value!r}, expected True or False")

    @property
    def precision(self) -> str:
        """`input_precision` of tl.dot for fp32 operands."""
        return "tf32" if self.tf32 else "tf32x3"


def _declare() -> type:
    texts = dict(SHARED)
    for entry in VARIANTS.values():
        if entry.options is not None:
            texts |= run_path(str(_BESIDE_SSD / entry.options))["OPTIONS"]
    cls = make_dataclass("Options", [(name, bool, name not in _OFF) for name in texts], bases=(_Switches,), frozen=True)
    cls.__module__ = __name__
    attributes = "\n".join(f"    {name}: {text}" for name, text in texts.items())
    cls.__doc__ = f"""Switches of the kernels: one bool for each optimisation, to be turned off by itself and ablated.

A variant ignores the switches that it does not know; `ssd.get_variant(name).options` lists those that it does.

Attributes:
{attributes}

Raises:
    TypeError: an unknown field, with the nearest known one, or a field that is no bool, by name.
"""
    return cls


Options = _declare()
