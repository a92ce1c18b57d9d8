"""What is read of PTX, on PTX of our own."""

import pytest

from ssd.runtime.machine_code import lanes_apart

EXCHANGED = "shfl.sync.bfly.b32 	%r9, %r8, 16, 31, -1;"


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
