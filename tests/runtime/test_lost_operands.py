"""The check of machine code, on machine code of our own."""

import pytest

from ssd.runtime.lost_operands import find_lost_operands

PRODUCT = "HGMMA.64x32x16.F32 R24, R88, gdesc[UR8].tnspB, R24, gsb0"


def sass(*instructions: str) -> str:
    lines = [f"        /*{n:04x}*/    {text} ;" for n, text in enumerate(instructions)]
    return "\n".join([".L_x_1:", *lines, "        /*ffff*/    @P0 BRA `(.L_x_1) ;"])


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


def test_without_a_loop():
    assert not find_lost_operands("\n".join(sass(PRODUCT, "MOV R88, RZ").splitlines()[:-1]))
