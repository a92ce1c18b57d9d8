"""MambaVision: sizes as published, windows that are whole and apart, both mixers and what ties them, what is dropped."""

import math

import pytest
import torch

from experiments.training_step import find_decaying
from experiments.workloads.mambavision import class_loss
from experiments.workloads.vision_mixers import Mamba1
from experiments.workloads.vision_model import DropPath, VisionModel, join_windows, split_windows
from ssd import ssd_chunk_scan
from tests.experiments.small import vision_sizes

MIXERS = ("mamba1", "ssd")


def model_of(mixer="mamba1", **other) -> VisionModel:
    torch.manual_seed(0)
    return VisionModel(vision_sizes(mixer=mixer, **other), "torch")


def pixels(batch=4, size=32) -> torch.Tensor:
    return torch.randint(256, (batch, 3, size, size), dtype=torch.uint8)


def test_windows_are_exact():
    x = torch.arange(2 * 5 * 6 * 4).view(2, 5, 6, 4)
    windows = split_windows(x, 2)
    assert windows.shape == (2 * 6, 4, 5)
    assert torch.equal(windows[6 + 3], x[1, :, 2:4, 2:4].flatten(1).T), "the fourth of the second image, two in a row"
    assert torch.equal(join_windows(windows, 2, 6, 4), x)
    assert torch.equal(split_windows(x[:, :, :4], 4), x[:, :, :4].flatten(2).transpose(1, 2)), "one window is the image"


@pytest.mark.parametrize("mixer", MIXERS)
def test_windows_see_nothing_of_each_other(mixer):
    stage = model_of(mixer, image_size=64).eval().double().stages[-3]
    x = torch.randn(1, 32, 4, 4, dtype=torch.float64)
    changed = x.clone()
    changed[..., 0, 3] = torch.randn(32)
    differ = (stage(x) != stage(changed)).any(1)[0]
    assert differ[:2, 2:].all() and differ.sum() == 4


def test_mamba1_is_ssd_with_a_head_for_each_channel_and_state():
    """Exactly: heads of one channel and one state, of which group n has those of state n, summed over n."""
    channels, states, seqlen = 6, 4, 20
    mixer = Mamba1(channels, 3, "torch", states).double()
    x = torch.randn(2, seqlen, channels, dtype=torch.float64, requires_grad=True)
    y = mixer(x)

    dt, B, C = mixer.x_proj(x).split(mixer.parts, -1)
    every = [t.repeat(1, 1, states) for t in (x, mixer.dt_proj(dt))]  # [batch, seqlen, states * channels]
    rates = -mixer.A_log.float().exp().T.flatten()
    of_ssd = ssd_chunk_scan(every[0].unsqueeze(-1), every[1], rates, B.unsqueeze(-1), C.unsqueeze(-1), 16, dt_softplus=True,
                            variant="torch")
    expected = of_ssd.view(2, seqlen, states, channels).sum(2) + mixer.D * x
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(t.square().sum(), (x, *mixer.parameters()), retain_graph=True) for t in (y, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mixer, kept", [("mamba1", {"A_log", "D", "dt_proj.bias"}), ("ssd", {"A_log", "D", "dt_bias"})])
def test_what_decays(mixer, kept):
    model = model_of(mixer, layer_scale=1e-5)
    names, decay = {name for name, _ in model.named_parameters()}, find_decaying(model)
    place = "stages.4.blocks.0.0.branch.ssm."
    assert {name.removeprefix(place) for name in names - decay if name.startswith(place)} == kept
    assert all(name.endswith((".weight", "_proj.weight")) for name in decay)
    assert all(model.get_parameter(name).dim() > 1 for name in decay)


def test_dropped_paths():
    x = torch.full((4000, 2, 3), 2.0, dtype=torch.float64)
    drop = DropPath(0.2)
    y = drop(x)
    assert set(y.unique().tolist()) == {0.0, 2.5} and (y == y[:, :1, :1]).all(), "by row, whole"
    assert y.mean().item() == pytest.approx(2, abs=4 * 0.8 / math.sqrt(4000) * 2.5), "within four deviations"
    assert drop.eval()(x) is x
    model = model_of(depths=(1, 2, 3, 2), drop_path=0.35)
    blocks = [module.rate for module in model.modules() if isinstance(module, DropPath)]
    # one to a block of convolutions, two to the others
    assert blocks == pytest.approx([0.05 * n for n in (0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)])


def test_the_loss_is_of_smoothed_labels():
    model = model_of(drop_path=0.0)
    batch = {"image": pixels(), "label": torch.tensor([3, 1, 4, 1])}
    log_p = model(model.normalise(batch["image"])).log_softmax(-1)
    expected = -(0.9 * log_p[range(4), batch["label"]] + 0.1 * log_p.mean(-1)).mean()
    torch.testing.assert_close(class_loss(model, batch), expected)
