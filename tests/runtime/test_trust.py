"""What is not trusted runs without wgmma, and is said; what nobody can search is not trusted."""

import logging

import pytest
import torch

from ssd.runtime import launch, trust
from ssd.types import Options
from tests.errors import assert_right
from tests.inputs import OURS, PLAIN, Case, Shape, random_inputs

PTX = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
CLEAN = "/*0000*/ UMOV UR4, URZ ;"
UNSET = "/*0000*/ UIADD3 UR14, UP0, UR14, 0x1, URZ ;"
LOST = "\n".join([".L_x_1:", "/*0000*/ HGMMA.64x32x16.F32 R24, R88, gdesc[UR8].tnspB, R24, gsb0 ;", "/*0010*/ MOV R88, R1 ;",
                  "/*0020*/ @P0 BRA `(.L_x_1) ;"])
SET = "\n".join(f"/*{n:04x}*/ UMOV UR{n}, URZ ;" for n in (8, 9, 10, 11))


class Compiled:
    """A kernel as Triton leaves it."""

    def __init__(self, ptx: str = PTX, source: str = "ttir", cubin: bytes = b""):
        self.asm, self.kernel = {"ptx": ptx, source: ""}, cubin


@pytest.fixture
def any_ptxas(monkeypatch):
    """What compiled a kernel is trusted, whichever it was."""
    monkeypatch.setattr(trust, "OLDEST", (0, 0))


@pytest.fixture
def search(any_ptxas, monkeypatch, tmp_path):
    """fault() of a kernel whose machine code is the text given, and how often nvdisasm ran."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trust, "_find_nvdisasm", lambda: "nvdisasm")
    ran = []
    monkeypatch.setattr(trust, "inspect", lambda tool, option, cubin: ran.append(cubin) or cubin.decode())
    return lambda sass, **as_compiled: (trust.find_fault(Compiled(cubin=sass.encode(), **as_compiled)), len(ran))


@pytest.mark.parametrize("sass, why", [
    (CLEAN, None), (UNSET, "or nothing (UIADD3 UR14"), (f"{SET}\n{LOST}", "overwrites what the next turn")])
def test_faults_are_found_once(sass, why, search):
    found, ran = search(sass)
    assert (found is None) if why is None else why in found
    assert ran == 1
    assert search(sass) == (found, 1)


def test_kernels_without_wgmma_and_of_gluon_are_not_searched(search):
    assert search(UNSET, ptx="mma.sync") == (None, 0)
    assert search(UNSET, source="source") == (None, 0)


def test_nothing_is_trusted_without_a_disassembler(any_ptxas, monkeypatch):
    monkeypatch.setattr(trust, "_find_nvdisasm", lambda: None)
    assert "nvdisasm" in trust.find_fault(Compiled())


def test_a_warning_names_the_kernel_and_why(caplog, monkeypatch):
    monkeypatch.delenv("DISABLE_MMA_V3", raising=False)
    with caplog.at_level(logging.WARNING, "ssd"), trust.forbid_warpgroups("some_kernel", "a reason") as options:
        assert options and trust.os.environ["DISABLE_MMA_V3"] == "1"
    assert "DISABLE_MMA_V3" not in trust.os.environ
    assert "some_kernel" in caplog.text and "a reason" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("shape, case", [
    (Shape(2, 150, 8, 64, 2, 128, 64), Case(D="h", dt_softplus=True)), (Shape(1, 257, 3, 48, 3, 32, 256), PLAIN),
    (Shape(1, 300, 4, 128, 1, 256, 256), Case(D="hp", z=True, documents="seq_idx")),
], ids=str)
def test_results_without_wgmma(shape, case, name, device, monkeypatch):
    monkeypatch.setattr(launch, "_found", {})
    monkeypatch.setattr(launch, "find_fault", lambda compiled: "a test")
    inputs = random_inputs(shape, case, torch.bfloat16, device)
    assert_right(name, inputs, options=Options(gluon=False))
