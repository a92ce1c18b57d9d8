"""What is found in PTX and machine code, on lines of our own, or of dB_dx at 16 channels and 16 states as it was."""

import pytest

from ssd.runtime.lost_operands import find_lost_operands
from ssd.runtime.machine_code import lanes_apart
from ssd.runtime.unset_registers import find_unset_registers
from tools.late_loads import late_loads

LOOP = ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "LDSM.16.M88.4 R8, [R2+0x100]", "FADD R12, R10, R11",
        "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "IADD3 R3, R3, 0x1, RZ")
DESCRIPTOR = ("ULDC.64 UR8, c[0x0][0x248]", "ULDC.64 UR10, c[0x0][0x250]")
READS_UNSET = "HGMMA.64x32x16.F32.BF16 R40, gdesc[UR8], RZ, !UPT, gsb0"
PRODUCT = "HGMMA.64x32x16.F32 R24, R88, gdesc[UR8].tnspB, R24, gsb0"
EXCHANGED = "shfl.sync.bfly.b32 	%r9, %r8, 16, 31, -1;"


def sass(*instructions: str, loop: bool = True) -> str:
    lines = (*instructions, "@P0 BRA `(.L_x_1)") if loop else instructions
    return "\n".join((".L_x_1:", *(f"        /*{16 * n:04x}*/    {text} ;" for n, text in enumerate(lines))))


@pytest.mark.parametrize(("after", "late"), [
    ("FADD R13, R8, R12", True),  # the first use of R8
    ("FADD R13, R10, R12", False),  # used before the barrier already, so it has come
    ("MOV R8, R3", False),  # overwritten, never used
    ("STG.E desc[UR4][R4.64], R9", True),
    ("SHFL.BFLY PT, R6, R8, 0x2, 0x1f", True),
])
def test_late_loads(after, late):
    assert bool(late_loads(sass(*LOOP, after))) == late


def test_what_is_no_late_load():
    assert not late_loads(sass(*LOOP))
    use = "FADD R13, R8, R12"
    assert not late_loads(sass(*LOOP[1:], use))  # no products: not a loop of a role
    assert not late_loads(sass(*LOOP[:4], use))  # nothing is handed back
    assert not late_loads(sass(*LOOP, use, loop=False))  # no loop
    assert not late_loads(sass(*LOOP, "LDSM.16.M88.4 R8, [R2+0x100]", use))  # loaded again, after the barrier


@pytest.mark.parametrize(("instructions", "unset"), [
    ((*DESCRIPTOR, READS_UNSET), []),
    ((READS_UNSET, *DESCRIPTOR), ["UR8, UR9, UR10, UR11"]),
    ((DESCRIPTOR[0], READS_UNSET), ["UR10, UR11"]),
    ((DESCRIPTOR[1], "HGMMA.64x8x16.F32.BF16 R24, R32, gdesc[UR8].tnspB, R24"), []),
    (("UIADD3 UR14, UP0, UR14, 0x1, URZ", "UMOV UR15, URZ", "UIADD3.X UR15, UR15, -0x3ffffff0, URZ, UP0, !UPT"), ["UR14"]),
    (("UMOV UR4, URZ", "UIADD3.64 UR22, UR4, 0x3f, URZ"), ["UR5"]),
    (("UMOV UR4, URZ", "UIMAD.WIDE UR6, UR4, UR4, URZ", "UIADD3.64 UR8, UR6, 0x3f, URZ"), []),
    (("R2UR UR4, R24", "STS.64 [R16+UR4+0x2800], R20"), []),
    (("@!P0 LDG.E.64 R20, desc[UR32][R10.64]",), ["UR32, UR33"]),
    (("UTMALDG.3D [UR8], [UR4]",), ["UR8, UR4"]),
])
def test_unset(instructions, unset):
    found = [line.partition(" reads ")[2] for line in find_unset_registers(sass(*instructions, loop=False))]
    assert [set(line.split(", ")) for line in found] == [set(line.split(", ")) for line in unset]


@pytest.mark.parametrize(("before", "after", "lost"), [
    ((), (), False),
    ((), ("HADD2.F32 R87, -RZ, R124.H0_H0",), False),
    ((), ("HADD2.F32 R89, -RZ, R124.H0_H0",), True),
    ((), ("LDSM.16.M88.4 R88, [R193+UR28+0xe000]",), True),
    ((), ("LDS.64 R90, [R193]",), True),
    ((), ("STS [R88], R89",), False),
    (("LDSM.16.M88.4 R88, [R193+UR28+0xe000]",), ("HADD2.F32 R89, -RZ, R124.H0_H0",), False),
    (("LOP3.LUT R88, R10, R11, RZ, 0xfc, !PT",), ("HADD2.F32 R89, -RZ, R124.H0_H0",), True),
    ((), ("HGMMA.64x128x16.F32 R40, gdesc[UR8], RZ, !UPT",), True),
])
def test_lost(before, after, lost):
    assert bool(find_lost_operands(sass(*before, PRODUCT, *after))) == lost


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
