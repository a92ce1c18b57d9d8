"""The bench of patched models: small ones on each side, and its table."""

import pytest
import torch

from experiments import patches
from experiments.shapes import PATCHED_MODELS, SHAPES, Shape
from experiments.terminal import make_console
from ssd.interop.functions import functions
from ssd.interop.transformers import choose_functions

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("name", PATCHED_MODELS)
def test_sides_run_the_same_model(name):
    """And each what it was given: the second counts its calls."""
    shape, called = Shape("small", 2, 24, nheads=4, headdim=8, dstate=16, ngroups=1), []
    more = {"mamba_d_ssm": 32} if name == "falcon-h1-7b" else {}
    torch.manual_seed(0)
    model = patches.make_model(name, shape, torch.float32, **SMALL | more)
    u, ours = patches.make_input(model, shape), choose_functions(functions(lambda: {"variant": "torch"}))
    counting = {of: lambda *args, function=function, **given: called.append(1) or function(*args, **given)
                for of, function in ours.items()}
    (grads, *_), (found, *_) = (patches.make_call(model, side, size, "fwd_bwd", u)()
                                for side, size in ((ours, 16), (counting, 8)))
    assert len(called) == patches.LAYERS
    torch.testing.assert_close(found, grads)
    assert patches.make_call(model, ours, 16, "fwd", u)().shape == (2, 24, 32)


@pytest.mark.parametrize("name", PATCHED_MODELS)
def test_sizes_are_those_of_the_layer(name, monkeypatch):
    monkeypatch.setattr(patches, "choose_device", lambda: "meta")
    with torch.device("meta"):
        model = patches.make_model(name, SHAPES[name], torch.bfloat16)
    mixers = [module for module in model.modules() if hasattr(module, "chunk_size")]
    sizes = {(mixer.num_heads, mixer.head_dim, mixer.ssm_state_size, mixer.n_groups) for mixer in mixers}
    shape = SHAPES[name]
    assert sizes == {(shape.nheads, shape.headdim, shape.dstate, shape.ngroups)} and len(mixers) == patches.LAYERS
    assert patches.make_input(model, shape).shape[:2] == (2, 4096)


def test_a_rival_that_is_not_there_is_left_out(capsys):
    sides = patches.list_sides(["auto"], make_console())
    assert "auto" in sides and (patches.RIVAL in sides or "mamba_ssm is left out" in capsys.readouterr().out)


def test_table():
    def row(variant, p50_us, chunk_size=128, **more):
        return {"gpu": "NVIDIA H100", "shape": "falcon-h1-7b", "mode": "fwd_bwd", "variant": variant, "p50_us": p50_us,
                "graph_p50_us": None, "chunk_size": chunk_size, **more}

    said = patches.tabulate([row("mamba_ssm", 900.0), row("mamba_ssm", 800.0, 256), row("auto", 1000.0, speedup=0.8)])
    assert "| falcon-h1-7b | H100 | forward and backward | `auto` | 1000 |  | 0.80 |  |" in said
    assert "| `mamba_ssm` | 800 |  |  |  |" in said and "900" not in said
    assert "No rows yet" in patches.tabulate([])


@pytest.mark.gpu
def test_run(tmp_path, monkeypatch):
    small = Shape("small", 2, 256, nheads=4, headdim=64, dstate=64, ngroups=1)
    monkeypatch.setitem(patches.SHAPES, "nemotron-nano-9b-v2", small)
    rows = patches.run(["nemotron-nano-9b-v2"], ["auto"], ["fwd_bwd"], "bf16", tmp_path, make_console(), 2, 1)
    assert {row["variant"] for row in rows} >= {"auto"} and all(row["p50_us"] > 0 for row in rows)
