"""Finds, in machine code, products whose descriptors are made of what something else has written, or nothing.

A descriptor of an operand is 64 bits in two uniform registers. Its upper half, which says how the tile lies in shared memory,
is a constant in PTX, so it has to be one in machine code. ptxas 12.8 moves instructions that make a descriptor to where a
register holds nothing yet, or something else still (docs/log/compilers.md, "A descriptor of nothing" and "A descriptor of
something else"). So values are followed through the code, each as the set of those of run time that went into it: a constant
has none. A lower half that is made of something else is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .machine_code import NO_RESULT, split_blocks, width

Values = dict[str, frozenset]  # by register, or by slot of the stack: what of run time went into it; none where nothing is set

_CONSTANT = frozenset()
_REGISTER, _PREDICATE = re.compile(r"\b(U?R)(\d+)\b"), re.compile(r"!?U?P[\dT]")
_IMMEDIATE = r"[-+]?(?:0x[0-9a-f]+|\d[\d.]*(?:e[-+]?\d+)?|INF|QNAN)"
_PLAIN = re.compile(rf"[-~!|]*(?:U?R(?:\d+|Z)|SRZ|{_IMMEDIATE})\|?(?:\.\w+)*")  # neither in memory nor a special register
_IN_REGISTERS = re.compile(r"HGMMA\S*\s+R\d+, R\d+, gdesc\[")
_OF_THREADS = ("ELECT", "HGMMA", "MATCH", "P2R", "REDUX", "S2", "SHFL", "VOTE")  # results of run time, whatever they are given
_XORS = {"0x3c": slice(0, 2), "0x66": slice(1, 3)}  # tables of LOP3, and which of its operands they take


@dataclass(frozen=True)
class _Instruction:
    number: int
    text: str  # without its predicate
    opcode: str
    conditional: bool
    result: str | None  # the first register that it fills
    sources: list[str]


def find_foreign_descriptors(sass: str) -> list[str]:
    """The instructions in question, each with the registers; of nvdisasm's text of one kernel."""
    code, blocks = split_blocks(sass)
    instructions = [_parse(number, text) for number, text in enumerate(code)]
    entered, waiting = {0: {}}, [0]
    while waiting:
        start = waiting.pop()
        values, (end, next_blocks) = dict(entered[start]), blocks[start]
        for instruction in instructions[start:end]:
            _follow(instruction, values)
        for block in next_blocks:
            merged = _merge(block, entered.get(block, {}), values)
            if block not in entered or merged != entered[block]:
                entered[block] = merged
                waiting.append(block)
    found = []
    for start, (end, _) in blocks.items():
        values = dict(entered.get(start, {}))  # where no way leads, nothing is set
        for instruction in instructions[start:end]:
            if wrong := _list_wrong(instruction, values):
                found.append(f"{instruction.text} reads {', '.join(wrong)}")
            _follow(instruction, values)
    return found


def _parse(number: int, text: str) -> _Instruction:
    plain = re.sub(r"^@!?U?P\w+ +", "", text)
    opcode, _, rest = plain.partition(" ")
    operands = [operand for part in rest.split(",") if not _PREDICATE.fullmatch(operand := part.strip())]
    fills = operands and not opcode.startswith(NO_RESULT) and re.fullmatch(r"U?R\d+", operands[0])
    return _Instruction(number, plain, opcode, plain != text, operands[0] if fills else None, operands[1:])


def _merge(block: int, before: Values, values: Values) -> Values:
    """What is entered with; two values of one register, by two ways, make one of run time."""
    return before | {name: value if before.get(name, value) == value else frozenset({(block, name)})
                     for name, value in values.items()}


def _follow(instruction: _Instruction, values: Values) -> None:
    """Notes what the instruction writes."""
    opcode, written = instruction.opcode, {}
    if opcode.startswith("STL"):
        written = {name: _take(instruction.sources[-1], n, values) for n, name in enumerate(_list_slots(instruction))}
    elif instruction.result:
        written = {_shift(instruction.result, n): value for n, value in enumerate(_compute(instruction, values))}
    for name, value in written.items():
        if value is None or (instruction.conditional and values.get(name, value) != value):
            value = frozenset({(instruction.number, name)})
        values[name] = value


def _compute(instruction: _Instruction, values: Values) -> list[frozenset | None]:
    """The values of the registers that an instruction fills; None where they are of run time, and new."""
    opcode, sources = instruction.opcode, instruction.sources
    base = opcode.partition(".")[0]
    if base == "LDL" and (slots := _list_slots(instruction)):
        return [values.get(slot) for slot in slots]
    wide = "WIDE" in opcode or (base == "CS2R" and not opcode.endswith(".32"))
    if not all(map(_PLAIN.fullmatch, sources)) or opcode.startswith(_OF_THREADS) or not sources:
        product = re.match(r"HGMMA\.64x(\d+)", opcode)
        return [None] * (int(product[1]) // 2 if product else 2 if wide else width(opcode))
    if base in ("MOV", "UMOV", "R2UR"):
        return [_take(sources[0], 0, values)]
    if base == "IMAD" and not wide and sources[0] == "RZ":
        return [_take(sources[2], 0, values)]
    if base in ("LOP3", "ULOP3") and sources[3] in _XORS:
        a, b = (_take(source, 0, values) for source in sources[_XORS[sources[3]]])
        return [None if a is None or b is None else a ^ b]
    if base in ("SEL", "USEL", "FSEL") and sources[0] != sources[1]:
        return [None]
    low = _join(_take(source, 0, values) for source in sources)
    if "WIDE" in opcode:
        return [low, _join((low, _take(sources[2], 1, values)))]
    return [low, *(_join(_take(source, n, values) for source in sources) for n in range(1, 2 if wide else width(opcode)))]


def _join(parts: Iterable[frozenset | None]) -> frozenset | None:
    """Of a result: a constant if it is made of constants."""
    return _CONSTANT if all(part == _CONSTANT for part in parts) else None


def _take(operand: str, n: int, values: Values) -> frozenset | None:
    """The value of an operand, or of the n-th register after it."""
    register = _REGISTER.search(operand)
    return values.get(_shift(register[0], n)) if register else _CONSTANT


def _shift(register: str, n: int) -> str:
    file, number = _REGISTER.fullmatch(register).groups()
    return f"{file}{int(number) + n}"


def _list_slots(instruction: _Instruction) -> list[str]:
    """The slots of the stack that an instruction reads or writes, if it says which."""
    slot = re.search(r"\[R1(?:\+(0x[0-9a-f]+))?\]", instruction.text)
    first = int(slot[1] or "0", 16) if slot else 0
    return [f"stack {first + 4 * n}" for n in range(width(instruction.opcode))] if slot else []


def _list_wrong(instruction: _Instruction, values: Values) -> list[str]:
    """Uniform registers that are read and hold nothing, or, of the upper half of a descriptor, no constant."""
    text, found = instruction.text, {}
    for operand in re.finditer(r"(gdesc\[|desc\[|)\bUR(\d+)\b", text[text.find(",") if instruction.result else 0 :]):
        inside, first = operand[1], int(operand[2])
        if inside == "gdesc[":  # of both operands, or, where the left one is in registers, of the other
            numbers = range(first + 2 if _IN_REGISTERS.match(text) else first, first + 4)
        else:
            pair = inside or (instruction.opcode.endswith(".64") and instruction.opcode.startswith("U"))
            numbers = range(first, first + (2 if pair else 1))
        for number in numbers:
            value = values.get(name := f"UR{number}")
            if value is None or (inside == "gdesc[" and (number - first) % 2 and value != _CONSTANT):
                found[name] = True
    return list(found)
