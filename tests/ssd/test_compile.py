"""Every kernel compiles for GPUs that are not here, fits their shared memory and their registers."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ssd import tuning
from tests.inputs import OURS

TOOL = Path(__file__).parents[1] / "compile_kernels.py"
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes that one block may ask for

over_variants = pytest.mark.parametrize("variant", OURS)


@cache
def compiled(variant: str, *options: str) -> list[dict]:
    """In a process of its own: this one may interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(TOOL), "--variant", variant, *options, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_fits(rows: list[dict], arch: int, spills: int) -> None:
    for row in rows:
        assert row["shared"] <= SHARED[arch], f"{row}: a block on sm_{arch} has {SHARED[arch]} bytes of shared memory"
        assert row["registers"] <= 255 and row["spills"] <= spills, f"{row}: at most {spills} bytes may be spilled"


@over_variants
@pytest.mark.parametrize("arch", SHARED)
def test_every_kernel_with_every_option(variant, arch):
    assert_fits(compiled(variant, "--arch", str(arch), "--every-option"), arch, spills=64)


@over_variants
@pytest.mark.parametrize(
    "arch, sizes, spills", [(90, (64, 128), 0), (120, (256, 256), 1024)], ids=["sm_90", "sm_120-largest"]
)
def test_fp32(variant, arch, sizes, spills):
    """The largest tiles in bytes, on the chip with the least room for them as well."""
    options = ("--dtype", "fp32", "--headdim", str(sizes[0]), "--dstate", str(sizes[1]))
    assert_fits(compiled(variant, "--arch", str(arch), *options), arch, spills)


@over_variants
def test_every_config_on_hopper(variant):
    """All that a tuner may try; matrix products use the warpgroup instruction."""
    rows = compiled(variant, "--every-config")
    assert_fits(rows, 90, spills=256)
    for row in rows:
        assert not row["dots"] or row["wgmma"], f"{row}: its products do not use wgmma"


@pytest.mark.parametrize("variant", ("baseline",))
def test_no_kernel_is_left_out(variant):
    rows = compiled(variant, "--arch", "90", "--every-option")
    assert {row["kernel"] for row in rows} >= {f"{kernel}_kernel" for kernel in tuning.KERNELS}
    assert sum(row["dots"] > 0 for row in rows) >= 10
