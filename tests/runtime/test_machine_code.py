"""What is found in PTX and machine code, on lines of our own, or of dB_dx at 16 channels and 16 states as it was."""

from pathlib import Path

import pytest

from ssd.runtime.foreign_descriptors import find_foreign_descriptors
from ssd.runtime.lost_operands import find_lost_operands
from ssd.runtime.machine_code import lanes_apart
from tools.late_loads import late_loads

LOOP = ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "LDSM.16.M88.4 R8, [R2+0x100]", "FADD R12, R10, R11",
        "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "IADD3 R3, R3, 0x1, RZ")
PRODUCT = "HGMMA.64x32x16.F32 R24, R88, gdesc[UR8].tnspB, R24, gsb0"
SHORT = {  # of machine_code.txt
    "PRODUCT8": "HGMMA.64x32x16.F32.BF16 R40, gdesc[UR8], RZ, !UPT, gsb0", "PRODUCT": PRODUCT,
    "UPPER": "UMOV UR9, 0x40000040; UMOV UR11, 0x40000040",  # halves of two descriptors
    "SWAP": "; ".join(f"ULOP3.LUT {one}, UR4, UR11, URZ, 0x3c, !UPT" for one in ("UR4", "UR11", "UR4"))}
EXCHANGED = "shfl.sync.bfly.b32 	%r9, %r8, 16, 31, -1;"


def sass(*instructions: str, loop: bool = True) -> str:
    lines = (*instructions, "@P0 BRA `(.L_x_1)") if loop else instructions
    return "\n".join((".L_x_1:", *(f"        /*{16 * n:04x}*/    {text} ;" for n, text in enumerate(lines))))


def over_cases(section: str):
    """Instructions, and what is found in them, as written in machine_code.txt."""
    text = Path(__file__).with_name("machine_code.txt").read_text().partition(f"[{section}]\n")[2].partition("\n\n")[0]
    for name, instructions in SHORT.items():
        text = text.replace(name, instructions)
    cases = [line.partition(" =>") for line in text.splitlines()]
    assert cases
    return pytest.mark.parametrize(("instructions", "found"), [(code.split("; "), found.strip()) for code, _, found in cases])


@over_cases("late")
def test_late_loads(instructions, found):
    """R8 has been loaded before the barrier, R10 used."""
    assert bool(late_loads(sass(*LOOP, *instructions))) == (found == "late")


def test_a_late_load_in_a_loop_without_products():
    assert late_loads(sass(*LOOP[1:], "FADD R13, R8, R12"))


def test_what_is_no_late_load():
    assert not late_loads(sass(*LOOP))
    use = "FADD R13, R8, R12"
    assert not late_loads(sass(*LOOP[:4], use))  # nothing is handed back
    assert not late_loads(sass(*LOOP, use, loop=False))  # no loop
    assert not late_loads(sass(*LOOP, "LDSM.16.M88.4 R8, [R2+0x100]", use))  # loaded again, after the barrier


@over_cases("foreign")
def test_foreign(instructions, found):
    lines = [line.partition(" reads ")[2] for line in find_foreign_descriptors(sass(*instructions, loop=False))]
    assert lines == found.split("; ") if found else not lines


@pytest.mark.parametrize("moved", (False, True))
def test_what_a_turn_of_a_loop_leaves_is_foreign_to_the_next(moved):
    """The first turn's upper half is right."""
    start = f"R2UR UR8, R2; R2UR UR10, R3; {SHORT['UPPER']}".split("; ")
    turn = (SHORT["PRODUCT8"], "S2UR UR11, SR_CTAID.X") if moved else ("S2UR UR12, SR_CTAID.X", SHORT["PRODUCT8"])
    found = find_foreign_descriptors("\n".join((sass(*start, loop=False).removeprefix(".L_x_1:"), sass(*turn))))
    assert [line.partition(" reads ")[2] for line in found] == ["UR11"] * moved


def test_a_product_to_which_no_way_leads_is_not_trusted():
    made = f"R2UR UR8, R2; R2UR UR10, R3; {SHORT['UPPER']}".split("; ")
    assert find_foreign_descriptors(sass(*made, "EXIT", SHORT["PRODUCT8"], loop=False))


@over_cases("lost")
def test_lost(instructions, found):
    assert bool(find_lost_operands(sass(*instructions))) == (found == "lost")


def test_nothing_is_lost_without_a_loop():
    assert not find_lost_operands(sass(PRODUCT, "MOV R88, RZ", loop=False))


@pytest.mark.parametrize(("lines", "apart"), [
    (("mul.f32 %r8, %r1, %r2;", EXCHANGED, "add.f32 %r10, %r8, %r9;"), 0),
    (("mul.f32 %r8, %r1, %r2;", EXCHANGED, "fma.rn.f32 	%r10, %r1, %r2, %r9;"), 1),
    (("mul.f32 %r8, %r1, %r2;", EXCHANGED, "fma.rn.ftz.f32 %r10, %r1, %r2, %r9;"), 1),
    (("fma.rn.f32 %r8, %r1, %r2, 0f00000000;", EXCHANGED, "add.f32 %r10, %r8, %r9;"), 0),
    (("mul.f32 %r8, %r1, %r2;", EXCHANGED, "fma.rn.f32 %r10, %r9, %r2, %r1;"), 0),
    (("shfl.sync.up.b32 %r9|%p1, %r8, 1, 0, -1;", "fma.rn.f32 %r10, %r1, %r2, %r9;"), 0),
], ids=("added", "contracted", "flushed", "rounded first", "multiplied", "a scan"))
def test_lanes_apart(lines, apart):
    assert lanes_apart("\n".join(f"\t{line}" for line in lines)) == apart
