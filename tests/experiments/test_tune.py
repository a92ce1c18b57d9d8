"""The tuner's calls, in the interpreter: none of the kernels that it looks for may be missing from the profile."""

import torch

from experiments import tune
from ssd.registry import config_spaces
from ssd.runtime import tuning
from tests.inputs import Case, Shape, random_inputs


class Asked(dict):
    """Stands for forced configs, though it has none, and notes which kernels ask for one."""

    def __init__(self):
        self.kernels = set()

    def __bool__(self):
        return True

    def __contains__(self, kernel):
        self.kernels.add(kernel)
        return False


def test_every_kernel_is_launched(device, monkeypatch):
    asked = Asked()
    monkeypatch.setattr(tuning, "_forced", asked)
    inputs = random_inputs(Shape(seqlen=40, chunk_size=16), Case(z=True, D="h"), torch.float32, device)
    tune.launch_all(inputs, torch.randn_like(inputs.x))
    assert asked.kernels >= set(config_spaces())
