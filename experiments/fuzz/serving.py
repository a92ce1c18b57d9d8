"""`mamba_chunk_scan_combined_varlen`, the entry for serving engines, as a configuration: requests packed in one row."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from ssd import reference
from ssd.interop.functions import fit_chunk_size
from ssd.interop.vllm import mamba_chunk_scan_combined_varlen
from ssd.reference_stages import Precision
from ssd.registry import get_variant
from ssd.types import SSDInputs

from . import operator
from .common import draw_call, get_integers, make_problem
from .draw import draw_layouts, draw_shared, draw_tokens
from .layouts import LAYOUTS, lay_out
from .limits import Limits
from .problem import DTYPES, Problem, Refused, Tensors

_TOKENS = ("x", "dt", "B", "C", "z")
_MODES = ("plain", "no_grad", "inference", "streams")  # an engine compiles and captures what is around it
_LONGEST = 1500  # the truth walks token by token
_SPARE = 3  # slots that no request has
_CUTS = ("random", "borders", "near", "near")


@dataclass(frozen=True)
class Config(operator.Config):
    """A call of the operator with documents, the requests, whose states come back.

    Attributes:
        chunk_size: any; with `intermediate` one that kernels have.
        state_dtype: of the states that are returned.
        intermediate: the states after chunks come back, not those after requests.
        slotted: the states after requests are written into slots of a cache, `final_states_out`.
        continued: requests had tokens before, so that their first chunks are short.
    """

    documents: str | None = "cu_seqlens"
    final_states: bool = True
    intermediate: bool = False
    slotted: bool = False
    continued: bool = False

    def list_chunks(self, bounds: list[int], rng: Random) -> tuple[list[int], list[int]]:
        """Boundaries of the chunks, and the last chunk of each request; of an empty request, the one before it."""
        ends, last = [0], []
        for start, end in pairwise(bounds):
            room = self.chunk_size - (rng.randrange(self.chunk_size) if self.continued else 0)
            ends += [*range(start + room, end, self.chunk_size), *([end] if start < end else [])]
            last.append(len(ends) - 2)
        return ends, last


def draw(seed: int, index: int, variants: list[str], device: str, size: int) -> list[Config]:
    """The family of that number in the run of that seed; variants take turns."""
    variant, rng = variants[index % len(variants)], Random(f"serving {seed} {index}")
    limits = Limits.of(variant, device)
    limits = replace(limits, modes=tuple(mode for mode in limits.modes if mode in _MODES), seqlen=min(limits.seqlen, _LONGEST))
    shared = draw_shared(rng, variant, limits)
    layouts = [_draw_layouts(rng, shared) for _ in range(2)]
    intermediate = rng.random() < 0.5
    dtypes = {name: rng.choice(limits.dtypes) for name in ("out", "final_states_out") if rng.random() < 0.3}
    shared = Config(**vars(shared) | {
        "documents": "cu_seqlens", "final_states": True, "options": {}, "dtypes": shared.dtypes | dtypes,
        "chunk_size": shared.chunk_size if intermediate or rng.random() < 0.6 else rng.randint(1, 2 * limits.chunk_size),
        "intermediate": intermediate})
    return [_draw_member(rng, shared, rng.choice(layouts), limits) for _ in range(size)]


def _draw_layouts(rng: Random, c: operator.Config) -> dict[str, str]:
    return draw_layouts(rng, c) | {name: rng.choice(LAYOUTS) for name in ("out", "final_states_out") if rng.random() < 0.4}


def _draw_member(rng: Random, c: Config, layouts: dict[str, str], limits: Limits) -> Config:
    _, seqlen = draw_tokens(rng, c, limits, None)
    return replace(
        c, seqlen=seqlen, layouts=layouts, cuts=rng.choice(_CUTS), ndocs=rng.randint(1, 8),
        decay=rng.choices(("spread", "strong", "none"), (80, 15, 5))[0], continued=rng.random() < 0.5,
        slotted=not c.intermediate and rng.random() < 0.5, **draw_call(rng, limits, ()))


def problem(c: Config, turn: int, device: str) -> Problem:
    """The call on the inputs of that turn.

    Raises:
        Refused: the variant cannot run it.
    """
    made = operator.make_tensors(c, turn, device)
    inputs = operator.make_inputs(_as_kernels_run(c), made)
    if c.variant != "auto" and (reason := get_variant(c.variant).supports(inputs)):
        raise Refused(reason)
    tensors = {name: t[0] if name in _TOKENS and t is not None else t for name, t in made.items() if name != "seq_idx"}
    tensors |= _make_chunks(c, made["cu_seqlens"], Random(f"chunks {c.seed} {turn}"), device)
    if c.slotted:
        tensors |= _make_slots(c, Random(f"slots {c.seed} {turn}"), device)
    return make_problem(
        c, tensors, _run, _truth, _truth, {"out": "lhp", "states": "bhpn", "final_states_out": "bhpn"},
        mirrors=_list_mirrors(c), tokens=c.seqlen, exponent=operator.largest_exponent(inputs),
        exact=c.variant != "torch" or device == "cpu")


def _list_mirrors(c: Config) -> tuple[Callable, ...]:
    """Those of the operator, and one that rounds states where the caller's chunks begin, if those after them are asked for."""
    whole = (partial(_mirror_operator, c, mirror) for mirror in operator.list_mirrors(_as_kernels_run(c), tf32=False))
    return (*([partial(_mirror_chunks, c)] if c.intermediate else []), *whole)


def _as_kernels_run(c: Config) -> Config:
    return replace(c, chunk_size=fit_chunk_size(c.chunk_size), state_dtype="fp32")


def _make_chunks(c: Config, cu_seqlens: Tensor, rng: Random, device: str) -> Tensors:
    """Where the chunks of the requests are, as engines say it."""
    ends, last = c.list_chunks(cu_seqlens.tolist(), rng)
    requests = torch.bucketize(torch.tensor(ends[:-1]), cu_seqlens.cpu(), right=True) - 1
    made = {"cu_chunk_seqlens": torch.tensor(ends), "last_chunk_indices": torch.tensor(last), "seq_idx": requests}
    return {name: t.to(device, cu_seqlens.dtype) for name, t in made.items()}


def _make_slots(c: Config, rng: Random, device: str) -> Tensors:
    """A cache of states, of which each request has a slot."""
    nslots = c.ndocs + _SPARE
    slots = torch.tensor(rng.sample(range(nslots), c.ndocs), device=device, dtype=get_integers(c))
    had = torch.arange(nslots, device=device, dtype=DTYPES[c.dtypes.get("final_states_out", "fp32")])
    return {"final_states_out": had[:, None, None, None].expand(-1, c.nheads, c.headdim, c.dstate).contiguous(),
            "final_state_indices": slots}


def _run(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    written = {"out": torch.empty_like(tensors["x"], dtype=_dtype_of_out(c))}
    if c.slotted:
        written["final_states_out"] = tensors["final_states_out"].clone()
    given = {name: lay_out(t, c.layouts.get(name, "contiguous")) for name, t in written.items()}
    states = mamba_chunk_scan_combined_varlen(
        **tensors | given, chunk_size=c.chunk_size, dt_softplus=c.dt_softplus, dt_limit=c.limits,
        return_intermediate_states=c.intermediate, state_dtype=DTYPES.get(c.state_dtype), variant=c.variant)
    return given if states is None else given | {"states": states}


def _truth(c: Config, tensors: Tensors) -> dict[str, Tensor]:
    return _place_states(c, tensors, *_run_requests(c, tensors, reference.recurrence))


def _mirror_chunks(c: Config, tensors: Tensors, *_) -> dict[str, Tensor]:
    precision = Precision(torch.float32, tensors["x"].dtype)
    out, states = _run_requests(c, tensors, lambda inputs: reference.compute_chunked(inputs, precision)[:2])
    return _round(c, tensors, _place_states(c, tensors, out, states))


def _mirror_operator(c: Config, mirror: Callable, tensors: Tensors, *_) -> dict[str, Tensor]:
    """By a mirror of the operator; without the states after the caller's chunks."""
    names = (*operator.DIFFERENTIABLE, "cu_seqlens")
    rows = {name: tensors[name][None] if name in _TOKENS and tensors[name] is not None else tensors[name] for name in names}
    found = mirror(rows | {"seq_idx": None}, (), {})
    if not found:
        return {}
    results = _place_states(c, tensors, found["out"][0], found["final_states"])
    return _round(c, tensors, {name: t for name, t in results.items() if name == "out" or not c.intermediate})


def _run_requests(c: Config, t: Tensors, scan: Callable) -> tuple[Tensor, Tensor]:
    """out and the states that are asked for: each request by itself, an empty one hands its state on."""
    outs, after_chunks, after_requests, before = [], [], [], t["initial_states"]
    if before is None:
        before = t["x"].new_zeros(c.ndocs, c.nheads, c.headdim, c.dstate)
    parts = list(pairwise(t["cu_chunk_seqlens" if c.intermediate else "cu_seqlens"].tolist()))
    for d, (start, end) in enumerate(pairwise(t["cu_seqlens"].tolist())):
        state = before[d : d + 1]
        for first, last in parts:
            if start <= first < last <= end:
                cut = {name: t[name][None, first:last] for name in _TOKENS if t[name] is not None}
                out, state = scan(SSDInputs(
                    **cut, A=t["A"], D=t["D"], dt_bias=t["dt_bias"], chunk_size=fit_chunk_size(c.chunk_size),
                    dt_softplus=c.dt_softplus, dt_limit=c.limits, initial_states=state, state_dtype=torch.float32))
                outs.append(out[0])
                after_chunks.append(state)
        after_requests.append(state)
    return torch.cat(outs), torch.cat(after_chunks if c.intermediate else after_requests)


def _place_states(c: Config, t: Tensors, out: Tensor, states: Tensor) -> dict[str, Tensor]:
    """The results, states in their slots where they have some."""
    if not c.slotted:
        return {"out": out, "states": states}
    slots = t["final_states_out"]
    return {"out": out, "final_states_out": slots.index_copy(0, t["final_state_indices"].long(), states.to(slots.dtype))}


def _round(c: Config, t: Tensors, results: dict[str, Tensor]) -> dict[str, Tensor]:
    dtypes = {"out": _dtype_of_out(c), "states": DTYPES.get(c.state_dtype, t["C"].dtype)}
    return {name: value.to(dtypes.get(name, value.dtype)) for name, value in results.items()}


def _dtype_of_out(c: Config) -> torch.dtype:
    return DTYPES[c.dtypes.get("out", c.dtype)]
