"""Every function of the block refuses what it cannot take: by the argument's name, with what came and what is accepted."""

from dataclasses import replace

import pytest
import torch

from ssd.block import gated_norm, selective_scan, state_update
from ssd.block.conv1d import causal_conv1d_fn
from ssd.block.conv1d_update import causal_conv1d_update
from ssd.block.mamba_inner import mamba_inner_fn
from ssd.block.split_conv1d_scan import split_conv1d_scan
from tests.block import (
    test_conv1d,
    test_conv1d_update,
    test_gated_norm,
    test_mamba_inner,
    test_selective_scan,
    test_state_update,
)
from tests.interop import test_split
from tests.refused import assert_refused, name_of

# function: arguments that are good on a device, and of each wrong one its name, the value (or all that differs), the kind of
# error, what is said to have come and what to be accepted
FUNCTIONS = {
    causal_conv1d_fn: (lambda device: test_conv1d.inputs(replace(test_conv1d.EVERYTHING, seqlen=6), device), [
        ("x", [1.0], TypeError, "list", "a tensor (batch, dim, seqlen)"),
        ("x", torch.zeros(20, 6), ValueError, "(20, 6)", "(batch, dim, seqlen)"),
        ("x", torch.zeros(2, 20, 0), ValueError, "(2, 20, 0)", "no size 0"),
        ("x", torch.zeros(2, 20, 6, dtype=torch.int32), TypeError, "torch.int32", "torch.float32"),
        ("weight", torch.zeros(20, 5), ValueError, "a width of 5", "2, 3 or 4"),
        ("weight", torch.zeros(20, 1, 4), ValueError, "(20, 1, 4)", "(20, 4)"),
        ("weight", torch.zeros(21, 4), ValueError, "(21, 4)", "(20, 4)"),
        ("bias", 1.0, TypeError, "float", "(20,)"),
        ("bias", torch.zeros(20, device="meta"), ValueError, "meta", "the device of x"),
        ("seq_idx", torch.zeros(2, 7, dtype=torch.int32), ValueError, "(2, 7)", "(2, 6)"),
        ("seq_idx", torch.zeros(2, 6), TypeError, "torch.float32", "torch.int32, torch.int64"),
        ("initial_states", torch.zeros(2, 20, 4), ValueError, "(2, 20, 4)", "(2, 20, 3)"),
        ("return_final_states", 1, TypeError, "1", "True or False"),
        ("return_final_states", True, ValueError, "True with seq_idx", "False"),
        ("final_states_out", {"final_states_out": torch.zeros(2, 3, 20), "return_final_states": True, "seq_idx": None},
         ValueError, "(2, 3, 20)", "(2, 20, 3)"),
        ("activation", "gelu", ValueError, "'gelu'", "'silu'"),
    ]),
    causal_conv1d_update: (lambda device: test_conv1d_update.inputs(None, 0, False, False, device), [
        ("x", torch.zeros(20), ValueError, "(20,)", "(batch, dim, seqlen)"),
        ("conv_state", torch.zeros(3, 20, 2), ValueError, "(3, 20, 2)", "(3, 20, 3)"),
        ("conv_state", torch.zeros(5, 20, 3), ValueError, "(5, 20, 3)", "(3, 20, 3)"),
        ("conv_state", None, TypeError, "NoneType", "(3, 20, 3)"),
        ("weight", torch.zeros(20, 1), ValueError, "a width of 1", "2, 3 or 4"),
        ("activation", "relu", ValueError, "'relu'", "'silu'"),
        ("cache_seqlens", torch.zeros(3), TypeError, "torch.float32", "torch.int32"),
        ("cache_seqlens", torch.zeros(2, dtype=torch.int32), ValueError, "(2,)", "(3,)"),
        ("conv_state_indices", [0, 1, 2], TypeError, "list", "a tensor"),
    ]),
    gated_norm.rms_norm_gated: (lambda device: dict(zip(test_gated_norm.NAMES, test_gated_norm.inputs(
        (2, 3), 24, "before", True, torch.float32, device), strict=True)), [
        ("x", [1.0], TypeError, "list", "a tensor"),
        ("x", torch.tensor(1.0), ValueError, "shape ()", "(..., width)"),
        ("x", torch.zeros(2, 0), ValueError, "shape (2, 0)", "width >= 1"),
        ("x", torch.zeros(2, 3, 24, dtype=torch.int32), TypeError, "torch.int32", "torch.float32"),
        ("weight", None, TypeError, "NoneType", "(24,)"),
        ("weight", torch.zeros(23), ValueError, "(23,)", "(24,)"),
        ("bias", torch.zeros(1, 24), ValueError, "(1, 24)", "(24,)"),
        ("z", torch.zeros(3, 24), ValueError, "(3, 24)", "(2, 3, 24)"),
        ("z", torch.zeros(2, 3, 24, device="meta"), ValueError, "meta", "the device of x"),
        ("eps", True, TypeError, "True", "a number"),
        ("group_size", 5, ValueError, "5", "a divisor of the width, 24"),
        ("group_size", 0, ValueError, "0", "a divisor of the width, 24"),
        ("group_size", 8.0, TypeError, "8.0", "an int"),
        ("norm_before_gate", 1, TypeError, "1", "True or False"),
    ]),
    state_update.selective_state_update: (lambda device: test_state_update.inputs(device=device), [
        ("state", None, TypeError, "NoneType", "a tensor (rows, nheads, dim, dstate)"),
        ("state", torch.zeros(10, 20), ValueError, "(10, 20)", "(rows, nheads, dim, dstate)"),
        ("state", torch.zeros(4, 4, 10, 20), ValueError, "4 rows", "batch = 3, or state_batch_indices"),
        ("x", torch.zeros(3, 4, 10, 1), ValueError, "(3, 4, 10, 1)", "(batch, nheads, dim)"),
        ("x", torch.zeros(0, 4, 10), ValueError, "(0, 4, 10)", "no size 0"),
        ("x", torch.zeros(3, 4, 11), ValueError, "(3, 4, 11)", "(3, 4, 10)"),
        ("x", torch.zeros(3, 4, 10, dtype=torch.int32), TypeError, "torch.int32", "torch.float32"),
        ("dt", torch.zeros(3, 4, 1), ValueError, "(3, 4, 1)", "(3, 4, 10)"),
        ("A", torch.zeros(4), ValueError, "(4,)", "(nheads, dim, dstate)"),
        ("B", torch.zeros(3, 3, 20), ValueError, "ngroups = 3", "a divisor of nheads = 4"),
        ("C", torch.zeros(3, 4, 20), ValueError, "(3, 4, 20)", "(3, 2, 20)"),
        ("D", 1.0, TypeError, "float", "a tensor (nheads, dim)"),
        ("z", torch.zeros(3, 4, 10, device="meta"), ValueError, "meta", "the device of state"),
        ("dt_bias", torch.zeros(4, 1), ValueError, "(4, 1)", "(4, 10)"),
        ("dt_softplus", 1, TypeError, "1", "True or False"),
        ("state_batch_indices", torch.zeros(3), TypeError, "torch.float32", "torch.int32 or torch.int64"),
        ("state_batch_indices", torch.zeros(2, dtype=torch.int32), ValueError, "(2,)", "(3,)"),
    ]),
    selective_scan.selective_scan_fn: (lambda device: test_selective_scan.inputs(test_selective_scan.Case(), device), [
        ("u", torch.zeros(2, 6, 20, dtype=torch.int64), TypeError, "torch.int64", ""),
        ("u", torch.zeros(6, 20), ValueError, "(6, 20)", "(batch, dim, seqlen)"),
        ("u", None, TypeError, "NoneType", ""),
        ("delta", torch.zeros(2, 5, 20), ValueError, "(2, 5, 20)", "(2, 6, 20) to go with u"),
        ("A", torch.zeros(6, 3, dtype=torch.complex64), TypeError, "torch.complex64", "a real dtype"),
        ("A", torch.ones(6, 257), ValueError, "dstate = 257", "at most 256"),
        ("B", torch.zeros(3, 20), ValueError, "(3, 20)", "can be expanded"),
        ("B", torch.zeros(2, 4, 3, 20), ValueError, "ngroups = 4", "a divisor of dim = 6"),
        ("C", torch.zeros(2, 1, 3, 20), ValueError, "(2, 1, 3, 20)", "(2, 2, 3, 20)"),
        ("D", torch.zeros(6, 1), ValueError, "(6, 1)", ""),
        ("delta_bias", torch.zeros(6, dtype=torch.int32), TypeError, "dtype", ""),
        ("delta_softplus", 1, TypeError, "1", ""),
    ]),
    mamba_inner_fn: (lambda device: test_mamba_inner.drawn(), [
        ("xz", None, TypeError, "NoneType", "a tensor (batch, 2 * dim, seqlen)"),
        ("xz", torch.zeros(2, 7, 11), ValueError, "7 channels", "2 * dim, an even number"),
        ("A", torch.zeros(5, 3), ValueError, "(5, 3)", "(4, 3) to go with xz"),
        ("conv1d_weight", torch.zeros(4, 4), ValueError, "(4, 4)", "(dim, 1, width)"),
        ("x_proj_weight", torch.zeros(9, 4), ValueError, "(9, 4)", "(8, 4)"),
        ("x_proj_weight", torch.zeros(8, 4).half(), TypeError, "float16", "float32"),
        ("delta_proj_weight", torch.zeros(3, 2), ValueError, "(3, 2)", "(4, 2)"),
        ("out_proj_weight", torch.zeros(5, 3), ValueError, "(5, 3)", "(5, 4)"),
        ("D", torch.zeros(4, 1), ValueError, "(4, 1)", ""),
        ("B", torch.zeros(3), ValueError, "(3,)", "None, (4, 3), (batch, dstate, seqlen)"),
        ("B", torch.zeros(2, 3, 10), ValueError, "(2, 1, 3, 10)", "(2, 1, 3, 11)"),
        ("C_proj_bias", {"C": torch.zeros(4, 3), "C_proj_bias": torch.zeros(3)}, ValueError, "a tensor beside C", ""),
        ("checkpoint_lvl", 2, ValueError, "2", "0 or 1"),
    ]),
    split_conv1d_scan: (lambda device: test_split.drawn(), [
        ("zxbcdt", torch.zeros(2, 19, 3), ValueError, "3 channels", "132"),
        ("zxbcdt", torch.zeros(2, 19, 133), ValueError, "133 channels", "by an even number"),
        ("zxbcdt", torch.zeros(19, 132), ValueError, "(19, 132)", "3 dimensions"),
        ("conv1d_weight", torch.zeros(97, 4), ValueError, "97 channels", "32 for x"),
        ("D", None, TypeError, "NoneType", "a tensor"),
        ("headdim", None, ValueError, "None", "it to be given"),
        ("outproj_bias", {"outproj_weight": None}, ValueError, "a tensor without outproj_weight", ""),
        ("activation", "gelu", ValueError, "'gelu'", ""),
        ("A", torch.zeros(3), ValueError, "(3,)", "(4,)"),
    ]),
}


@pytest.mark.parametrize(("function", "argument", "bad", "kind", "came", "accepted"),
                         [(function, *row) for function, (_, rows) in FUNCTIONS.items() for row in rows], ids=name_of)
def test_bad_arguments_are_refused_by_name(function, argument, bad, kind, came, accepted, device):
    """And nothing is changed."""
    given = FUNCTIONS[function][0](device)
    changed = bad if isinstance(bad, dict) else {argument: bad}
    moved = {name: t.to(given["A"].device if "A" in given else device) if isinstance(t, torch.Tensor) and not t.is_meta else t
             for name, t in changed.items()}
    before = {name: t.clone() for name, t in given.items() if isinstance(t, torch.Tensor)}
    assert_refused(function, given | moved, argument, kind, came, accepted)
    assert all(torch.equal(given[name], t) for name, t in before.items())
