"""`ssd_chunk_scan` as a configuration: its sizes and options by plain values, and the call, truth and mirror of them."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from math import gcd
from random import Random

import torch
from torch import Tensor

from fused.hopper import WIDTHS
from ssd import Options, reference, ssd_chunk_scan
from ssd import reference_stages as stages
from ssd.reference_stages import Precision
from ssd.registry import get_variant
from ssd.types import SUB_CHUNK, SSDInputs

from .common import Common, Values, get_integers, make_mirror, make_problem
from .documents import draw_bounds
from .layouts import lay_out, pack
from .problem import DTYPES, Problem, Refused, Tensors

_TOKENS = ("x", "dt", "B", "C", "z")
DIFFERENTIABLE = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
DOCUMENTS = ("seq_idx", "cu_seqlens", "varlen", "both")
CUTS = ("random", "borders", "tokens")
_AXES = {"out": "blhp", "final_states": "bhpn", "varlen_states": "bhpn", "states": "bkhpn", "dx": "blhp", "ddt": "blh",
         "dA": "h", "dB": "blhn", "dC": "blhn", "dz": "blhp", "ddt_bias": "h", "dinitial_states": "bhpn"}
_TRUTH_CHUNK, _SHORT = 64, 24  # up to so many tokens the truth is the recurrence
_OTHER = {16: 64, 32: 64, 64: 128, 128: 64, 256: 64}  # chunk sizes of the second mirror; sub-chunks of kernels are 64 tokens
_SHARED_OUT = 1024  # tokens of a call, of all rows
_HEADS_OF_SPLITS = (1, 2)  # where tokens are few: kernels cut a group's heads into the largest power of two, or one by one
_HEAD_AXES = {"x": 2, "dt": 2, "z": 2, "A": 0, "D": 0, "dt_bias": 0, "initial_states": 1, "out": 2, "final_states": 1}
_BLOCK_FP32 = 16  # tokens between the states that the plain backward rounds and keeps, where x is in fp32
_TF32_EPS = 2.0**-10
_NEAR = 3  # tokens between boundaries of documents
_FP64 = Precision(torch.float64)


@dataclass(frozen=True)
class Config(Common):
    """One call of the operator. A value equal to its default is the simplest, which shrinking tries.

    Attributes:
        dtype: of x; the others' where `dtypes` says no other.
        layouts: of an input, or of the gradient of an output ("dout", "dfinal_states"), by its name. "packed" as the layout
            of x packs z, x, B, C and dt, as far as they have one dtype, into one projection.
        documents: None, "seq_idx", "cu_seqlens", "varlen" (these, and the states at their ends) or "both" of the first and
            the third.
        cuts: where documents end: at random places, at the edges of chunks, or after every token; "near": many near others.
        dt_limit: without an upper end that is None.
        ids: how seq_idx counts documents: "rising" from 0, "repeating" 0 and 1, or "offset", which begins at 5.
        states_every: tokens between the states that are also returned; 0: none are.
        decay: "spread" over heads, "wide" over many orders of size, "strong" or "none".
        gates: "normal", or "wide": of each three channels one has gates of 0 and one large ones.
        options: fields of `ssd.Options` that are not as they come.
        wanted: inputs whose gradients are taken.
        ways: outputs that receive a gradient.
        calls: of which two sets of inputs take turns.
    """

    variant: str = "torch"
    seqlen: int = 1
    ngroups: int = 1
    heads_per_group: int = 1
    headdim: int = 1
    dstate: int = 1
    chunk_size: int = 16
    D: str | None = None
    z: bool = False
    gates: str = "normal"
    dt_bias: bool = False
    dt_softplus: bool = False
    dt_limit: tuple[float, float | None] | None = None
    initial_states: bool = False
    final_states: bool = False
    state_dtype: str | None = None
    documents: str | None = None
    ndocs: int = 1
    cuts: str = "random"
    ids: str = "rising"
    int64: bool = False
    states_every: int = 0
    decay: str = "spread"
    options: dict[str, bool] = field(default_factory=dict)

    @property
    def nheads(self) -> int:
        return self.ngroups * self.heads_per_group

    @property
    def has_document_states(self) -> bool:
        """As `SSDInputs.has_document_states`."""
        return self.documents in ("cu_seqlens", "varlen") and (self.initial_states or self.final_states)

    @property
    def limits(self) -> tuple[float, float]:
        """dt_limit as the operator takes it."""
        low, high = self.dt_limit or (0.0, None)
        return low, float("inf") if high is None else high

    def dtype_of(self, name: str) -> torch.dtype:
        default = self.dtype if name in _TOKENS else "fp32"
        return DTYPES[self.dtypes.get(name, default)]


def problem(c: Config, turn: int, device: str) -> Problem:
    """The call on the inputs of that turn.

    Raises:
        Refused: the variant cannot run it.
    """
    tensors = make_tensors(c, turn, device)
    for t in (tensors[name] for name in c.wanted if tensors[name] is not None):
        t.requires_grad_()
    inputs = make_inputs(c, tensors)
    if c.variant != "auto" and (reason := get_variant(c.variant).supports(inputs)):
        raise Refused(reason)
    tf32 = c.options.get("tf32", False) and c.dtype == "fp32"
    eps = _TF32_EPS if tf32 else c.eps
    run = partial(_run, Options(**c.options))  # made here: in torch 2.11 torch.compile makes none
    return make_problem(
        c, tensors, run, _truth, run, _AXES | {"dD": "hp" if c.D == "hp" else "h"},
        {"final_states": torch.float32} if c.final_states else {}, mirrors=list_mirrors(c, tf32), eps=eps,
        coarsest=max(eps, torch.finfo(inputs.states_dtype).eps), summed=("dA", "dD", "ddt_bias"), tokens=c.batch * c.seqlen,
        exponent=largest_exponent(inputs) + _add_for_documents(inputs), exact=c.variant != "torch" or device == "cpu")


def _mirror_chunks(c: Config) -> list[int]:
    """Tokens between the states of each mirror, which are rounded as the kernels round theirs."""
    return sorted({c.chunk_size, _OTHER[c.chunk_size]} | ({_BLOCK_FP32} if c.dtype == "fp32" else set()))


def list_mirrors(c: Config, tf32: bool) -> tuple[Callable, ...]:
    """One for each number of tokens between states; and where the kernels for Hopper take dstate in parts, between which they
    round outputs and dx, one that does so too. Where tokens are few, kernels share out a group's heads, and so do others.
    """
    whole = (partial(_mirror, replace(c, chunk_size=size), tf32) for size in _mirror_chunks(c))
    in_parts = c.dstate > WIDTHS[-1] and c.dtype != "fp32" and c.documents not in ("varlen", "both")
    shared_out = c.dtype != "fp32" and c.batch * c.seqlen <= _SHARED_OUT
    return (*whole, *([make_mirror(partial(_run_in_parts, c))] if in_parts else []),
            *(partial(_mirror_by_split, c, heads) for heads in _HEADS_OF_SPLITS if shared_out and heads < c.heads_per_group))


def _run(options: Options, c: Config, tensors: Tensors) -> dict[str, Tensor]:
    varlen = c.documents in ("varlen", "both")
    results = ssd_chunk_scan(
        **tensors, chunk_size=c.chunk_size, dt_softplus=c.dt_softplus, dt_limit=c.limits,
        return_final_states=c.final_states, return_varlen_states=varlen,
        return_states_every=c.states_every or None,
        state_dtype=None if c.state_dtype is None else DTYPES[c.state_dtype], variant=c.variant, options=options)
    names = ("out", *(("final_states",) if c.final_states else ()), *(("varlen_states",) if varlen else ()),
             *(("states",) if c.states_every else ()))
    return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))


def _truth(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    """By autograd, through the recurrence where that is short, and else through the chunked form; each document's end state
    by running it alone.
    """
    inputs = replace(make_inputs(c, tensors), chunk_size=_TRUTH_CHUNK, state_dtype=None)
    if c.has_document_states:
        out, final_states = reference.compute_in_fp64(inputs)
    else:
        by = reference.recurrence if c.seqlen <= _SHORT else reference.compute_in_fp64
        out, final_states = by(replace(inputs, cu_seqlens=None))
    results = {"out": out} | ({"final_states": final_states} if c.final_states else {})
    if c.states_every:
        results["states"] = _take_states(c.states_every, inputs, final_states, _FP64)
    if c.has_document_states and c.documents == "varlen":
        results["varlen_states"] = final_states.detach()
    elif c.documents in ("varlen", "both"):
        with torch.no_grad():
            bounds = pairwise(inputs.cu_seqlens.tolist())
            results["varlen_states"] = torch.stack([_end_state(inputs, start, end) for start, end in bounds])
    return results


@torch.no_grad()
def _take_states(every: int, i: SSDInputs, final_states: Tensor, precision: Precision) -> Tensor:
    """The states after every so many tokens."""
    size = gcd(i.chunk_size, every)
    inside = reference.compute_prev_states(replace(i, chunk_size=size), precision)[:, every // size :: every // size]
    return inside if i.seqlen % every else torch.cat((inside, final_states.detach()[:, None].to(inside.dtype)), 1)


def _end_state(i: SSDInputs, start: int, end: int) -> Tensor:
    """The state at the end of the document of these tokens, (nheads, headdim, dstate)."""
    if start == end:
        return i.x.new_zeros(i.nheads, i.headdim, i.dstate)
    cut = {name: getattr(i, name)[:, start:end] for name in ("x", "dt", "B", "C")}
    reached = start == 0 and int(i.seq_idx[0, 0]) == 0
    alone = replace(i, **cut, chunk_size=_TRUTH_CHUNK if end - start > _SHORT else 16, z=None, D=None, seq_idx=None,
                    cu_seqlens=None, initial_states=i.initial_states if reached else None)
    return reference.compute_in_fp64(alone)[1][0]


class _TF32(Precision):
    """Operands of products cut off after 10 bits of mantissa, as tensor cores read fp32."""

    def round(self, t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is not None:
            return t.to(dtype).to(self.compute)
        return (t.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


@torch.no_grad()
def _mirror(c: Config, tf32: bool, tensors: Tensors, wanted: tuple[str, ...], ways: dict[str, Tensor]) -> dict[str, Tensor]:
    """Variant torch, step by step: its rounding points, and TF32's where that is asked for."""
    i = make_inputs(c, tensors)
    precision = _TF32(torch.float32, torch.float32) if tf32 else Precision(torch.float32, i.x.dtype)
    out, final_states, y = reference.compute_chunked(i, precision)
    results = {"out": out.to(i.x.dtype)} | ({"final_states": final_states} if c.final_states else {})
    if c.documents in ("varlen", "both"):
        results["varlen_states"] = final_states if c.has_document_states else reference.varlen_states(i, precision)
    if c.states_every:
        results["states"] = _take_states(c.states_every, i, final_states, precision).to(i.states_dtype)
    if not wanted:
        return results
    dout = ways.get("out", torch.zeros_like(i.x))
    y = None if y is None else y.to(i.x.dtype)
    grads = reference.compute_chunked_grads(i, dout, ways.get("final_states"), y, precision)
    return results | {f"d{name}": getattr(grads, f"d{name}").to(tensors[name].dtype) for name in wanted}


@torch.no_grad()
def _mirror_by_split(c: Config, each: int, tensors: Tensors, wanted: tuple[str, ...],
                     ways: dict[str, Tensor]) -> dict[str, Tensor]:
    """dB and dC alone: `_mirror` with B and C of every `each` heads, whose parts are rounded before they are added up.

    Heads that fill up a group's last split have no x and no gradients, and so no part.
    """
    splits = -(-c.heads_per_group // each)
    slots = torch.arange(splits * each, device=tensors["x"].device).repeat(c.ngroups)
    groups = torch.arange(c.ngroups, device=slots.device).repeat_interleave(splits * each)
    heads = groups * c.heads_per_group + slots.clamp(max=c.heads_per_group - 1)
    filling = (slots >= c.heads_per_group).nonzero()[:, 0]

    def cut(name: str, t: Tensor | None) -> Tensor | None:
        if t is None or name not in _HEAD_AXES:
            return t
        t = t.index_select(_HEAD_AXES[name], heads)
        return t.index_fill(_HEAD_AXES[name], filling, 0.0) if name in ("x", "out", "final_states") else t

    states = c.state_dtype or ("fp32" if c.options.get("low_precision_states") is False else c.dtypes.get("C", c.dtype))
    names = tuple(name for name in ("B", "C") if name in wanted)
    given = {name: cut(name, t) for name, t in tensors.items()}
    given |= {name: tensors[name].float().repeat_interleave(splits, 2) for name in ("B", "C")}
    parts = _mirror(replace(c, ngroups=c.ngroups * splits, heads_per_group=each, state_dtype=states), False, given, names,
                    {name: cut(name, t) for name, t in ways.items()})
    return {f"d{name}": parts[f"d{name}"].unflatten(2, (c.ngroups, splits)).sum(3).to(tensors[name].dtype) for name in names}


def _run_in_parts(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    """Variant torch on each part of dstate, added up in the dtype of x."""
    parts = []
    for part, skip in ((slice(WIDTHS[-1]), tensors["D"]), (slice(WIDTHS[-1], None), None)):
        cut = {name: tensors[name][..., part] for name in ("B", "C", "initial_states") if tensors[name] is not None}
        parts.append(_run(Options(), replace(c, variant="torch"), tensors | cut | {"D": skip, "z": None}))
    results = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0] if name != "out"}
    out = parts[0]["out"] + parts[1]["out"]
    gate = tensors["z"]
    results["out"] = out if gate is None else (out.float() * torch.nn.functional.silu(gate.float())).to(out.dtype)
    return results


def make_inputs(c: Config, tensors: Tensors) -> SSDInputs:
    """The inputs as variants get them. Documents are numbered here, not by the code under test."""
    given = {f.name: tensors[f.name] for f in fields(SSDInputs) if tensors.get(f.name) is not None}
    ids, ends = tensors["seq_idx"], tensors["cu_seqlens"]
    if ids is None and ends is not None and not c.has_document_states:
        lengths = ends.diff().to(torch.int64)
        ids = torch.arange(len(lengths), device=ends.device).repeat_interleave(lengths)[None]
    if ids is not None:
        given["seq_idx"] = torch.stack([torch.unique_consecutive(row, return_inverse=True)[1] + int(row[0] != 0)
                                        for row in ids]).to(torch.int32)
    given["cu_seqlens"] = ends.to(torch.int32) if c.documents in ("varlen", "both") or c.has_document_states else None
    state_dtype = DTYPES.get(c.state_dtype)
    if state_dtype is None and not c.options.get("low_precision_states", True):
        state_dtype = torch.float32
    return SSDInputs(**given, chunk_size=c.chunk_size, dt_softplus=c.dt_softplus, dt_limit=c.limits,
                     state_dtype=state_dtype)


def largest_exponent(inputs: SSDInputs) -> float:
    """The largest magnitude in dA_cumsum."""
    i = reference.as_dtype(inputs, torch.float64)
    with torch.no_grad():
        dA_cumsum = stages.chunk_cumsum(i.dt, i.A, i.chunk_size, i.dt_bias, i.dt_softplus, i.dt_limit)[1]
        return float(dA_cumsum.abs().amax())


def _add_for_documents(inputs: SSDInputs) -> float:
    """What dA_cumsum falls by more in the kernels for Hopper, which keep documents apart by it (docs/ssd.md): 128 for each that
    begins in the same 64 tokens.
    """
    if inputs.seq_idx is None or inputs.x.dtype == torch.float32:
        return 0.0
    begins = torch.nn.functional.pad(inputs.seq_idx.diff(dim=1) != 0, (1, -inputs.seqlen % SUB_CHUNK))
    return 128.0 * float(begins.unflatten(1, (-1, SUB_CHUNK)).sum(2).amax())


def make_tensors(c: Config, turn: int, device: str) -> Tensors:
    """Arguments of the operator by name."""
    values, h, p, g, n = Values(c, turn, device), c.nheads, c.headdim, c.ngroups, c.dstate
    documents = _document_tensors(c, turn, device)
    nstates = len(documents["cu_seqlens"]) - 1 if c.has_document_states else c.batch
    normal, uniform = values.normal, values.uniform
    mean = 0.1 if c.decay == "strong" else 0.04
    step = mean * uniform(0.1, 2.0, c.batch, c.seqlen, h)
    large = 30.0 if c.dtype == "fp16" else 100.0  # with those of bf16 gradients of states pass fp16's 65,504 now and then
    width = torch.tensor((1.0, 0.0, large) if c.gates == "wide" else (1.0,), device=device)
    made = {
        "z": normal(c.batch, c.seqlen, h, p) * width[torch.arange(p, device=device) % len(width)] if c.z else None,
        "x": normal(c.batch, c.seqlen, h, p),
        "B": normal(c.batch, c.seqlen, g, n),
        "C": normal(c.batch, c.seqlen, g, n),
        "dt": step.expm1().log() if c.dt_softplus else step,
        "A": {"spread": -uniform(-3.0, 1.5, h).exp(), "wide": -uniform(-3.0, 5.0, h).exp(),
              "strong": torch.full((h,), -16.0, device=device),
              "none": torch.zeros(h, device=device)}[c.decay],
        "D": None if c.D is None else normal(h, p) if c.D == "hp" else normal(h),
        "dt_bias": uniform(-0.5, 0.5, h) * (1.0 if c.dt_softplus else mean) if c.dt_bias else None,
        "initial_states": normal(nstates, h, p, n) if c.initial_states else None}
    made = {name: None if t is None else t.to(c.dtype_of(name)) for name, t in made.items()}
    if c.dt_limit:
        made["dt"] = _keep_off_limits(c, made["dt"], made["dt_bias"])
    packed = {}
    if c.layouts.get("x") == "packed":
        packed = pack({name: made[name] for name in ("z", "x", "B", "C", "dt")
                       if made[name] is not None and made[name].dtype == made["x"].dtype})
    made = {name: t if t is None or name in packed else lay_out(t, c.layouts.get(name, "contiguous"))
            for name, t in made.items()} | packed
    made = {name: None if t is None else t.detach() for name, t in made.items()}
    return made | documents


def _keep_off_limits(c: Config, dt: Tensor, dt_bias: Tensor | None) -> Tensor:
    """dt with no step within rounding of a limit, where its gradient jumps."""
    step = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    step = torch.nn.functional.softplus(step) if c.dt_softplus else step
    near = torch.stack([(step - limit).abs() < 1e-4 * max(limit, 0.01) for limit in c.limits]).any(0)
    return torch.where(near, dt * 1.1, dt)


def _document_tensors(c: Config, turn: int, device: str) -> Tensors:
    """seq_idx and cu_seqlens, those that the configuration asks for."""
    made: Tensors = {"seq_idx": None, "cu_seqlens": None}
    if c.documents is None:
        return made
    rows = [_ends(c, Random(f"{c.seed} {turn} {row}")) for row in range(c.batch)]
    dtype = get_integers(c)
    if c.documents in ("seq_idx", "both"):
        numbers = torch.stack([torch.arange(len(ends)).repeat_interleave(torch.tensor(ends).diff(prepend=torch.tensor([0])))
                               for ends in rows])
        ids = {"rising": numbers, "repeating": numbers % 2, "offset": 5 + 3 * numbers}[c.ids]
        made["seq_idx"] = lay_out(ids.to(device, dtype), c.layouts.get("seq_idx", "contiguous"))
    if c.documents != "seq_idx":
        made["cu_seqlens"] = torch.tensor([0, *rows[0]], device=device, dtype=dtype)
    return made


def _ends(c: Config, rng: Random) -> list[int]:
    """Rising, c.ndocs of them, the last seqlen; two alike leave a document empty. One a token if cuts are "tokens"."""
    if c.cuts == "tokens":
        return list(accumulate([1] * c.seqlen))
    if c.cuts == "near":
        return draw_bounds(rng, c.seqlen, c.ndocs, _NEAR)[1:]
    every = c.chunk_size if c.cuts == "borders" else 1
    return [*sorted(min(c.seqlen, every * rng.randint(0, c.seqlen // every)) for _ in range(c.ndocs - 1)), c.seqlen]
