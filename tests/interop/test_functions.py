"""The functions that patches put in place, called as their new owners call them."""

import inspect
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ssd import Options, ssd_chunk_scan
from ssd.interop.functions import functions
from tests.inputs import EVERYTHING, Case, Shape, arguments, random_inputs

UPSTREAM = dict(re.findall(r"(\w+)(\(.*\))\n", Path(__file__).with_name("signatures.txt").read_text()))
OURS = functions(lambda: {"variant": "auto"})


def plain_signature(function) -> str:
    """Without annotations."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))


@pytest.mark.parametrize("name", UPSTREAM)
def test_signatures(name):
    assert plain_signature(OURS[name]) == UPSTREAM[name] and OURS[name].__name__ == name
    assert OURS.keys() == UPSTREAM.keys()


def test_signatures_of_the_installed_mamba_ssm(monkeypatch):
    """Its releases up to 2.3.2 end before state_dtype, which its main branch has, and earlier ones sooner."""
    if find_spec("mamba_ssm") is None:
        pytest.skip("mamba_ssm is not installed")
    from ssd.interop.mamba_ssm import skip_its_init

    monkeypatch.setitem(sys.modules, "selective_scan_cuda", ModuleType("selective_scan_cuda"))
    with skip_its_init():
        found = {**vars(import_module("mamba_ssm.ops.triton.ssd_combined")),
                 **vars(import_module("mamba_ssm.ops.triton.selective_state_update")),
                 **vars(import_module("mamba_ssm.ops.selective_scan_interface"))}
    for name in UPSTREAM.keys() - {"causal_conv1d_fn", "causal_conv1d_update"}:
        assert UPSTREAM[name].startswith(plain_signature(found[name]).removesuffix(")"))


def test_cu_seqlens_give_no_document_a_state():
    """As upstream: the states given reach the first, and the one after the last token is returned."""
    inputs = random_inputs(Shape(), Case(initial_states=True, documents="varlen"))
    given = arguments(inputs) | {"seq_idx": None, "return_final_states": True}
    expected = ssd_chunk_scan(**given | {"seq_idx": inputs.seq_idx})
    torch.testing.assert_close(OURS["mamba_chunk_scan_combined"](**given), expected)


@pytest.mark.parametrize("chunk_size", [1, 8, 24, 48, 512])
def test_any_chunk_size(chunk_size):
    inputs = random_inputs(Shape(), EVERYTHING)
    got = OURS["mamba_chunk_scan_combined"](**arguments(inputs) | {"chunk_size": chunk_size})
    torch.testing.assert_close(got, ssd_chunk_scan(**arguments(inputs)), rtol=1e-4, atol=1e-5)


def test_odd_strides_and_limits_as_a_list():
    """x as a convolution along the last axis leaves it, and dt_limit as JSON does."""
    inputs = random_inputs(Shape(batch=2, seqlen=19, nheads=8, headdim=8, dstate=8), Case(dt_softplus=True, dt_bias=True))
    x = torch.empty_strided(inputs.x.shape, (2432, 1, 152, 19)).copy_(inputs.x)
    got = OURS["mamba_chunk_scan_combined"](**arguments(inputs) | {"x": x, "dt_limit": [0.01, 0.05]})
    assert torch.equal(got, ssd_chunk_scan(**arguments(inputs) | {"dt_limit": (0.01, 0.05)}))


def test_settings_reach_the_scan(monkeypatch):
    settings, seen = {"variant": "torch", "options": Options(keep_bytes=100)}, []
    for name in ("ssd_chunk_scan", "split_conv1d_scan"):
        monkeypatch.setattr(f"ssd.interop.functions.{name}",
                            lambda *args, **given: seen.append({n: given[n] for n in settings}))
    ours = functions(lambda: settings)
    ours["mamba_chunk_scan_combined"](*[None] * 5, chunk_size=64)
    ours["mamba_split_conv1d_scan_combined"](*[None] * 6, chunk_size=64)
    assert seen == [settings] * 2
