"""Finds, in machine code, loads from shared memory that may still be on their way when it is handed back to the TMA.

A Gluon role ends each turn of its loop with a barrier and an arrival at an mbarrier, whose completion lets the TMA overwrite
what the role has read. A barrier does not wait for loads; using what they bring does. So in every such loop that has no other
in it, no register that was loaded before the barrier may be read first after it (docs/log/hopper-scan.md, "A race").
"""

from __future__ import annotations

import re

from ssd.runtime.machine_code import NO_RESULT, read, width

_REGISTER = re.compile(r"(?<![A-Z])R(\d+)")


def late_loads(sass: str) -> list[str]:
    """The instructions that are too late, each with the load it waits for; of nvdisasm's text of one kernel."""
    instructions, loops = read(sass)
    innermost = [loop for loop in loops if not any(o != loop and o[0] >= loop[0] and o[1] <= loop[1] for o in loops)]
    return [late for first, last in sorted(innermost) for late in _late_in(instructions[first : last + 1])]


def _late_in(loop: list[str]) -> list[str]:
    arrivals = [n for n, text in enumerate(loop) if text.startswith("SYNCS.ARRIVE")]
    barriers = [n for n, text in enumerate(loop) if text.startswith("BAR.SYNC") and arrivals and n < arrivals[-1]]
    if not barriers:
        return []
    found, waiting = [], {}
    for n, text in enumerate(loop):
        opcode, _, operands = text.partition(" ")
        first, _, others = operands.partition(",")
        writes = not opcode.startswith(NO_RESULT) and bool(re.match(r"\s*R\d+", first))
        for register in map(int, _REGISTER.findall(others if writes else operands)):
            load = waiting.pop(register, None)
            if load and n > barriers[-1]:
                found.append(f"{text} waits for {load}, loaded before the barrier")
        if writes:
            result = int(_REGISTER.findall(first)[0])
            waiting.pop(result, None)
            if opcode.startswith(("LDS", "LDSM")) and n < barriers[-1]:
                waiting |= dict.fromkeys(range(result, result + width(opcode)), text)
    return found
