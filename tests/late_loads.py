"""Finds, in machine code, loads from shared memory that may still be on their way when it is handed back to the TMA.

A Gluon role ends each turn of its loop with a barrier and an arrival at an mbarrier, whose completion lets the TMA overwrite
what the role has read. A barrier does not wait for loads; using what they bring does. So in every such loop, no register that
was loaded before the barrier may be read first after it (docs/kernel-log.md, "A race").
"""

from __future__ import annotations

import re

_LABEL, _INSTRUCTION = re.compile(r"^\s*\.(L_x_\d+):"), re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH, _REGISTER = re.compile(r"BRA.*\(\.(L_x_\d+)\)"), re.compile(r"(?<![A-Z])R(\d+)")
_WIDTH = {"128": 4, "64": 2, "4": 4, "2": 2}  # registers, by the last part of the opcode: LDS.128, LDSM.16.M88.4
_NO_RESULT = ("ST", "RED", "SYNCS", "UTMA", "BAR", "WARPGROUP", "BRA")


def late_loads(sass: str) -> list[str]:
    """The instructions that are too late, each with the load it waits for; of nvdisasm's text of one kernel."""
    instructions, loops = read(sass)
    innermost = [loop for loop in loops if not any(o != loop and o[0] >= loop[0] and o[1] <= loop[1] for o in loops)]
    return [late for first, last in sorted(innermost) for late in _late_in(instructions[first : last + 1])]


def read(sass: str) -> tuple[list[str], set[tuple[int, int]]]:
    """The instructions in order, and the loops: first and last of each."""
    instructions, labels = [], {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.search(line):
            instructions.append(re.sub(r"^@!?U?P\d+ +", "", instruction[1].strip()))
    branches = ((n, _BRANCH.search(text)) for n, text in enumerate(instructions))
    return instructions, {(labels[b[1]], n) for n, b in branches if b and labels.get(b[1], n) < n}


def _late_in(loop: list[str]) -> list[str]:
    if not any(text.startswith("HGMMA") for text in loop):
        return []
    arrivals = [n for n, text in enumerate(loop) if text.startswith("SYNCS.ARRIVE")]
    barriers = [n for n, text in enumerate(loop) if text.startswith("BAR.SYNC") and arrivals and n < arrivals[-1]]
    if not barriers:
        return []
    found, waiting = [], {}
    for n, text in enumerate(loop):
        opcode, _, operands = text.partition(" ")
        first, _, others = operands.partition(",")
        writes = not opcode.startswith(_NO_RESULT) and bool(re.match(r"\s*R\d+", first))
        for register in map(int, _REGISTER.findall(others if writes else operands)):
            load = waiting.pop(register, None)
            if load and n > barriers[-1]:
                found.append(f"{text} waits for {load}, loaded before the barrier")
        if writes:
            result = int(_REGISTER.findall(first)[0])
            waiting.pop(result, None)
            if opcode.startswith(("LDS", "LDSM")) and n < barriers[-1]:
                waiting |= dict.fromkeys(range(result, result + _WIDTH.get(opcode.split(".")[-1], 1)), text)
    return found
