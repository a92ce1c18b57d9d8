"""patch_vllm, on a package of vLLM's layout that does nothing."""

import importlib
from inspect import signature

import pytest
import torch
from torch.testing import assert_close

import ssd
from ssd.interop import patch_vllm as patch
from tests.interop.installed import set_aside
from tests.interop.test_vllm import draw, scan

NAME, OPS, MIXER = patch._NAME, patch._SOURCE, "vllm.model_executor.layers.mamba.mamba_mixer2"
LATER = "vllm.model_executor.models.plamo2"
ARGUMENTS = ("x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, out, D=None, z=None, "
             "dt_bias=None, initial_states=None, dt_softplus=False, dt_limit=(0.0, float('inf')), "
             "return_intermediate_states=False, state_dtype=None")
NEW = ", final_states_out=None, final_state_indices=None"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Writes the package, of a version and a function with these arguments, and puts it where it is found first."""
    def write(version: str = "0.33.0", arguments: str = ARGUMENTS + NEW) -> None:
        files = {"vllm": f"__version__ = '{version}'", OPS: f"def {NAME}({arguments}): return 'theirs'",
                 **dict.fromkeys((MIXER, LATER), f"from {OPS} import {NAME}")}
        for module, source in files.items():
            path = tmp_path.joinpath(*module.split("."))
            path.mkdir(parents=True)
            (path / "__init__.py").write_text(source)
        importlib.import_module("vllm")

    with set_aside(lambda name: name.split(".")[0] == "vllm"):
        monkeypatch.syspath_prepend(tmp_path)
        yield write
    assert ssd.patched() == {}


def find_function(module: str):
    return getattr(importlib.import_module(module), NAME)


@pytest.mark.parametrize(("version", "arguments"), [("0.12.0", ARGUMENTS), ("0.33.0", ARGUMENTS + NEW)])
def test_replaced_wherever_it_is(install, version, arguments):
    """In a module that is loaded before, and in one that is loaded under the patch; and everywhere put back."""
    install(version, arguments)
    theirs = find_function(MIXER)
    with ssd.patch_vllm("torch"):
        assert ssd.patched() == {"vllm": "torch"}
        assert find_function(OPS) is find_function(MIXER) is find_function(LATER) is patch._scan
    assert find_function(OPS) is find_function(MIXER) is find_function(LATER) is theirs and theirs(*range(11)) == "theirs"


def test_it_runs_the_variant_of_the_patch(install, device, monkeypatch):
    install()
    given, ran = draw([0, 20], device), []
    monkeypatch.setattr(patch, NAME, lambda *args, **named: ran.append(named["variant"]) or scan(*args, **named))
    with ssd.patch_vllm(), ssd.patch_vllm("torch"):
        found = find_function(MIXER)(**given)
    assert ran == ["torch"]
    assert_close(found, scan(**given | {"out": torch.empty_like(given["out"])}, variant="torch"))
    assert str(signature(find_function(MIXER))).startswith(f"({ARGUMENTS[:20]}")


@pytest.mark.parametrize(("installed", "variant", "kind", "said"), [
    ({"version": "0.11.2"}, "auto", ImportError, "got version 0.11.2.*expected 0.12 to 0.33"),
    ({"version": "0.34.0"}, "auto", ImportError, "got version 0.34.0"),
    ({"version": "dev"}, "auto", ImportError, "got version dev"),
    ({"arguments": ARGUMENTS + ", unknown=None"}, "auto", RuntimeError, "unknown, expected x, dt"),
    ({}, "mamba_ssm", ValueError, "'mamba_ssm', expected one of 'baseline'"), ({}, "zebra", ValueError, "zebra"),
    ({}, "persistant", ValueError, "expected one of ((?!mamba_ssm).)*'auto'; did you mean 'persistent'"),
    ({}, ["fused"], ValueError, r"got \['fused'\], expected one of")],
    ids=str)
def test_refusals_change_nothing(install, installed, variant, kind, said):
    install(**installed)
    with pytest.raises(kind, match=said):
        ssd.patch_vllm(variant)
    assert find_function(MIXER) is find_function(OPS) and find_function(OPS) is not patch._scan
