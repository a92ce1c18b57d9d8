"""The fuzz of the entry for serving engines."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

from experiments.fuzz import serving, trial
from experiments.fuzz.parts import from_json, label, to_json
from ssd.interop import vllm
from tests.experiments.document_faults import change_arguments, change_results, forget, keep, shift

REQUESTS = serving.Config(
    seed=3, seqlen=50, heads_per_group=2, headdim=12, dstate=9, D="h", z=True, dt_bias=True, dt_softplus=True,
    initial_states=True, ndocs=4, state_dtype="fp32", continued=True, calls=3)
IN_CHUNKS, IN_SLOTS = replace(REQUESTS, intermediate=True), replace(REQUESTS, slotted=True)
VARIANTS = ("auto", "baseline", "fused", "persistent")
pytestmark = pytest.mark.usefixtures("one_thread")


def draw(families: int, device: str = "cuda", variants: tuple[str, ...] = VARIANTS) -> list[serving.Config]:
    return [c for index in range(families) for c in serving.draw(1, index, list(variants), device, 6)]


def test_draws_reach_every_option():
    configs = draw(60)
    assert configs == draw(60) and all(from_json(to_json(c)) == c for c in configs)
    for name in ("int64", "initial_states", "intermediate", "slotted", "continued", "z", "dt_bias", "dt_softplus"):
        assert {getattr(c, name) for c in configs} == {False, True}, name
    assert {label(c) for c in configs} == {f"serving {name}" for name in VARIANTS}
    assert {c.state_dtype for c in configs} == {None, "bf16", "fp16", "fp32"}
    assert {c.mode for c in configs} == {"plain", "no_grad", "inference", "streams"}
    assert {name for c in configs for name in c.dtypes} >= {"out", "final_states_out"}
    assert {c.chunk_size for c in configs if c.intermediate} == {16, 32, 64, 128, 256}
    assert max(c.chunk_size for c in configs) > 256 and not any(c.slotted and c.intermediate for c in configs)


def test_the_same_configuration_has_the_same_inputs():
    first, second = (serving.problem(IN_SLOTS, 1, "cpu").tensors for _ in range(2))
    assert all(t is None or torch.equal(t, second[name]) for name, t in first.items())


def test_chunks_are_of_one_request():
    """They are as long as they may be, but for a request's first and last one; an empty request names the chunk before it."""
    ends, last = REQUESTS.list_chunks([0, 0, 40, 40, 41], Random(0))
    assert ends[0] == 0 and ends[-2:] == [40, 41] and last == [-1, len(ends) - 3, len(ends) - 3, len(ends) - 2]
    assert all(0 < end - start <= 16 for start, end in pairwise(ends))
    assert {end - start for start, end in pairwise(ends[1:-2])} == {16}


def test_no_false_alarms(in_torch):
    for c in draw(2, "cpu", ("torch",)):
        outcome = trial.run(replace(c, seqlen=min(c.seqlen, 100), calls=2), "cpu")
        assert outcome.status == "passed", (to_json(c), outcome.why)


@pytest.mark.parametrize("form", (REQUESTS, IN_CHUNKS, IN_SLOTS), ids=("requests", "chunks", "slots"))
@pytest.mark.parametrize("variant", ("baseline", "fused"))
def test_kernels_pass(variant, form, device):
    outcome = trial.run(replace(form, variant=variant, calls=2), device)
    assert outcome.status == "passed", outcome.why


FAULTS = {
    "a state dropped": (REQUESTS, "states", "ssd_chunk_scan", change_arguments(initial_states=forget)),
    "another's final state": (REQUESTS, "states", "ssd_chunk_scan", change_results(keep, shift)),
    "another's slot": (IN_SLOTS, "final_states_out", "ssd_chunk_scan", change_results(keep, shift)),
    "another chunk's state": (IN_CHUNKS, "states", "_scan_chunks", change_results(keep, shift)),
    "requests' tokens exchanged": (IN_CHUNKS, "out", "_scan_chunks", change_results(lambda out: out.flip(1), keep))}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, in_torch, monkeypatch):
    config, result, name, wrap = FAULTS[fault]
    assert trial.run(config, "cpu").status == "passed"
    monkeypatch.setattr(vllm, name, wrap(getattr(vllm, name)))
    outcome = trial.run(config, "cpu")
    assert outcome.failed and outcome.why.startswith(result), outcome.why
