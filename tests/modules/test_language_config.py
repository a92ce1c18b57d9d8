"""The fields of a config.json: what is taken over, and what is refused by name."""

import dataclasses
from inspect import signature
from pathlib import Path

from ssd.modules import Mamba2, Mamba2LMConfig
from tests.refused import over_refusals

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
    own = {"d_model", "layer_idx", "device", "dtype", "variant", "options", "context_group"}
    assert signature(Mamba2).parameters.keys() - own == ARGUMENTS.keys()


@over_refusals(Path(__file__).with_name("refused.txt"), "Mamba2LMConfig")
def test_what_is_refused(refusal):
    refusal.check(lambda **given: Mamba2LMConfig.from_dict(given), PUBLISHED)
