"""Finds, in machine code, uniform registers that are read before anything has written them.

ptxas 12.8 moves the addition that makes a wgmma's descriptor from an address ahead of the address, once its result is wanted in
two places (docs/log/compilers.md, "A descriptor of nothing"): the products then read whatever an unset register points to.
So, in the order of the text, every uniform register must be written before it is read. That sees an instruction which is moved
to where its register has held nothing yet, as in that kernel, and not one moved to where it still holds something else.
"""

from __future__ import annotations

import re

from .machine_code import read

_REGISTER = re.compile(r"\bUR(\d+)\b")
_RESULT = re.compile(r"(?:U(?!TMA)\w+|R2UR|S2UR|CS2UR|REDUX|VOTEU)\S*\s+(?:UP\d+,\s*)?UR(\d+)\b")
_IN_REGISTERS = re.compile(r"HGMMA\S*\s+R\d+, R\d+, gdesc\[$")


def find_unset_registers(sass: str) -> list[str]:
    """The instructions in question, each with the registers; of nvdisasm's text of one kernel."""
    written, found = set(), []
    for text in read(sass)[0]:
        opcode = text.split(" ")[0]
        result = _RESULT.match(text)
        wide = bool(result) and opcode.endswith(".64")
        if missing := sorted(_reads(text, result.end() if result else 0, wide) - written):
            found.append(f"{text} reads {', '.join(f'UR{n}' for n in missing)}")
        if result:
            first = int(result[1])
            written |= {first, first + 1} if wide or ".WIDE" in opcode else {first}
    return found


def _reads(text: str, operands: int, wide: bool) -> set[int]:
    """Of the text from `operands` on. The addend of a WIDE product is not known to be two registers, nor taken for them."""
    reads = set()
    for match in _REGISTER.finditer(text, operands):
        before, first = text[: match.start()], int(match[1])
        count = 2 if wide or before.endswith("desc[") else 1
        if before.endswith("gdesc["):  # of both operands, or, where the left one is in registers, of the other
            first, count = (first + 2, 2) if _IN_REGISTERS.match(before) else (first, 4)
        reads |= set(range(first, first + count))
    return reads
