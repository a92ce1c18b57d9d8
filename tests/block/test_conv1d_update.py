"""One step of the causal convolution: what it returns, what it leaves in its state, and how it behaves inside torch."""

import pytest
import torch

from ssd.block.conv1d import causal_conv1d_fn
from ssd.block.conv1d_update import causal_conv1d_update, compute_in_torch
from ssd.block.kernels.conv1d_update import conv1d_update
from tests.block.test_conv1d import definition
from tests.errors import assert_near
from tests.inputs import GPU, HALF, generator
from tests.refused import assert_refused

pytestmark = pytest.mark.usefixtures("poison")
BATCH, DIM = 3, 20
STATE_LENS = (0, 1, 3)  # more than width - 1
STEPS = (None, 1, 2, 9)  # tokens of a call; None: x has no axis of tokens


def random(*size, device="cpu", dtype=torch.float32):
    return torch.randn(size, generator=generator(device, size, str(dtype)), device=device).to(dtype)


def inputs(step, extra, ring, indexed, device, width=4, dtype=torch.float32, state_dtype=None):
    """Arguments of `causal_conv1d_update` by name. Of four rows of x the last is padding, where rows have indices."""
    batch = BATCH + indexed
    x = random(batch, step or 1, DIM + 5, device=device, dtype=dtype)[..., 5:].mT
    cache_seqlens, indices = torch.tensor([0, 3, 101, 7])[:batch], torch.tensor([4, 0, 2, -1])
    return {
        "x": x[..., 0] if step is None else x,
        "conv_state": random(5 if indexed else batch, DIM, width - 1 + extra, device=device, dtype=state_dtype or dtype),
        "weight": random(DIM, width, device=device),
        "bias": random(DIM, device=device),
        "activation": "silu",
        "cache_seqlens": cache_seqlens.to(device, torch.int32) if ring else None,
        "conv_state_indices": indices.to(device, torch.int32) if indexed else None,
    }


def compute_expected(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices):
    """out in fp64 and the new state, a sequence at a time: its last tokens as a list, the oldest first."""
    tokens = x[..., None] if x.dim() == 2 else x
    out, conv_state = torch.zeros(tokens.shape, dtype=torch.float64, device=x.device), conv_state.clone()
    length, least = conv_state.shape[2], weight.shape[1] - 1
    for b in range(len(x)):
        slot = b if conv_state_indices is None else int(conv_state_indices[b])
        had = 0 if cache_seqlens is None else int(cache_seqlens[b])
        if slot < 0:
            continue
        kept = [conv_state[slot, :, (had + i) % length].clone() for i in range(length)]
        before = torch.stack(kept[length - least :], 1)[None]
        out[b] = definition(tokens[b : b + 1], weight, bias, initial_states=before, activation=activation)[0]
        kept += [token.to(conv_state.dtype) for token in tokens[b].unbind(1)]
        now = 0 if cache_seqlens is None else had + tokens.shape[2]
        for i, token in enumerate(kept[-length:]):
            conv_state[slot, :, (now + i) % length] = token
    return out.reshape(x.shape), conv_state


def assert_right(given):
    """The state bit for bit; out by tests/errors.py's rule, with `compute_in_torch` for the mirror."""
    truth, state = compute_expected(**given)
    mirror = torch.empty_like(given["x"])
    view = mirror[..., None] if mirror.dim() == 2 else mirror
    tensors = [t.clone() for t in (given["x"].reshape(view.shape), given["conv_state"], given["weight"], given["bias"])]
    compute_in_torch(*tensors, given["activation"] is not None, given["cache_seqlens"], given["conv_state_indices"], view)
    assert torch.equal(tensors[1], state), "of the torch form"
    conv_state = given["conv_state"].clone()
    out = causal_conv1d_update(**given | {"conv_state": conv_state})
    assert torch.equal(conv_state, state) and out.dtype == given["x"].dtype
    assert_near("out", out, truth, mirror)
    if given["conv_state_indices"] is not None:
        assert not out[-1].any(), "padding"


@pytest.mark.parametrize("indexed", (False, True), ids=("rows", "indexed"))
@pytest.mark.parametrize("ring", (False, True), ids=("shifted", "ring"))
@pytest.mark.parametrize("step, extra", [(step, extra) for step in STEPS for extra in STATE_LENS])
def test_every_option(step, extra, ring, indexed, device):
    assert_right(inputs(step, extra, ring, indexed, device))


@pytest.mark.parametrize("width", (2, 3))
@pytest.mark.parametrize("dtypes", ((HALF, None), (torch.float32, HALF), (HALF, torch.float32)), ids=str)
def test_widths_and_dtypes(width, dtypes, device):
    """x and state each in its own: a token is rounded where it is kept, not where it is used."""
    assert_right(inputs(2, 1, True, True, device, width, *dtypes))
    assert_right(inputs(None, 0, False, False, device, width, *dtypes) | {"activation": None})


def test_any_strides(device):
    given = inputs(2, 1, False, True, device)
    wide = torch.zeros(5, 4, 2 * DIM, device=device)
    state = wide.mT[:, ::2].copy_(given["conv_state"])
    strided = {"x": given["x"].permute(2, 0, 1).contiguous().permute(1, 2, 0), "weight": given["weight"].mT.contiguous().mT,
               "bias": given["bias"].repeat_interleave(2)[::2], "conv_state": state,
               "conv_state_indices": given["conv_state_indices"].repeat_interleave(2)[::2].long()}
    assert torch.equal(causal_conv1d_update(**given | strided), causal_conv1d_update(**given))
    assert torch.equal(state, given["conv_state"]) and not wide[..., 1::2].any()


@pytest.mark.parametrize("ring", (False, True), ids=("shifted", "ring"))
def test_a_prompt_then_tokens_give_the_whole(ring, device):
    """Bit for bit, from final states on: a prompt, one token, three at once, one token."""
    x, weight, bias = random(2, DIM, 40, device=device, dtype=HALF), random(DIM, 4, device=device), random(DIM, device=device)
    whole = causal_conv1d_fn(x, weight, bias, activation="silu")
    out, states = causal_conv1d_fn(x[:, :, :35], weight, bias, return_final_states=True, activation="silu")
    if ring:  # token t at t % 5
        states = torch.cat([torch.zeros_like(states[..., :2]), states], 2).roll(35 % 5, 2)
    outs = [out]
    for first, step in ((35, 1), (36, 3), (39, 1)):
        had = torch.full((2,), first, dtype=torch.int32, device=device) if ring else None
        outs.append(causal_conv1d_update(x[:, :, first : first + step], states, weight, bias, "silu", had))
    assert torch.equal(torch.cat(outs, 2), whole)
    assert torch.equal(states, x[:, :, -5:] if ring else x[:, :, -3:])


def test_an_index_beyond_the_last_row(device):
    """The CPU raises; no kernel writes outside of conv_state for it."""
    given = inputs(None, 0, False, True, device)
    given["conv_state_indices"][1] = 5
    if not GPU:
        assert_refused(causal_conv1d_update, given, "conv_state_indices", ValueError, "5", "below 5")
        return
    state = given["conv_state"].clone()
    assert not causal_conv1d_update(**given)[1].any() and torch.equal(given["conv_state"][[1, 3]], state[[1, 3]])


def test_a_count_below_zero(device):
    """Refused on the CPU, which looks; on a GPU no place beyond the state is written."""
    given = inputs(2, 1, True, False, device) | {"cache_seqlens": torch.tensor([-1, -9, 2], device=device)}
    if not GPU:
        assert_refused(causal_conv1d_update, given, "cache_seqlens", ValueError, "-9", "at least 0")
    memory, results = given["conv_state"].new_zeros(5, *given["conv_state"].shape[1:]), []
    for counts in (given["cache_seqlens"], given["cache_seqlens"] % given["conv_state"].shape[2]):
        memory[1:4], out = given["conv_state"], torch.empty_like(given["x"])
        conv1d_update(given["x"], memory[1:4], given["weight"], given["bias"], True, counts, None, out)
        results += [(out, memory.clone())]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and not memory[[0, 4]].any()
