"""Finds, in machine code, products whose left operand lies in registers that a loop overwrites and never restores.

ptxas 12.8 takes such registers for free after a wgmma although the next turn of the loop reads them again, where nothing in
the loop had written them (docs/log/compilers.md, "Half of dx"). So in every loop, of the registers of a product's left operand
either none is written, or all are before the product. What a turn leaves for the next looks the same: Gluon kernels, whose
states go round in such registers, are not for this.
"""

from __future__ import annotations

import re
from functools import lru_cache

from .machine_code import NO_RESULT, read, width

_PRODUCT, _RESULT = re.compile(r"HGMMA\S*\s+R\d+, R(\d+), gdesc"), re.compile(r"(\S+)\s+(?:P\d+, )?R(\d+)\b")
_OPERAND = 4  # registers of a left operand


def find_lost_operands(sass: str) -> list[str]:
    """The products in question, of nvdisasm's text of one kernel."""
    instructions, loops = read(sass)
    return [lost for first, last in sorted(loops) for lost in _find_lost(instructions[first : last + 1])]


def _find_lost(loop: list[str]) -> list[str]:
    written = [_list_written(text) for text in loop]
    in_loop, before, lost = set().union(*written), set(), []
    for text, registers in zip(loop, written, strict=True):
        if product := _PRODUCT.match(text):
            operand = set(range(int(product[1]), int(product[1]) + _OPERAND))
            if operand & in_loop - before:
                lost.append(text)
        before |= registers
    return lost


@lru_cache(maxsize=2**15)  # an instruction is in every loop around it
def _list_written(text: str) -> frozenset[int]:
    """The registers that an instruction writes."""
    result = _RESULT.match(text)
    if not result or result[1].startswith(NO_RESULT):
        return frozenset()
    opcode, first = result[1], int(result[2])
    if product := re.match(r"HGMMA\.64x(\d+)", opcode):
        count = int(product[1]) // 2
    else:
        count = 2 if "WIDE" in opcode else width(opcode)
    return frozenset(range(first, first + count))
