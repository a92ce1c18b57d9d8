"""Every function of the block refuses what it cannot take: by the argument's name, with what came and what is accepted."""

from dataclasses import replace
from pathlib import Path

import torch

from ssd.block.conv1d import causal_conv1d_fn
from ssd.block.conv1d_update import causal_conv1d_update
from ssd.block.gated_norm import rms_norm_gated
from ssd.block.mamba_inner import mamba_inner_fn
from ssd.block.selective_scan import selective_scan_fn
from ssd.block.split_conv1d_scan import split_conv1d_scan
from ssd.block.state_update import selective_state_update
from tests.block import (
    test_conv1d,
    test_conv1d_update,
    test_gated_norm,
    test_mamba_inner,
    test_selective_scan,
    test_state_update,
)
from tests.interop import test_split
from tests.refused import over_refusals

FUNCTIONS = {  # and arguments that are good on a device
    causal_conv1d_fn: lambda device: test_conv1d.inputs(replace(test_conv1d.EVERYTHING, seqlen=6), device),
    causal_conv1d_update: lambda device: test_conv1d_update.inputs(None, 0, False, False, device),
    rms_norm_gated: lambda device: dict(zip(test_gated_norm.NAMES, test_gated_norm.inputs(
        (2, 3), 24, "before", True, torch.float32, device), strict=True)),
    selective_state_update: lambda device: test_state_update.inputs(device=device),
    selective_scan_fn: lambda device: test_selective_scan.inputs(test_selective_scan.Case(), device),
    mamba_inner_fn: lambda device: test_mamba_inner.draw_arguments(),
    split_conv1d_scan: lambda device: test_split.draw_arguments(),
}
BY_NAME = {function.__name__: (function, inputs) for function, inputs in FUNCTIONS.items()}


@over_refusals(Path(__file__).with_name("refused.txt"))
def test_bad_arguments_are_refused_by_name(refusal, device):
    """And nothing is changed."""
    call, inputs = BY_NAME[refusal.function]
    given = inputs(device)
    moved = {name: t.to(given["A"].device if "A" in given else device) if isinstance(t, torch.Tensor) and not t.is_meta else t
             for name, t in refusal.changed.items()}
    before = {name: t.clone() for name, t in given.items() if isinstance(t, torch.Tensor)}
    refusal._replace(changed=moved).check(call, given)
    assert all(torch.equal(given[name], t) for name, t in before.items())
