"""What one rank does in the tests: it makes the whole problem, as every rank does, and takes its part.

Functions give tensors by name. The first word of a name says what the ranks' tensors are of the whole's: "tokens" follow one
another, of "sum" the whole has the sum, "first" and "last" are the whole's on that rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from experiments import context
from experiments.parallel import Team
from experiments.workloads.layers import Attention
from ssd import ssd_chunk_scan
from ssd.block import arguments as block_arguments
from ssd.block import causal_conv1d_fn
from ssd.distributed import exchange, peers
from ssd.distributed import scan as part_scan
from ssd.modules import Mamba2
from ssd.reference import as_dtype
from ssd.registry import add_variant, get_variant
from ssd.runtime import value_checks
from ssd.runtime.late import late
from ssd.types import SSDInputs
from tests.errors import cotangents
from tests.inputs import PLAIN, Case, Shape, arguments, gradients, leaves, random_inputs

_OF_TOKENS = ("x", "dt", "B", "C", "z")
Group = dist.ProcessGroup | None
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """parts: tokens of each rank. variant: of the operator. device: "cuda" is a GPU for each rank."""

    parts: tuple[int, ...]
    shape: Shape
    case: Case = PLAIN
    dtype: torch.dtype = torch.float64
    variant: str = "torch"
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.parts))}-{self.case}-{self.variant}-{self.dtype}".replace("torch.", "")

    def make(self) -> tuple[SSDInputs, Tensor, Tensor]:
        """The whole, with gradients of out and of the final states; the same on every GPU."""
        inputs = random_inputs(replace(self.shape, seqlen=sum(self.parts)), self.case, self.dtype)
        inputs = as_dtype(inputs, self.dtype) if self.dtype == torch.float64 else inputs
        dout, dfinal_states = (t.to(self.device) for t in cotangents(inputs))
        inputs = SSDInputs.of(tuple(t if t is None else t.to(self.device) for t in inputs.tensors), inputs.settings)
        return inputs, dout, dfinal_states


def find_part(group: Group, parts: tuple[int, ...]) -> tuple[slice, bool, bool]:
    """The tokens of this rank, or all without a group; whether it has the first, and the last."""
    if group is None:
        return slice(None), True, True
    rank, ends = dist.get_rank(group), [0, *accumulate(parts)]
    return slice(ends[rank], ends[rank + 1]), rank == 0, rank == len(parts) - 1


def join(ranks: list[Found | Exception]) -> Found:
    """What all ranks found, as one process finds it."""
    for error in ranks:
        if isinstance(error, Exception):
            raise error
    how = {"tokens": lambda found: torch.cat(found, 1), "sum": sum, "first": lambda found: found[0],
           "last": lambda found: found[-1]}
    names = list(dict.fromkeys(name for found in ranks for name in found))
    return {name: how[name.split()[0]]([found[name] for found in ranks if name in found]) for name in names}


def scan(group: Group, problem: Problem) -> Found:
    (whole, dout, dfinal_states), (at, first, last) = problem.make(), find_part(group, problem.parts)
    cut = {name: t[:, at] for name in _OF_TOKENS if (t := getattr(whole, name)) is not None}
    documents = None if whole.seq_idx is None or whole.cu_seqlens is not None else whole.seq_idx[:, at]
    inputs = leaves(replace(whole, **cut, seq_idx=documents, initial_states=whole.initial_states if first else None))
    given = arguments(inputs) | {"return_varlen_states": False, "return_final_states": whole.cu_seqlens is None}
    out = ssd_chunk_scan(**given, variant=problem.variant, context_group=group)
    results = {"tokens out": (out, dout[:, at])} if whole.cu_seqlens is not None else {
        "tokens out": (out[0], dout[:, at]), "last final_states": (out[1], dfinal_states.to(out[1].dtype) if last else None)}
    torch.autograd.backward(*zip(*[pair for pair in results.values() if pair[1] is not None], strict=True))
    joined = dict.fromkeys(_OF_TOKENS, "tokens") | {"initial_states": "first"}
    grads = {f"{joined.get(name, 'sum')} d{name}": t.cpu() for name, t in gradients(inputs).items()}
    return {name: t.detach().cpu() for name, (t, _) in results.items()} | grads


def convolve(group: Group, parts: tuple[int, ...], kind: str, dtype: torch.dtype = torch.float64) -> Found:
    """kind: "states" go in and out; or "documents", or "padding", documents of which some are numbered below 0."""
    rng = torch.Generator().manual_seed(0)
    tokens = (2, sum(parts), 6)
    x, dout, weight, bias, states = (torch.randn(size, generator=rng, dtype=dtype)
                                     for size in (tokens, tokens, (6, 4), (6,), (2, 6, 3)))
    seq_idx = (torch.rand(tokens[:2], generator=rng) < 0.3).cumsum(1)
    if kind == "padding":
        seq_idx = seq_idx.where(seq_idx % 3 != 1, -1)
    at, first, last = find_part(group, parts)
    given = {"x": x[:, at], "weight": weight, "bias": bias}
    if kind == "states" and first:
        given["initial_states"] = states
    given = {name: t.requires_grad_() for name, t in given.items()}
    beside = {"return_final_states": True} if kind == "states" else {"seq_idx": seq_idx[:, at]}
    out = causal_conv1d_fn(**given | {"x": given["x"].mT}, **beside, activation="silu", context_group=group)
    out, final_states = out if kind == "states" else (out, out.new_zeros(1))
    loss = (out.mT * dout[:, at]).sum()
    if last:
        loss = loss + final_states.pow(3).sum()
    loss.backward()
    joined = {"x": "tokens", "initial_states": "first"}
    grads = {f"{joined.get(name, 'sum')} d{name}": t.grad for name, t in given.items()}
    return {"tokens out": out.detach().mT, "last final_states": final_states.detach(), **grads}


def mix(group: Group, parts: tuple[int, ...], settings: dict[str, Any]) -> Found:
    """A whole block, twice: gradients pass through one exchange into another."""
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(Mamba2(8, d_state=8, headdim=4, chunk_size=16, dtype=torch.float64, context_group=group,
                                          **settings) for _ in range(2)))
    u = torch.randn(2, sum(parts), 8, dtype=torch.float64)
    at, _, _ = find_part(group, parts)
    u = u[:, at].requires_grad_()
    out = blocks(u)
    out.pow(2).sum().backward()
    grads = {f"sum {name}": parameter.grad for name, parameter in blocks.named_parameters()}
    return {"tokens out": out.detach(), "tokens du": u.grad, **grads}


def attend(group: Group, parts: tuple[int, ...], packed: bool) -> Found:
    torch.manual_seed(0)
    layer = Attention(8, heads=8, kv_heads=4, headdim=4).double()
    layer.context_group = group
    u, dout = torch.randn(2, 2, sum(parts), 8, dtype=torch.float64)
    documents = torch.arange(sum(parts)).expand(2, -1) // 5 if packed else None
    at, _, _ = find_part(group, parts)
    u = u[:, at].requires_grad_()
    out = layer(u, documents)
    out.backward(dout[:, at])
    grads = {f"sum {name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"tokens out": out.detach(), "tokens du": u.grad, **grads}


def count_exchanges(group: Group, block: dict[str, Any], tokens: int) -> list[tuple[int, int]]:
    """Messages, and bytes from others, of a block's forward and backward, by what passes through torch.distributed."""
    others, counted = dist.get_world_size(group) - 1, []

    def gather(received: Tensor, sent: Tensor, **more: Any) -> dist.Work:
        counted.append(others * sent.nbytes)
        return all_gather(received, sent, **more)

    def deal(received: Tensor, sent: Tensor, **more: Any) -> None:
        counted.append(others * sent.nbytes // (others + 1))
        all_to_all(received, sent, **more)

    with pytest.MonkeyPatch.context() as patch:
        all_gather, all_to_all = exchange.all_gather, dist.all_to_all_single
        patch.setattr(exchange, "all_gather", gather)
        patch.setattr(dist, "all_to_all_single", deal)
        out = Mamba2(**block, context_group=group)(torch.randn(1, tokens, block["d_model"]).requires_grad_())
        forward, counted = counted, []
        out.sum().backward()
    return [(len(forward), sum(forward)), (len(counted), sum(counted))]


def call_benched(group: Group, shape: context.Shape) -> list[str]:
    """Names of the ways that the bench times, each run once."""
    team, ran = Team(dist.get_rank(group), dist.get_world_size(group), torch.device("cpu"), "cp"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_arguments, "INTERPRETED", False)
        for calls in (context._list_scans, context._list_blocks):
            for mode in context.MODES:
                for name, call in calls(shape, mode, "torch", torch.float32, team).items():
                    call()
                    ran.append(name)
    return ran


def scan_bits(group: Group, problem: Problem) -> bool:
    """Whether two runs give the same bits."""
    first, second = scan(group, problem), scan(group, problem)
    return all(torch.equal(first[name], second[name]) for name in first)


def scan_by_either_way(group: Group, problem: Problem) -> tuple[bool, bool]:
    """Whether GPUs copied the first run's message from each other, and whether the bits are those of a message by NCCL."""
    first, copied = scan(group, problem), peers.has_window(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "find_window", lambda *_: None)
        second = scan(group, problem)
    return copied, all(torch.equal(first[name], second[name]) for name in first)


def awaits_state(group: Group, variant: str) -> bool:
    """Whether the scan begins before the state that enters is there. "own" is a variant that a user has added."""
    add_variant(replace(get_variant("torch"), name="own"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_scan, "_scan", lambda *_: late.address != 0)
        given = arguments(random_inputs(Shape(seqlen=4), PLAIN, torch.float32))
        return ssd_chunk_scan(**given, variant=variant, context_group=group)


def scan_otherwise(group: Group, rank: int | None, changed: dict[str, Any], common: dict[str, Any] | None = None) -> None:
    """A group's first small scan, of which a rank, or all, pass what they should not; a dtype stands for the tensor in it."""
    exchange._checked.pop(group, None)  # ranks compare only what is new to them, and another test may have passed the same
    _scan_small(group, rank, changed, common or {})


def scan_again_otherwise(group: Group, rank: int, changed: dict[str, Any]) -> None:
    """A small scan, and with SSD_CHECK=1 the same again, of which a rank passes what it should not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_checks, "ENABLED", True)
        _scan_small(group, None, {}, {})
        _scan_small(group, rank, changed, {})


def _scan_small(group: Group, rank: int | None, changed: dict[str, Any], common: dict[str, Any]) -> None:
    given = arguments(random_inputs(Shape(seqlen=4))) | {"variant": "torch", "context_group": group} | common
    if rank in (None, dist.get_rank(group)):
        for name, value in changed.items():
            given[name] = given[name].to(value) if isinstance(value, torch.dtype) else value
    ssd_chunk_scan(**given)


def scan_alone(group: Group, rank: int, dies: bool) -> None:
    """A small scan within a second, in which one rank takes no part."""
    group = dist.new_group(range(dist.get_world_size(group)), timeout=timedelta(seconds=1))
    if dist.get_rank(group) != rank:
        scan_otherwise(group, -1, {})
    elif dies:
        os._exit(1)
