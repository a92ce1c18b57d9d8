"""The functions that patches put in place, called as their new owners call them."""

import inspect
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from ssd import ssd_chunk_scan
from ssd.interop.functions import functions
from tests.inputs import EVERYTHING, Case, Shape, arguments, random_inputs

UPSTREAM = {
    "mamba_chunk_scan_combined":
        "(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None, "
        "dt_softplus=False, dt_limit=(0.0, inf), return_final_states=False, return_varlen_states=False, state_dtype=None)",
    "mamba_split_conv1d_scan_combined":
        "(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None, "
        "dt_limit=(0.0, inf), return_final_states=False, activation='silu', rmsnorm_weight=None, rmsnorm_eps=1e-06, "
        "outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True, state_dtype=None)",
    "causal_conv1d_fn":
        "(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, "
        "activation=None)",
    "causal_conv1d_update":
        "(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None)",
    "selective_state_update":
        "(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None)",
    "selective_scan_fn":
        "(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False)",
    "mamba_inner_fn":
        "(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, C=None, "
        "D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1, "
        "b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-06)",
}
OURS = functions(lambda: "auto")


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
    from ssd.interop.mamba_ssm import without_its_init

    monkeypatch.setitem(sys.modules, "selective_scan_cuda", ModuleType("selective_scan_cuda"))
    with without_its_init():
        found = {**vars(import_module("mamba_ssm.ops.triton.ssd_combined")),
                 **vars(import_module("mamba_ssm.ops.triton.selective_state_update")),
                 **vars(import_module("mamba_ssm.ops.selective_scan_interface"))}
    for name in UPSTREAM.keys() - {"causal_conv1d_fn", "causal_conv1d_update"}:
        assert UPSTREAM[name].startswith(plain_signature(found[name]).removesuffix(")"))


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
