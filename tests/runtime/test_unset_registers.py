"""The check of machine code, on machine code of ours: of dB_dx at 16 channels and 16 states, as it was."""

import pytest

from ssd.runtime.unset_registers import find_unset_registers

DESCRIPTOR = ("ULDC.64 UR8, c[0x0][0x248]", "ULDC.64 UR10, c[0x0][0x250]")
PRODUCT = "HGMMA.64x32x16.F32.BF16 R40, gdesc[UR8], RZ, !UPT, gsb0"


def sass(*instructions: str) -> str:
    return "\n".join(f"        /*{n:04x}*/    {text} ;" for n, text in enumerate(instructions))


@pytest.mark.parametrize(("instructions", "unset"), [
    ((*DESCRIPTOR, PRODUCT), []),
    ((PRODUCT, *DESCRIPTOR), ["UR8, UR9, UR10, UR11"]),
    ((DESCRIPTOR[0], PRODUCT), ["UR10, UR11"]),
    ((DESCRIPTOR[1], "HGMMA.64x8x16.F32.BF16 R24, R32, gdesc[UR8].tnspB, R24"), []),
    (("UIADD3 UR14, UP0, UR14, 0x1, URZ", "UMOV UR15, URZ", "UIADD3.X UR15, UR15, -0x3ffffff0, URZ, UP0, !UPT"), ["UR14"]),
    (("UMOV UR4, URZ", "UIADD3.64 UR22, UR4, 0x3f, URZ"), ["UR5"]),
    (("UMOV UR4, URZ", "UIMAD.WIDE UR6, UR4, UR4, URZ", "UIADD3.64 UR8, UR6, 0x3f, URZ"), []),
    (("R2UR UR4, R24", "STS.64 [R16+UR4+0x2800], R20"), []),
    (("@!P0 LDG.E.64 R20, desc[UR32][R10.64]",), ["UR32, UR33"]),
    (("UTMALDG.3D [UR8], [UR4]",), ["UR8, UR4"]),
])
def test_unset(instructions, unset):
    found = [line.partition(" reads ")[2] for line in find_unset_registers(sass(*instructions))]
    assert [set(line.split(", ")) for line in found] == [set(line.split(", ")) for line in unset]
