"""The finder of late loads, on a few lines of machine code."""

import pytest

from tools.late_loads import late_loads

LOOP = ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "LDSM.16.M88.4 R8, [R2+0x100]", "FADD R12, R10, R11",
        "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "IADD3 R3, R3, 0x1, RZ")


def sass(*loop: str) -> str:
    lines = [f"        /*{16 * n:04x}*/                   {text} ;" for n, text in enumerate((*loop, "@P0 BRA `(.L_x_1)"))]
    return "\n".join((".L_x_1:", *lines))


@pytest.mark.parametrize(("after", "late"), [
    ("FADD R13, R8, R12", True),  # the first use of R8
    ("FADD R13, R10, R12", False),  # used before the barrier already, so it has come
    ("MOV R8, R3", False),  # overwritten, never used
    ("STG.E desc[UR4][R4.64], R9", True),
    ("SHFL.BFLY PT, R6, R8, 0x2, 0x1f", True),
])
def test_uses(after, late):
    assert bool(late_loads(sass(*LOOP, after))) == late


def test_what_is_no_concern():
    assert not late_loads(sass(*LOOP))
    use = "FADD R13, R8, R12"
    assert not late_loads(sass(*LOOP[1:], use))  # no products: not a loop of a role
    assert not late_loads(sass(*LOOP[:4], use))  # nothing is handed back
    assert not late_loads("\n".join(sass(*LOOP, use).splitlines()[:-1]))  # no loop
    assert not late_loads(sass(*LOOP, "LDSM.16.M88.4 R8, [R2+0x100]", use))  # loaded again, after the barrier
