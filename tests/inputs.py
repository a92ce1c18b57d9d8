"""Random inputs of the operator for any shape and any set of its options."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, cycle, product

import pytest
import torch
from torch import Tensor

from ssd.registry import is_peer, variant_names
from ssd.types import SSDInputs

GPU = torch.cuda.is_available()
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter's bf16 arithmetic is wrong
NAMES = tuple(f.name for f in fields(SSDInputs) if f.name != "return_states_every")
OURS = tuple(name for name in variant_names() if name != "torch" and not is_peer(name))  # those with kernels
DIFFERENTIABLE = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


# The variants share the kernels of these tests: in the interpreter each takes one of the dtypes.
over_variants_in_turn = pytest.mark.parametrize(("name", "dtype"), [
    (name, dtype) for name in ("fused", "persistent") for dtype in (HALF, torch.float32)
    if GPU or (name == "persistent") == (dtype == torch.float32)], ids=str)


def describe(case: object) -> str:
    """The fields of a dataclass that are not as they are by default, for the ids of tests."""
    shown = [f"{f.name}={getattr(case, f.name)}" for f in fields(case) if getattr(case, f.name) != f.default]
    return ",".join(shown).replace("=True", "").replace("torch.", "") or "plain"


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    seqlen: int = 48
    nheads: int = 2
    headdim: int = 16
    ngroups: int = 1
    dstate: int = 16
    chunk_size: int = 16

    def __str__(self) -> str:
        return "b{batch}-l{seqlen}-h{nheads}-p{headdim}-g{ngroups}-n{dstate}-q{chunk_size}".format(**vars(self))


@dataclass(frozen=True)
class Case:
    """Which options a call has, and how its tensors are laid out.

    Attributes:
        D: "h", "hp" or None.
        documents: "seq_idx" packs several in every row, cut at random places inside chunks, at a chunk's edge, and
            after one token; "varlen" gives cu_seqlens as well, for the state at the end of each, and wants batch 1; "states"
            gives cu_seqlens alone, for states of each, with an empty document in the middle and one at the end.
        packed: z, x, B, C and dt are slices of one projection, as Mamba-2 has them, hence strided and of one dtype.
        strong_decay: A = -16 and dt about 0.1, from 0.01 to 0.2: |A| dt sums to about 107 over 64 tokens, and leaps within.
        dt_dtype, BC_dtype, C_dtype, z_dtype: other dtypes than that of x; the third goes before the second.
    """

    D: str | None = None
    z: bool = False
    dt_bias: bool = False
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    initial_states: bool = False
    documents: str | None = None
    state_dtype: torch.dtype | None = None
    packed: bool = False
    strong_decay: bool = False
    dt_dtype: torch.dtype | None = None
    BC_dtype: torch.dtype | None = None
    C_dtype: torch.dtype | None = None
    z_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return describe(self)


PLAIN = Case()
EVERYTHING = Case(D="hp", z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.02, 0.08), initial_states=True,
                  documents="seq_idx")


def pairwise(**choices: tuple) -> list[Case]:
    """Cases in which every two values of two options meet at least once; few, unlike all combinations."""
    every = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    missing = set().union(*map(_met, every))
    cases = []
    while missing:
        best = max(every, key=lambda case: len(missing & _met(case)))
        missing -= _met(best)
        cases.append(Case(**best))
    return cases


def every_option_pairwise(**more: tuple) -> list[Case]:
    """The options that change what is computed, pairwise, and `more`."""
    return pairwise(
        D=(None, "h", "hp"),
        documents=(None, "seq_idx", "varlen"),
        z=(False, True),
        dt_bias=(False, True),
        dt_softplus=(False, True),
        dt_limit=((0.0, float("inf")), (0.02, 0.06)),
        initial_states=(False, True),
        **more,
    )


def _met(case: dict) -> set[frozenset]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def generator(device: str, *key) -> torch.Generator:
    """Seeded by what is tested, so that every case has numbers of its own and the same ones in each run."""
    return torch.Generator(device).manual_seed(zlib.crc32(repr(key).encode()))


def random_inputs(shape: Shape, case: Case = PLAIN, dtype: torch.dtype = torch.float32, device: str = "cpu",
                  seed: int = 0) -> SSDInputs:
    """A is spread so that some heads remember for many chunks and others for a few tokens."""
    s, rng = shape, generator(device, str(shape), str(case), str(dtype), seed)

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=rng, device=device).to(dtype)

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return torch.rand(size, generator=rng, device=device) * (high - low) + low

    tokens = (s.batch, s.seqlen)
    sizes = {"z": (s.nheads, s.headdim), "x": (s.nheads, s.headdim), "B": (s.ngroups, s.dstate),
             "C": (s.ngroups, s.dstate), "dt": (s.nheads,)}
    if case.packed:
        widths = [torch.Size(size).numel() for size in sizes.values()]
        slices = normal(*tokens, sum(widths), dtype=dtype).split(widths, -1)
        made = {name: t.unflatten(-1, size) for (name, size), t in zip(sizes.items(), slices, strict=True)}
    else:
        dtypes = {"B": case.BC_dtype or dtype, "C": case.C_dtype or case.BC_dtype or dtype, "dt": case.dt_dtype or dtype,
                  "z": case.z_dtype or dtype}
        made = {name: normal(*tokens, *size, dtype=dtypes.get(name, dtype)) for name, size in sizes.items()}

    mean = 0.1 if case.strong_decay else 0.04
    step = mean * uniform(0.1, 2.0, *tokens, s.nheads)
    dt_bias = uniform(-0.5, 0.5, s.nheads) * (1.0 if case.dt_softplus else mean) if case.dt_bias else None
    if case.dt_softplus:
        step = step.expm1().log()
    made["dt"].copy_(step)
    A = -16 * torch.ones(s.nheads, device=device) if case.strong_decay else -uniform(-3.0, 1.5, s.nheads).exp()

    seq_idx = cu_seqlens = None
    if case.documents:
        starts = torch.stack([_starts(s, rng) for _ in range(s.batch)])
        seq_idx = starts.cumsum(1, dtype=torch.int32)
    ends = torch.tensor([s.seqlen], device=device)
    if case.documents == "varlen":
        cu_seqlens = torch.cat([ends * 0, starts[0].nonzero().flatten(), ends]).to(torch.int32)
    if case.documents == "states":
        cuts = starts[0].nonzero().flatten()
        cu_seqlens, seq_idx = torch.cat([ends * 0, cuts[:2], cuts[1:], ends, ends]).to(torch.int32), None
    nstates = s.batch if cu_seqlens is None or seq_idx is not None else len(cu_seqlens) - 1
    return SSDInputs(
        x=made["x"], dt=made["dt"], A=A, B=made["B"], C=made["C"], chunk_size=s.chunk_size,
        D={None: None, "h": normal(s.nheads), "hp": normal(s.nheads, s.headdim)}[case.D],
        z=made["z"] if case.z else None, dt_bias=dt_bias,
        initial_states=normal(nstates, s.nheads, s.headdim, s.dstate) if case.initial_states else None,
        seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=case.dt_softplus, dt_limit=case.dt_limit,
        state_dtype=case.state_dtype,
    )


def _starts(s: Shape, rng: torch.Generator) -> Tensor:
    """True at the first token of each document but the first of the row."""
    middle = (s.seqlen // 2 + 1, s.seqlen // 2 + 2, s.chunk_size)  # one document of one token, one edge of a chunk
    cuts = torch.randint(1, max(2, s.seqlen), (2,), generator=rng, device=rng.device)
    starts = torch.zeros(s.seqlen, dtype=torch.bool, device=rng.device)
    for cut in (*middle, *cuts.tolist()):
        if 0 < cut < s.seqlen:
            starts[cut] = True
    return starts


def set_decays(inputs: SSDInputs, decays: Sequence[Sequence[float]]) -> SSDInputs:
    """These inputs with steps scaled so that A_last of each sub-chunk of 64 tokens is -decays[head], one after the other, again
    from the first when all have been taken; and A = -1.
    """
    for step, of_heads in zip(inputs.dt.split(64, 1), zip(*map(cycle, decays), strict=True), strict=False):
        step *= torch.tensor(of_heads, device=step.device) / step.sum(1, keepdim=True)
    return replace(inputs, A=-torch.ones(inputs.nheads, device=inputs.x.device))


def random_like(t: Tensor, *key) -> Tensor:
    """A gradient for t: contiguous, in its shape, dtype and device."""
    return torch.randn(t.shape, generator=generator(str(t.device), "gradient", *key), device=t.device).to(t.dtype)


def leaves(inputs: SSDInputs) -> SSDInputs:
    """The same values, detached, with a gradient asked for on every tensor that can have one; strides kept."""
    present = {name: getattr(inputs, name) for name in DIFFERENTIABLE if getattr(inputs, name) is not None}
    return replace(inputs, **{name: t.detach().requires_grad_() for name, t in present.items()})


def arguments(inputs: SSDInputs) -> dict:
    """Keyword arguments of `ssd.ssd_chunk_scan` for these inputs."""
    varlen = inputs.cu_seqlens is not None and not inputs.has_document_states
    return {name: getattr(inputs, name) for name in NAMES} | {"return_varlen_states": varlen}


def gradients(inputs: SSDInputs) -> dict[str, Tensor]:
    """What a backward pass left in the leaves, by the name of the input."""
    return {name: getattr(inputs, name).grad for name in DIFFERENTIABLE if getattr(inputs, name) is not None}


def split(inputs: SSDInputs, start: int, end: int) -> SSDInputs:
    """Tokens start to end alone, without what depends on the rest of the row."""
    cut = {name: getattr(inputs, name)[:, start:end] for name in ("x", "dt", "B", "C")}
    z = None if inputs.z is None else inputs.z[:, start:end]
    return replace(inputs, **cut, z=z, seq_idx=None, cu_seqlens=None, initial_states=None)
