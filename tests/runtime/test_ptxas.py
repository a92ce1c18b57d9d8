"""Products on Hopper are compiled by a ptxas that finds their operands, and all else by Triton's choice."""

import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, PropertyMock, patch

import pytest
import torch

from ssd.baseline.kernels.bmm_chunk import bmm_chunk
from ssd.kernels.chunk_cumsum import chunk_cumsum
from ssd.runtime import ptxas, trust
from ssd.types import Options
from tests.inputs import Case, Shape, random_inputs
from tests.programs import run_python
from tools import tritons


@pytest.fixture
def bring(monkeypatch):
    """Makes Triton one that brings a ptxas for Hopper and another of these versions; None if there is none."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)

    def bring(own: str, other: str | None) -> None:
        monkeypatch.setattr(ptxas, "get_ptxas", lambda arch: SimpleNamespace(version=own, path="own"))
        monkeypatch.setattr(ptxas, "knobs", knobs := Mock())
        type(knobs.nvidia).ptxas_blackwell = PropertyMock(
            side_effect=[SimpleNamespace(version=other, path="other") if other else RuntimeError])

    return bring


@pytest.mark.parametrize("own, other, found", [
    ("12.8", "12.9", "other"), ("12.8", "13.1", "other"), ("12.8", "12.8", "own"), ("12.8", None, "own"),
    ("12.9", "13.3", "own")])
def test_the_newer_is_taken_where_the_other_is_faulty(own, other, found, bring):
    bring(own, other)
    assert ptxas.choose_ptxas().path == found


def test_a_user_may_choose_which_then_must_be_trusted(bring, monkeypatch):
    bring("12.8", "12.9")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "own")
    assert ptxas.choose_ptxas().path == "own"
    kernel = SimpleNamespace(asm={"ptx": "wgmma.mma_async", "ttir": ""})
    assert "ptxas 12.8" in trust.find_fault(kernel)


def main() -> None:
    """Prints by what a kernel with products is compiled for Hopper and for Ampere, and one without for Hopper."""
    from tools.compile_kernels import collect_kernels, use_installed_tools

    use_installed_tools()
    inputs, run = random_inputs(Shape(1, 256, 2, dstate=128, chunk_size=256), Case(), torch.bfloat16), subprocess.run
    for arch, kernel in ((90, partial(bmm_chunk, inputs, Options())), (80, partial(bmm_chunk, inputs, Options())),
                         (90, partial(chunk_cumsum, inputs))):
        with collect_kernels(arch), patch.object(subprocess, "run", side_effect=run) as ran:
            kernel()
        commands = [call.args[0] for call in ran.call_args_list]
        print(*(Path(command[0]).name for command in commands if any(word.startswith("--gpu-name") for word in command)))


@pytest.mark.other_tritons
def test_products_on_hopper_are_compiled_by_it(triton, tmp_path):
    environment = {**tritons.make_environment(triton), "TRITON_CACHE_DIR": str(tmp_path)}
    hopper, *others = run_python("-m", __name__, environment=environment).split()
    assert hopper == "ptxas-blackwell"
    assert triton != "3.6.0" or others == ["ptxas", "ptxas"]


if __name__ == "__main__":
    main()
