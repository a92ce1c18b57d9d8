"""Models of 130m generate the same 256 tokens with and without the patches, or a CUDA graph, in fp32, greedily, on a GPU."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

import ssd
from ssd.modules import Mamba2LM, Mamba2LMConfig
from tests.interop.installed import require_mamba_ssm

pytestmark = pytest.mark.gpu
NEW, PROMPT, VOCAB = 256, 300, 50288


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Weights so large that the next token depends on all before it, and one of them stands out."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def run_generate(how: AbstractContextManager, model: torch.nn.Module, ids: torch.Tensor, **settings) -> torch.Tensor:
    with how:
        return model.generate(ids, **settings)


def prompt() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, PROMPT), device="cuda")


def assert_same(got: torch.Tensor, expected: torch.Tensor):
    assert got.shape == expected.shape == (1, PROMPT + NEW)
    assert len(expected[:, PROMPT:].unique()) > NEW // 8  # a loop of a few tokens would show little
    assert torch.equal(got, expected)


@pytest.mark.parametrize("variant", ["fused", "persistent", "auto"])
def test_transformers(variant):
    transformers = pytest.importorskip("transformers", minversion="5.15", reason="transformers 5.15 is not installed")
    config = transformers.Mamba2Config(
        hidden_size=768, num_heads=24, n_groups=1, num_hidden_layers=24, vocab_size=VOCAB, eos_token_id=None, pad_token_id=0,
        tie_word_embeddings=True)
    model, ids = spread(transformers.Mamba2ForCausalLM(config)).eval().cuda(), prompt()
    settings = {"max_new_tokens": NEW, "do_sample": False}
    expected, got = (run_generate(how, model, ids, **settings) for how in (nullcontext(), ssd.patch_transformers(variant)))
    assert_same(got, expected)


def test_mamba_ssm():
    """Without the patch its SSD and its one-token updates are its own, its convolution torch's if no other is installed."""
    require_mamba_ssm()
    with ssd.patch_mamba_ssm():  # its modules need not have been built with CUDA
        from mamba_ssm import MambaLMHeadModel
        from mamba_ssm.models.config_mamba import MambaConfig
    config = MambaConfig(d_model=768, n_layer=24, vocab_size=VOCAB, ssm_cfg={"layer": "Mamba2"})
    model, ids = spread(MambaLMHeadModel(config, device="cuda")), prompt()
    expected, got = (run_generate(how, model, ids, max_length=PROMPT + NEW) for how in (nullcontext(), ssd.patch_mamba_ssm()))
    assert_same(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_own_with_and_without_a_graph(dtype):
    model, ids = spread(Mamba2LM(Mamba2LMConfig(d_model=768, n_layer=24, vocab_size=VOCAB), "cuda")).to(dtype), prompt()
    assert_same(*(model.generate(ids, NEW, graph=graph) for graph in (True, False)))
