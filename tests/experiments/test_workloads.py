"""The language models: sizes as published, patterns, documents that see nothing of each other, what decays."""

from fractions import Fraction
from itertools import product

import pytest
import torch

from experiments.parallel import make_single
from experiments.shards import AdamW, clip_gradient
from experiments.training_step import compile_layers, find_decaying
from experiments.workloads import get_workload, language_model, workload_names
from experiments.workloads.hybrid import allocate
from experiments.workloads.language_model import LanguageModel
from experiments.workloads.layers import Attention
from ssd.modules import Mamba2LM, Mamba2LMConfig
from tests.experiments.small import graph_sizes, sizes, vision_sizes
from tests.experiments.test_graphmamba import KINDS, batch_of
from tests.experiments.test_mambavision import pixels

MILLIONS = {
    "mamba2": {"tiny": 1, "130m": 129, "370m": 368, "780m": 780, "1.3b": 1344, "2.7b": 2703, "8b-width": 1289, "8b": 8237},
    "hybrid": {"tiny": 2, "1b": 1055, "2b": 2051, "8b": 8655},
    "mambavision": {"tiny": 1, "T": 32, "T2": 35, "S": 50, "B": 98, "L": 228},
    "graphmamba": {"tiny": 0.036, "tiny-walks": 0.056, "peptides-func": 0.495, "peptides-func-walks": 0.699, "mnist": 0.117,
                   "voc-sp": 0.497, "malnet-tiny": 0.281}}


@pytest.mark.parametrize("workload, preset", [(w, p) for w in workload_names() for p in get_workload(w).presets])
def test_parameter_counts(workload, preset):
    found = get_workload(workload)
    with torch.device("meta"):
        model = found.build(found.presets[preset].sizes, "auto", False)
    expected = MILLIONS[workload][preset]
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 3 if expected < 1 else 0) == expected


@pytest.mark.parametrize("pattern", [
    "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-",
    "M-M-M--M-*M-M-M-M-*M--M-M-M-",
    "M-M-M--*M-M-M-"])
def test_allocation_of_published_patterns(pattern):
    assert allocate(len(pattern)) == pattern


def test_allocation_keeps_the_shares():
    shares = ((0, 0), (1, 0), (0, 1), (Fraction(1, 14), Fraction(1, 2)), (Fraction(1, 4), Fraction(1, 3)))
    for layers, (attention, mlp) in product(range(1, 90), shares):
        pattern = allocate(layers, attention, mlp)
        expected = (round(layers * attention), round(layers * mlp))
        assert (len(pattern), pattern.count("*"), pattern.count("-")) == (layers, *expected)


def test_allocation_refuses_more_than_all():
    with pytest.raises(ValueError, match="shares of 3/4 attention and 1/2 MLP"):
        allocate(8, Fraction(3, 4), Fraction(1, 2))


def test_unknown_layers_are_refused():
    with pytest.raises(ValueError, match="pattern: got 'X'"):
        sizes("M-XM")


@pytest.mark.parametrize("pattern", ["MM", "M-*M"])
def test_documents_see_nothing_of_each_other(small, pattern):
    torch.manual_seed(0)
    model = LanguageModel(sizes(pattern), "torch").double()
    ids, seq_idx = torch.randint(256, (1, 50)), (torch.arange(50) >= 20).int()[None]
    packed = model(ids, seq_idx)
    for part in (slice(0, 20), slice(20, 50)):
        torch.testing.assert_close(packed[:, part], model(ids[:, part]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pattern", ["MM", "*-*", "M-*M"])
def test_a_token_sees_nothing_of_later_ones(small, pattern):
    model = LanguageModel(sizes(pattern), "torch").double()
    ids = torch.randint(256, (1, 40))
    changed = torch.cat([ids[:, :25], (ids[:, 25:] + 1) % 256], 1)
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=1e-9, atol=1e-9)
    assert (before[:, 25:] != after[:, 25:]).any(-1).all()


def test_mamba2_is_the_language_model_of_ssd(small):
    """By weights of the same names and numbers, but for `backbone`."""
    model = LanguageModel(sizes("MM", tie_embeddings=True), "torch")
    mixer = {"layer": "Mamba2", "d_state": 16, "headdim": 16, "ngroups": 2, "chunk_size": 16}
    theirs = Mamba2LM(Mamba2LMConfig(32, 2, 256, mixer), variant="torch")
    theirs.load_state_dict({name if name.startswith("lm_head") else f"backbone.{name}": t
                            for name, t in model.state_dict().items()})
    ids = torch.randint(256, (2, 40))
    torch.testing.assert_close(model(ids), theirs(ids))


@pytest.mark.parametrize("workload, sizes", [
    ("hybrid", sizes("M-*M")), *(("mambavision", vision_sizes(mixer=mixer, drop_path=0.5)) for mixer in ("mamba1", "ssd")),
    *(("graphmamba", graph_sizes(mixer=mixer, tokens=tokens)) for mixer, tokens in KINDS)])
def test_computing_again_changes_nothing(workload, sizes, small):
    known, results = get_workload(workload), []
    batch = {"hybrid": {"input_ids": torch.randint(256, (2, 40)), "labels": torch.randint(256, (2, 40)),
                        "seq_idx": (torch.arange(40) >= 20).int().expand(2, 40)},
             "mambavision": {"image": pixels(), "label": torch.arange(4)}, "graphmamba": batch_of()}[workload]
    for again in (False, True):
        torch.manual_seed(0)
        model = known.build(sizes, "torch", again)
        known.loss(model, batch).backward()
        results.append([*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()])
        assert all(norm.momentum == 0.1 for norm in model.modules() if isinstance(norm, torch.nn.BatchNorm1d))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_few_queries_attend_at_a_time(monkeypatch):
    """As all at once."""
    documents, results = torch.tensor([[0] * 7 + [1] * 3 + [2] * 13, [0] * 23]), []
    for queries in (23, 5):
        monkeypatch.setattr("experiments.workloads.layers._QUERIES", queries)
        torch.manual_seed(0)
        attention, u = Attention(8, heads=4, kv_heads=2, headdim=4).double(), torch.randn(2, 23, 8).double()
        y = attention(u.requires_grad_(), documents)
        y.pow(2).sum().backward()
        results.append([y, u.grad, *(p.grad for p in attention.parameters())])
    torch.testing.assert_close(*results)


def test_few_logits_are_held_where_they_are_computed_again(monkeypatch, small):
    monkeypatch.setattr(language_model, "_LOGIT_TOKENS", 30)
    batch, results = {name: torch.randint(256, (2, 40)) for name in ("input_ids", "labels")}, []
    for again in (False, True):
        torch.manual_seed(0)
        model, held = LanguageModel(sizes("M"), "torch", again), []
        model.lm_head.register_forward_hook(lambda *given, held=held: held.append(len(given[-1])))
        loss = language_model.next_token_loss(model, batch)
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert held == [30, 30, 20, 20, 30, 30]  # forwards, then backwards
    torch.testing.assert_close(*results)


def test_gradients_of_pieces_are_added_up_in_fp32(monkeypatch, small):
    """Under autocast, whose cache would add them up in bf16."""
    batch, found = {name: torch.randint(256, (2, 40)) for name in ("input_ids", "labels")}, []
    for tokens in (80, 1):
        monkeypatch.setattr(language_model, "_LOGIT_TOKENS", tokens)
        torch.manual_seed(0)
        model = LanguageModel(sizes("M"), "torch", checkpoint_activations=True)
        with torch.autocast("cpu", torch.bfloat16):
            language_model.next_token_loss(model, batch).backward()
        found.append(model.lm_head.weight.grad)
    assert (found[1] - found[0]).norm() < 4e-3 * found[0].norm()


def test_what_decays():
    model = LanguageModel(sizes("M-*M"))
    names = {name for name, _ in model.named_parameters()}
    kept = {name.removeprefix("layers.0.") for name in names - find_decaying(model)}
    mixer = {f"mixer.{name}" for name in ("A_log", "D", "dt_bias", "conv1d.bias", "norm.weight")}
    assert {name for name in kept if not name.startswith("layers")} == {"norm.weight", "norm_f.weight", *mixer}
    assert {"embedding.weight", "lm_head.weight", "layers.0.mixer.in_proj.weight"} <= find_decaying(model) < names


def test_the_variant_reaches_every_mixer():
    model = LanguageModel(sizes("M-*M"), "persistent")
    assert [layer.mixer.variant for layer in model.layers if hasattr(layer.mixer, "variant")] == ["persistent"] * 2


@pytest.mark.parametrize(("workload", "sizes", "layers"), [("mamba2", sizes("M*-M"), 5), ("mambavision", vision_sizes(), 7),
                                                           ("graphmamba", graph_sizes(), 2)])
def test_each_layer_is_compiled_by_itself(workload, sizes, layers, monkeypatch):
    """And a language model's loss, and what comes before the windows of a vision model."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **settings: compiled.append((self, settings)))
    compile_layers(get_workload(workload).build(sizes, "torch", False))
    assert len(compiled) == len({layer for layer, _ in compiled}) == layers
    assert all(settings == {"dynamic": False} for _, settings in compiled)


def test_the_optimizers_kernel_clips_as_torch_does():
    """It divides by a factor where torch's clipping multiplies; some gradients are clipped and some are not."""
    found = []
    for fused in (None, True):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(30, 7)) for _ in range(3)]
        optimizer, norms = AdamW(parameters, 1e-2, fused=fused), []
        for size in (3.0, 1e-3, 1.0, 2e-3):
            for p in parameters:
                p.grad = size * torch.randn_like(p)
            norms.append(clip_gradient(parameters, 1.0, make_single(), optimizer))
            optimizer.step()
        found.append([*norms, *(p.grad for p in parameters), *parameters])
    torch.testing.assert_close(*found)
    assert found[0][0] > 1 > found[0][1]
