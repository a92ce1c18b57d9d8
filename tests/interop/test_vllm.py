"""The scan under vLLM's name: requests in one row, with states in and out, after chunks, and in pieces."""

import inspect
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from ssd import reference
from ssd.interop.vllm import mamba_chunk_scan_combined_varlen as scan
from tests.inputs import HALF, OURS, Case, Shape, random_inputs
from tests.refused import assert_refused

CHUNK = 16
SLOTS = {"final_state_indices": torch.tensor([0, 1]), "return_intermediate_states": False}
CASE = Case(D="h", z=True, dt_bias=True, dt_softplus=True, initial_states=True, documents="states")


def cut_chunks(ends: list[int], seen: list[int] | None = None) -> tuple[list[int], list[int]]:
    """Boundaries of chunks, and the last of each request, at whole chunks of the tokens that it has had in all."""
    bounds, last = [0], []
    for request, (start, end) in enumerate(pairwise(ends)):
        room = CHUNK - (seen[request] if seen else 0) % CHUNK
        bounds += [*range(start + room, end, CHUNK), *([end] if end > start else [])]
        last.append(len(bounds) - 2)
    return bounds, last


def draw(ends: list[int], device: str, seed: int = 0) -> dict:
    """Arguments, as vLLM passes them."""
    i = random_inputs(Shape(1, ends[-1], 2, 16, 1, 16, CHUNK), CASE, device=device, seed=seed)
    flat = {name: getattr(i, name)[0] for name in ("x", "dt", "B", "C", "z")}
    states = torch.randn(len(ends) - 1, 2, 16, 16, generator=torch.Generator().manual_seed(seed)).to(device)
    return flat | place(ends, device) | {"A": i.A, "D": i.D, "dt_bias": i.dt_bias, "dt_softplus": True,
                                         "initial_states": states}


def place(ends: list[int], device: str, seen: list[int] | None = None) -> dict:
    """What says where requests are."""
    bounds, last = cut_chunks(ends, seen)
    numbers = {"cu_seqlens": ends, "cu_chunk_seqlens": bounds, "last_chunk_indices": last, "seq_idx": [0] * (len(bounds) - 1)}
    return {name: torch.tensor(t, dtype=torch.int32, device=device) for name, t in numbers.items()} | {
        "chunk_size": CHUNK, "out": torch.full((ends[-1], 2, 16), float("nan"), device=device)}


def run_alone(given: dict, start: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of these tokens, from a state, in fp64."""
    tokens = {name: given[name][None, start:end] for name in ("x", "dt", "B", "C", "z")}
    others = {name: given[name] for name in ("A", "D", "dt_bias", "dt_softplus")}
    return reference.recurrence(reference.SSDInputs(**tokens, **others, chunk_size=CHUNK, initial_states=state[None]))


@pytest.mark.parametrize("variant", ("torch", *OURS[:1]))
def test_states_after_chunks_and_requests(variant, device):
    """Ragged requests, one of a token, one empty."""
    ends = [0, 35, 36, 36, 50]
    given = draw(ends, device)
    chunks = scan(**given, return_intermediate_states=True, variant=variant).clone()
    by_chunk = given["out"].clone()
    after = scan(**given | {"out": torch.empty_like(by_chunk)}, variant=variant)
    last, bounds = given["last_chunk_indices"].tolist(), given["cu_chunk_seqlens"].tolist()
    for request, (start, end) in enumerate(pairwise(ends)):
        state = given["initial_states"][request]
        if start == end:
            assert torch.equal(after[request], state)
            continue
        out, final = run_alone(given, start, end, state)
        assert_close((by_chunk[None, start:end].double(), after[request].double()), (out, final[0]), rtol=1e-4, atol=1e-4)
        for chunk in range(last[request - 1] + 1 if request else 0, last[request] + 1):
            expected = run_alone(given, start, bounds[chunk + 1], state)[1][0]
            assert_close(chunks[chunk].double(), expected, rtol=1e-4, atol=1e-4)


def test_prompts_in_pieces(device):
    """Chunked prefill: outputs and states are those of the whole prompts. Chunks begin where whole ones would."""
    ends = [0, 30, 53]
    given = draw(ends, device)
    whole = given["out"]
    expected = scan(**given)
    states, done, outs = given["initial_states"], [0, 0], torch.empty_like(whole)
    for taken in ([11, 0], [19, 7], [0, 16]):
        at = torch.cat([start + begun + torch.arange(n, device=device)
                        for start, begun, n in zip(ends, done, taken, strict=False)])
        piece = given | {name: given[name][at] for name in ("x", "dt", "B", "C", "z")}
        piece |= place([0, taken[0], sum(taken)], device, done) | {"initial_states": states}
        after = scan(**piece, return_intermediate_states=True)
        after = [after[last] if n else state
                 for last, n, state in zip(piece["last_chunk_indices"].tolist(), taken, states, strict=True)]
        states = torch.stack(after)
        outs[at] = piece["out"]
        done = [begun + n for begun, n in zip(done, taken, strict=True)]
    assert_close(outs, whole, rtol=1e-5, atol=1e-5)
    assert_close(states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", (8, 512))
def test_states_in_slots(chunk_size, device):
    """Written in the cache of states, in its dtype and strides; of a chunk size that no kernel has."""
    given = draw([0, 30, 30, 53], device)
    expected = scan(**given)
    cache = torch.full((2, 5, 2, 16, 16), float("nan"), dtype=HALF, device=device)[1]
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    assert scan(**given | {"final_states_out": cache, "final_state_indices": slots, "chunk_size": chunk_size}) is None
    assert_close(cache[slots.long()], expected.to(HALF))
    assert cache[[1, 3]].isnan().all()


@pytest.mark.parametrize("variant", ("auto", "torch"))
def test_bf16_without_kernels(variant):
    """Also where kernels are interpreted, which have no part in it and would get bf16 wrong."""
    given = draw([0, 30, 30, 53], "cpu")
    expected = scan(**given, variant=variant)
    rounded = {name: given[name].bfloat16() for name in ("x", "B", "C", "z", "out")}
    cache = {"final_states_out": torch.zeros(3, 2, 16, 16, dtype=torch.bfloat16), "final_state_indices": torch.arange(3)}
    scan(**given | rounded | cache, variant=variant)
    assert_close(rounded["out"].float(), given["out"], rtol=0.05, atol=0.2)
    assert_close(cache["final_states_out"].float(), expected, rtol=0.05, atol=0.1)


def test_signature():
    """vLLM's names in vLLM's order, and `variant`."""
    assert [*inspect.signature(scan).parameters] == [
        "x", "dt", "A", "B", "C", "chunk_size", "cu_seqlens", "cu_chunk_seqlens", "last_chunk_indices", "seq_idx", "out", "D",
        "z", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_intermediate_states", "state_dtype",
        "final_states_out", "final_state_indices", "variant"]


@pytest.mark.parametrize(("changed", "came", "accepted"), [
    ({"x": torch.zeros(1, 20, 2, 16)}, "(1, 20, 2, 16)", "3 axes"), ({"out": None}, "NoneType", "3 axes"),
    ({"out": torch.zeros(21, 2, 16)}, "(21, 2, 16)", "(20, 2, 16)"),
    ({"out": torch.zeros(20, 1, 16).expand(20, 2, 16)}, "stride of 0", "a place for each"),
    ({"initial_states": torch.zeros(3, 2, 16, 16)}, "(3, 2, 16, 16)", "(2, 2, 16, 16)"),
    ({"cu_chunk_seqlens": torch.tensor([0, 20])}, "[0, 20]", "at most chunk_size = 16"),
    ({"cu_chunk_seqlens": torch.tensor([0, 10, 21])}, "[0, 10, 21]", "rising numbers from 0 to seqlen = 20"),
    ({"last_chunk_indices": torch.tensor([0, 5])}, "[0, 5]", "[12, 20]"),
    ({"final_states_out": torch.zeros(3, 2, 16, 16)}, "with return_intermediate_states", "one of the two"),
    ({"final_states_out": torch.zeros(3, 2, 16, 8), **SLOTS}, "(3, 2, 16, 8)", "(3, 2, 16, 16)"),
    ({"final_states_out": None, **SLOTS}, "NoneType", "a tensor"),
    ({"final_state_indices": torch.tensor([-1, 0]), "final_states_out": torch.zeros(3, 2, 16, 16),
      "return_intermediate_states": False}, "-1", "at least 0"),
    ({"cu_seqlens": None, "return_intermediate_states": False}, "NoneType", "a tensor"),
    ({"state_dtype": torch.int32, "return_intermediate_states": False}, "torch.int32", "torch.float32"),
    ({"return_intermediate_states": "no"}, "'no'", "True or False"),
    ({"final_state_indices": torch.tensor([0, 3]), "final_states_out": torch.zeros(3, 2, 16, 16),
      "return_intermediate_states": False}, "3", "below 3"),
    ({"final_state_indices": torch.tensor([1, 1]), "final_states_out": torch.zeros(3, 2, 16, 16),
      "return_intermediate_states": False}, "[1, 1]", "a slot of its own"),
    ({"final_states_out": torch.zeros(1, 2, 16, 16).expand(3, 2, 16, 16), **SLOTS}, "stride of 0", "a place for each"),
    ], ids=str)
def test_refusals(changed, came, accepted):
    given = draw([0, 12, 20], "cpu") | {"return_intermediate_states": True}
    assert_refused(scan, given | changed, next(iter(changed)), (TypeError, ValueError), came, accepted)
