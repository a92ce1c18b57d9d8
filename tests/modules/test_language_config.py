"""The fields of a config.json: what is taken over, and what is refused by name."""

import dataclasses
from inspect import signature

import pytest

from ssd.modules import Mamba2, Mamba2LMConfig

# as published for 130 million parameters
PUBLISHED = {
    "d_model": 768, "d_intermediate": 0, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
    "pad_vocab_size_multiple": 16, "tie_embeddings": True,
}
# arguments of mamba_ssm 2.3's Mamba2 that a config may give, with another value than the default
ARGUMENTS = {
    "d_state": 64, "d_conv": 3, "conv_init": 0.1, "expand": 1, "headdim": 32, "d_ssm": 64, "ngroups": 2, "A_init_range": [1, 2],
    "D_has_hdim": True, "rmsnorm": False, "norm_before_gate": True, "dt_min": 0.01, "dt_max": 0.2, "dt_init_floor": 1e-3,
    "dt_limit": [0.0, 1.0], "bias": True, "conv_bias": False, "chunk_size": 128,
}
WITHOUT_EFFECT = {"use_mem_eff_path": False, "sequence_parallel": False, "process_group": None}


def test_published():
    config = Mamba2LMConfig.from_dict(PUBLISHED)
    assert dataclasses.asdict(config) == PUBLISHED
    assert config.padded_vocab_size == 50288 and config.mixer_settings == {}


def test_every_argument_of_upstreams_block():
    config = Mamba2LMConfig(64, 1, 100, ssm_cfg={"layer": "Mamba2", **ARGUMENTS, **WITHOUT_EFFECT})
    assert config.mixer_settings == ARGUMENTS
    block = Mamba2(64, **config.mixer_settings)
    assert block.dt_limit == (0.0, 1.0) and block.D.shape == (64,) and block.conv1d.weight.shape == (64 + 4 * 64, 1, 3)
    ours = signature(Mamba2).parameters.keys() - {"d_model", "layer_idx", "device", "dtype", "variant", "options"}
    assert ours == ARGUMENTS.keys()


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"hidden_size": 8, "x": 1}, ValueError, "config: got hidden_size, x, expected some of d_model, n_layer, "),
    ({"d_model": 0}, ValueError, "d_model: got 0, expected an int of at least 1"),
    ({"n_layer": "24"}, TypeError, "n_layer: got '24', expected an int"),
    ({"vocab_size": True}, TypeError, "vocab_size: got True, expected an int"),
    ({"rms_norm": 1}, TypeError, "rms_norm: got 1, expected a bool"),
    ({"ssm_cfg": None}, TypeError, "ssm_cfg: got None, expected a dict"),
    ({"d_intermediate": 2048}, ValueError, "d_intermediate: got 2048, expected 0"),
    ({"attn_layer_idx": [3, 9]}, ValueError, r"attn_layer_idx: got \[3, 9\], expected none"),
    ({"ssm_cfg": {}}, ValueError, r"ssm_cfg\['layer'\]: got 'Mamba1', expected 'Mamba2'"),
    ({"ssm_cfg": {"layer": "Mamba3"}}, ValueError, r"ssm_cfg\['layer'\]: got 'Mamba3', expected 'Mamba2'"),
    ({"ssm_cfg": {"layer": "Mamba2", "dt_rank": 8, "layer_idx": 1}}, ValueError,
     "ssm_cfg: got dt_rank, layer_idx, expected some of A_init_range, D_has_hdim, "),
    ({"ssm_cfg": {"layer": "Mamba2", "process_group": 0}}, ValueError, r"ssm_cfg\['process_group'\]: got 0, expected None"),
])
def test_what_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        Mamba2LMConfig.from_dict(PUBLISHED | change)
