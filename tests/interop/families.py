"""Tiny random models of the six families of transformers that have Mamba-2 layers, and one training step of them."""

import torch
import transformers
from torch import Tensor, nn

from ssd.interop.transformers import FAMILIES

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
VOCAB = 64
_GROUPED_NORM = (5, 23)  # before, mamba2, bamba and granitemoehybrid norm by groups in the fused function alone
_ATTENTION = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}


def _config(family: str, groups: int) -> tuple[str, dict]:
    """The family's name in class names, and sizes of its own names."""
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": groups, "mamba_chunk_size": 8}
    alike = 1 if VERSION < _GROUPED_NORM else groups
    return {
        "mamba2": ("Mamba2", {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": alike,
                              "num_hidden_layers": 2, "chunk_size": 8}),
        "bamba": ("Bamba", {**_ATTENTION, **mamba, "mamba_n_groups": alike, "num_hidden_layers": 2, "attn_layer_indices": [1]}),
        "falcon_h1": ("FalconH1", {**_ATTENTION, **mamba, "mamba_d_ssm": 64, "num_hidden_layers": 2}),
        "granitemoehybrid": ("GraniteMoeHybrid", {
            **_ATTENTION, **mamba, "mamba_n_groups": alike, "mamba_expand": 2, "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
            "shared_intermediate_size": 16}),
        "nemotron_h": ("NemotronH", {
            **_ATTENTION, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": groups,
            "chunk_size": 8, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mamba"]}),
        "zamba2": ("Zamba2", {
            **_ATTENTION, "mamba_expand": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_d_state": 16,
            "mamba_ngroups": groups, "chunk_size": 8, "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1, "adapter_rank": 4, "use_mem_rope": True}),
    }[family]


def available(family: str) -> bool:
    return hasattr(transformers, f"{_config(family, 1)[0]}Config")


def tiny(family: str, **changes) -> nn.Module:
    """A causal language model with weights large enough for every gradient to count."""
    name, sizes = _config(family, groups=2)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=None, **{**sizes, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    torch.manual_seed(FAMILIES.index(family))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(sum(shape)))


def step(model: nn.Module, ids: Tensor, train: bool, **more) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits and the gradients of one step."""
    model.train(train).zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False, **more)
    out.loss.backward()
    return out.loss.detach(), out.logits.detach(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
