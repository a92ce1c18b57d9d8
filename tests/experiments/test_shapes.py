import pytest
import torch

from experiments.inputs import make_inputs
from experiments.shapes import MODELS, NAMED, SHAPES, find_shapes
from ssd import ssd_chunk_scan


def test_find_shapes():
    assert find_shapes("named,8b-b1") == list(NAMED)
    assert [shape.name for shape in find_shapes("sweep-64,2.7b-b4")] == ["sweep-64", "2.7b-b4"]
    with pytest.raises(ValueError, match=r"shape: got '9b', expected named, workloads, sweep, models, or one of theirs: 8b-b1"):
        find_shapes("8b-b1,9b")


def test_sizes_of_ones_own():
    _, shape = find_shapes("8b-b1,2x4096x24x64x128x3")
    assert shape.name == "2x4096x24x64x128x3" and [*shape.sizes.values()] == [2, 4096, 24, 64, 128, 3] and not shape.gated
    for wrong in ("2x4096x24x64x128x5", "0x4096x24x64x128x1"):
        with pytest.raises(ValueError, match="batch x seqlen x nheads x headdim x dstate x ngroups"):
            find_shapes(wrong)
    with pytest.raises(ValueError, match="sizes of your own as BATCHxSEQLEN"):
        find_shapes("2x4096x24x64x128")


def test_models_have_a_short_and_a_long_call_each():
    assert len(MODELS) == 2 * 24 and find_shapes("models") == list(MODELS)
    assert list(SHAPES["falcon-h1-7b"].sizes.values()) == [2, 4096, 24, 128, 256, 1]
    assert list(SHAPES["nemotron-nano-9b-v2-32k"].sizes.values()) == [1, 32768, 128, 80, 128, 8]
    assert [shape.name for shape in MODELS if shape.gated] == ["gated", "gated-32k"]


def test_inputs_are_what_a_layer_starts_with():
    inputs = make_inputs(SHAPES["sweep-64"], torch.bfloat16, "cpu", requires_grad=True)
    assert inputs["x"].shape == (1, 64, 80, 64)
    assert inputs["B"].shape == inputs["C"].shape == (1, 64, 1, 128)
    assert all(inputs[name].dtype == torch.bfloat16 for name in ("x", "dt", "B", "C"))
    assert all(inputs[name].dtype == torch.float32 for name in ("A", "D", "dt_bias"))
    assert all(t.requires_grad and t.is_leaf for t in inputs.values() if isinstance(t, torch.Tensor))
    step = torch.nn.functional.softplus(inputs["dt_bias"])
    assert 0.001 <= step.min() < 0.003 and 0.05 < step.max() <= 0.1
    assert inputs["A"].min() >= -16 and inputs["A"].max() <= -1
    assert torch.equal(inputs["x"], make_inputs(SHAPES["sweep-64"], torch.bfloat16, "cpu")["x"])
    assert ssd_chunk_scan(**inputs, chunk_size=64, variant="torch").shape == inputs["x"].shape
