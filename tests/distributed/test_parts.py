"""Ranks that each have a part of a sequence find what one process finds of the whole."""

import re
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch.testing import assert_close

from ssd import Options, reference
from ssd.distributed import part_state
from ssd.distributed.kernels import part_sum
from ssd.modules import Mamba2
from tests.distributed.rank_calls import (
    Problem,
    attend,
    awaits_state,
    convolve,
    join,
    mix,
    scan,
    scan_again_otherwise,
    scan_alone,
    scan_bits,
    scan_by_either_way,
    scan_otherwise,
)
from tests.distributed.ranks import Ranks
from tests.errors import assert_all_accurate, truths
from tests.experiments.small import without_gpu
from tests.inputs import EVERYTHING, HALF, OURS, PLAIN, Case, Shape, random_inputs, random_like

SMALL = Shape(batch=2, nheads=4, headdim=8, ngroups=2, dstate=8)
TINY = Shape(nheads=1, headdim=8, dstate=8)
PROBLEMS = [
    Problem((24, 24), SMALL),
    Problem((5, 32, 1, 17), SMALL, EVERYTHING),
    Problem((40, 3, 14), SMALL, EVERYTHING),
    Problem((20, 3, 30), SMALL, Case(initial_states=True, z=True, dt_bias=True, dt_softplus=True)),
    Problem((9, 1, 2, 40), TINY, Case(documents="varlen", D="h")),
    Problem((30,), TINY, Case(documents="varlen", D="h"), torch.float32),
    Problem((20, 17), SMALL, Case(strong_decay=True, packed=True), torch.float32),
]
PARTS = ((7, 9), (1, 1, 2, 5), (2, 1, 8))


def assert_equal_whole(ranks: Ranks, parts: tuple[int, ...], function, *args, rtol: float = 1e-9) -> None:
    whole, expected = join(ranks.run(len(parts), function, *args)), function(None, *args)
    assert whole.keys() == expected.keys()
    for name, t in expected.items():
        assert_close(whole[name], t, rtol=rtol, atol=rtol * t.abs().max().item(), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_scans(problem, ranks):
    assert_equal_whole(ranks, problem.parts, scan, problem, rtol=1e-9 if problem.dtype == torch.float64 else 2e-5)


def assert_scan_accurate(ranks: Ranks, problem: Problem) -> None:
    inputs, *gradients = problem.make()
    found = {name.split()[1]: t.to(problem.device) for name, t in join(ranks.run(2, scan, problem)).items()}
    assert_all_accurate(found, truths(inputs, *gradients), inputs, *gradients)


@without_gpu
@pytest.mark.parametrize("variant", OURS)
def test_kernels(variant, ranks):
    assert_scan_accurate(ranks, Problem((9, 20), TINY, Case(initial_states=True), torch.float32, variant))


@without_gpu
@pytest.mark.parametrize("variant, awaited", [("persistent", True), ("torch", False), ("own", False)])
def test_the_state_is_awaited_where_launches_alone_read_it(variant, awaited, ranks):
    assert ranks.run(2, awaits_state, variant) == [False, awaited]


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("variant", (*OURS, "auto"))
@pytest.mark.parametrize("case", (PLAIN, EVERYTHING), ids=("plain", "everything"))
def test_kernels_on_two_gpus(variant, case, gpus):
    shape = Shape(nheads=8, headdim=64, ngroups=2, dstate=128, chunk_size=256)
    assert_scan_accurate(gpus, Problem((1500, 900), shape, case, HALF, variant, "cuda"))


@pytest.mark.gpu(count=2)
def test_two_runs_on_two_gpus_are_the_same_bits(gpus):
    shape = Shape(nheads=8, headdim=64, dstate=128, chunk_size=256)
    assert gpus.run(2, scan_bits, Problem((1500, 900), shape, EVERYTHING, HALF, "auto", "cuda")) == [True, True]


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("case", (PLAIN, EVERYTHING), ids=("plain", "everything"))
def test_messages_by_copies_are_those_of_nccl(case, gpus):
    """Where the host's GPUs cannot copy from each other, both are NCCL's."""
    assert_either_way_equal(gpus, case)


@pytest.mark.gpu(count=2)
def test_groups_of_nccl_alone_copy_too(tmp_path):
    few = Ranks(2, tmp_path / "store", "nccl")
    assert_either_way_equal(few, PLAIN)
    few.end()


def assert_either_way_equal(ranks: Ranks, case: Case) -> None:
    shape = Shape(nheads=8, headdim=64, dstate=128, chunk_size=256)
    found = ranks.run(2, scan_by_either_way, Problem((1500, 900), shape, case, HALF, "persistent", "cuda"))
    assert found == [(torch.cuda.can_device_access_peer(0, 1), True)] * 2


@pytest.mark.parametrize("kind", ("states", "documents", "padding"))
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_convolutions(kind, parts, ranks):
    assert_equal_whole(ranks, parts, convolve, parts, kind)


@without_gpu
@pytest.mark.parametrize("kind", ("states", "documents"))
def test_convolutions_by_kernels(kind, ranks):
    assert_equal_whole(ranks, (1, 7), convolve, (1, 7), kind, torch.float32, rtol=1e-5)


@pytest.mark.parametrize("settings", ({}, {"rmsnorm": False, "D_has_hdim": True, "d_ssm": 8, "ngroups": 2}), ids=str)
def test_blocks(settings, ranks):
    assert_equal_whole(ranks, (6, 2, 9), mix, (6, 2, 9), settings, rtol=1e-6)  # A is fp32


@pytest.mark.parametrize("packed", (False, True), ids=("one document", "documents"))
def test_attention_of_the_hybrid(packed, ranks):
    assert_equal_whole(ranks, (6, 6), attend, (6, 6), packed)


def test_two_runs_are_the_same_bits(ranks):
    assert ranks.run(3, scan_bits, Problem((20, 3, 30), SMALL, EVERYTHING, torch.float32)) == [True] * 3


@pytest.mark.parametrize("programs", (1, 20, 2048), ids=("one sum", "sums", "chunks"))
@pytest.mark.parametrize("documents", (False, True), ids=("one document", "documents"))
def test_sums_by_kernels(documents, programs, monkeypatch, device):
    """The state after a part from zeros, and the gradient of the state before it."""
    monkeypatch.setattr(part_sum, "MOST_PROGRAMS", programs)
    monkeypatch.setattr(part_sum, "LEAST_TOKENS", 1)
    i = random_inputs(Shape(batch=3, seqlen=70, nheads=2, headdim=8, dstate=8), Case(dt_bias=True, dt_softplus=True),
                      device=device)
    i = replace(i, A=i.A * torch.tensor([1.0, 100.0], device=device))  # the second head forgets all but the nearest chunks
    if documents:
        tokens = torch.arange(70, device=device)
        i = replace(i, seq_idx=torch.stack([(tokens >= 20).int() + (tokens >= 33), (tokens >= 69).int(), 0 * tokens.int()]))
    dy = random_like(i.x)
    end, decay = part_state.compute_end(i, False, Options()).tensors
    (start,) = part_state.compute_start(i, dy, False, Options()).tensors
    with_states = replace(i, initial_states=torch.ones_like(end))
    truth = reference.compute_grads_in_fp64(with_states, dy).dinitial_states
    carried = reference.compute_in_fp64(replace(with_states, seq_idx=None, x=0 * i.x))[1][..., 0, 0]
    for found, expected in ((end, reference.compute_in_fp64(i)[1]), (start, truth), (decay, carried)):
        assert_close(found.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.gpu
def test_sums_of_tokens_far_apart(device):
    """Their offsets do not fit int32."""
    i = random_inputs(Shape(seqlen=600, nheads=1, headdim=8, dstate=8, chunk_size=64), Case(), HALF, device=device)
    far = torch.empty(600 * 2**22, dtype=HALF, device=device)
    spread = replace(i, x=far.as_strided(i.x.shape, (0, 2**22, 8, 1)).copy_(i.x))
    for found, expected in zip(*(part_state.compute_end(of, False, Options()).tensors for of in (spread, i)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("remembered", (1, 5000, 2**29 + 5))
def test_programs_share_all_chunks(remembered, device):
    """Evenly, also where a program's number times the chunks does not fit int32."""
    shares = torch.empty(2, 4096, dtype=torch.int32, device=device)
    _find_shares[(1,)](shares, min(remembered, 4001), remembered, 4096)
    begin, end = shares[:, : min(remembered, 4001)].tolist()
    assert [*begin, remembered] == [0, *end]
    assert max(lengths := [b - a for a, b in zip(begin, end, strict=True)]) - min(lengths) <= 1


@triton.jit
def _find_shares(shares, programs, remembered, SIZE: tl.constexpr):
    numbers = tl.arange(0, SIZE)
    begin, end = part_sum.find_share(numbers, programs, remembered)
    tl.store(shares + numbers, begin)
    tl.store(shares + SIZE + numbers, end)


def test_chunks_whose_decay_is_0_are_not_read(device):
    """Nor do they make NaN of their zeros."""
    i = random_inputs(Shape(batch=1, seqlen=2100, nheads=1, headdim=8, dstate=8), Case(), device=device)
    i = replace(i, dt=torch.full_like(i.dt, 0.5), A=torch.full_like(i.A, -1.0))
    late = [t[:, -1000:] for t in (i.x, i.dt, i.B)]
    expected, _ = part_state.compute_end(replace(i, **dict(zip(("x", "dt", "B"), late, strict=True))), True, Options()).tensors
    i.x[:, :1000], i.C[:, 1000:] = float("nan"), float("nan")
    assert_close(part_state.compute_end(i, False, Options()).tensors[0], expected, rtol=0, atol=1e-5)
    dy = random_like(i.x)
    assert part_state.compute_start(i, dy, False, Options()).tensors[0].isfinite().all()


def test_autocast_does_not_round_sums():
    i = random_inputs(Shape(nheads=2, headdim=8, dstate=8))
    expected, _ = part_state.compute_end(i, True, Options()).tensors
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(part_state.compute_end(i, True, Options()).tensors[0], expected)


def test_a_block_with_a_group_takes_no_cache():
    block = Mamba2(8, d_state=8, headdim=4)
    cache, block.context_group = block.new_cache(1), object()
    with pytest.raises(ValueError, match="cache: got one with context_group, expected none"):
        block(torch.zeros(1, 4, 8), cache=cache)


@pytest.mark.parametrize("size, rank, changed, said", [
    (2, 1, {"x": torch.float64}, "dtype of x: got torch.float32 on rank 0; torch.float64 on rank 1"),
    (3, 0, {"dt_softplus": True}, "dt_softplus: got True on rank 0; False on rank 1, 2"),
    (3, 1, {"seq_idx": torch.zeros(1, 4, dtype=torch.int32)}, "documents: got None on rank 0, 2; seq_idx on rank 1"),
    (2, 1, {"initial_states": torch.zeros(1, 2, 16, 16)}, "not the first: got False on rank 0; True on rank 1"),
    (2, 0, {"options": Options(exp2=False)}, "options: got "),
], ids=("dtype", "setting", "documents", "initial_states", "options"))
def test_what_ranks_pass_unlike_is_named(size, rank, changed, said, ranks):
    for error in ranks.run(size, scan_otherwise, rank, changed):
        assert isinstance(error, ValueError) and said in str(error), error


@pytest.mark.parametrize("name, others, one, said", [
    ("D", torch.ones(2), torch.ones(2, 16), "dimensions of D: got 1 on rank 0, 2; 2 on rank 1"),
    ("cu_seqlens", torch.tensor([0, 3, 12]), torch.tensor([0, 2, 12]), "got other boundaries on rank 1 than on rank 0"),
    ("cu_seqlens", torch.tensor([0, 3, 12]), torch.tensor([0, 2, 3, 12]), "got other boundaries on rank 1 than on rank 0"),
    ("cu_seqlens", torch.tensor([0, 3, 12]), torch.tensor([0.0, 12.0]),
     "an error: got None on rank 0, 2; cu_seqlens: got dtype torch.float32, expected"),
], ids=("axes", "boundaries", "documents", "error"))
def test_tensors_that_ranks_pass_unlike_are_named(name, others, one, said, ranks):
    for error in ranks.run(3, scan_otherwise, 1, {name: one}, {name: others}):
        assert isinstance(error, ValueError) and said in str(error), error


def test_calls_of_a_known_kind_are_compared_where_values_are_checked(ranks):
    for error in ranks.run(2, scan_again_otherwise, 1, {"dt_softplus": True}):
        assert isinstance(error, ValueError) and "dt_softplus: got False on rank 0; True on rank 1" in str(error), error


@pytest.mark.parametrize("changed, kind, said", [
    ({"context_group": "a group"}, TypeError, "context_group: got str"),
    ({"variant": "mamba_ssm"}, ValueError, "variant: got 'mamba_ssm' with context_group"),
    ({"cu_seqlens": torch.tensor([0, 3, 4])}, ValueError, r"cu_seqlens: got \[0, 3, 4\], .* to 8, the tokens of all ranks"),
    ({"cu_seqlens": torch.tensor([0.0, 8.0])}, TypeError, "cu_seqlens: got dtype torch.float32"),
    ({"seq_idx": torch.zeros(1, 8, dtype=torch.int32)}, ValueError, r"seq_idx: got shape \(1, 8\), expected \(1, 4\)"),
    ({"cu_seqlens": torch.tensor([0, 3, 8]), "return_final_states": True}, ValueError, "return_final_states: got it with"),
    ({"cu_seqlens": torch.tensor([0, 3, 8]), "initial_states": torch.zeros(2, 2, 16, 16)}, ValueError,
     "initial_states: got it with cu_seqlens and context_group"),
    ({"return_varlen_states": True}, ValueError, "return_varlen_states: got True with context_group"),
], ids=lambda value: "+".join(value) if isinstance(value, dict) else "")
def test_refusals(changed, kind, said, ranks):
    for error in ranks.run(2, scan_otherwise, None, changed):
        assert isinstance(error, kind) and re.search(said, str(error)), error


@pytest.mark.parametrize("dies", (True, False), ids=("dies", "is silent"))
def test_a_rank_that_takes_no_part_ends_the_others(dies, tmp_path):
    few = Ranks(2, tmp_path / "store")
    error, _ = few.run(2, scan_alone, 1, dies)
    few.end()
    assert isinstance(error, RuntimeError) and re.search("(?i)timed out|closed by peer|reset by peer", str(error)), error
