"""What surrounds the operator, ours beside upstream's: convolution, gated norm, one-token update, Mamba-1's scan, whole blocks.

A part is set up at a shape as `Work`: the same tensors for every side, and the bytes that any of them must move.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from torch import Tensor

from ssd.block import causal_conv1d_fn, rms_norm_gated, selective_scan_fn, selective_state_update
from ssd.modules import Mamba2

from . import autotuned_configs, counters, record, timing
from .inputs import DTYPES
from .shapes import BLOCK_PARTS, SCANS, Shape, find_shapes
from .terminal import leave_out, track

OURS = "ssd"
MODES = ("fwd", "bwd", "fwd_bwd")
WIDTH = 4  # of the convolution
_CALL = ("part", "shape", "mode", "dtype", "variant")  # what `run_call` takes
_DECODED = 64  # sequences of the one-token update, whatever the batch


@dataclass(frozen=True)
class Work:
    """One part at one shape.

    Attributes:
        ours: what runs it here; differentiable in `leaves`, if there are any.
        theirs: upstream's name, and what gives its function, or raises an ImportError where it is not installed; if there is
            to be one.
        leaves: what gradients are taken of.
        nbytes: bytes read and written once, by mode; of none, parts are not held against a copy.
    """

    ours: Callable[[], Tensor]
    theirs: tuple[str, Callable[[], Callable[[], Tensor]]] | None
    leaves: tuple[Tensor, ...]
    nbytes: dict[str, int]


@autotuned_configs.compile_together()
def run(parts: Sequence[str], shapes: Sequence[Shape], scans: Sequence[Shape], modes: Sequence[str], dtype: str, out: Path,
        console: Console, repeats: int = 50, warmup: int = 10) -> list[dict]:
    """Measures parts at shapes and returns the rows, each appended to its file as soon as it is known.

    scans: the shapes of the selective scan, to which `shapes` mean nothing.
    """
    rows: list[dict] = []
    with timing.side_stream():
        ceiling = timing.measure_copy_gbps()
        settings = [(part, shape) for part in parts for shape in (scans if part == "selective_scan" else shapes)]
        for part, shape in track(settings, console, lambda one: f"{one[0]} {one[1].name}"):
            row = {"bench": "block", "part": part, "shape": shape.name, **shape.sizes, "dtype": dtype}
            with leave_out(console, f"{part} {shape.name}"):
                for values in _measure_part(part, shape, modes, dtype, repeats, warmup, ceiling, console):
                    rows += record.add([row | values], out)
    return rows


def count(rows: list[dict], out: Path, console: Console) -> None:
    """Counters of ncu for what each row measured, appended as rows of the bench `block_counters`, one for each kernel."""
    def name_call(row: dict) -> list[str]:
        return ["once", "block:run_call", json.dumps({key: row[key] for key in _CALL})]

    list(counters.append_counts(rows, "block_counters", name_call, _CALL, out, console))  # `make report` shows them


def run_call(part: str, shape: str, mode: str, dtype: str, variant: str) -> None:
    """One call of a side: what `block --counters` runs under ncu."""
    sizes = {scan.name: scan for scan in SCANS}.get(shape) or find_shapes(shape)[0]
    work = PARTS[part](sizes, DTYPES[dtype])
    with autotuned_configs.hand_over_configs(), timing.side_stream():
        counters.run_between_marks(_make_call(work, work.ours if variant == OURS else work.theirs[1](), mode))


def read_latest(out: Path = record.RESULTS) -> list[dict]:
    """The last row of each part, shape, mode, side and dtype."""
    return record.latest(record.read(out, bench="block"), itemgetter("gpu", "part", "shape", "mode", "variant", "dtype"))


def _measure_part(part: str, shape: Shape, modes: Sequence[str], dtype: str, repeats: int, warmup: int, ceiling_gbps: float,
                  console: Console) -> Iterator[dict]:
    """What is measured of a part at a shape, for each mode and side."""
    work = PARTS[part](shape, DTYPES[dtype])
    sides, (rival, load) = {OURS: work.ours}, work.theirs
    with leave_out(console, f"{part} {shape.name}: {rival}", ImportError):
        sides[rival] = load()
    apart = _measure_difference(work, sides)
    for mode in modes if work.leaves else ("fwd",):
        for side, values in measure(work, sides, mode, repeats, warmup).items():
            yield {"mode": mode, "variant": side, **values, **_compare_with_copy(work, mode, values, ceiling_gbps),
                   "apart": apart if side == OURS else None}


def _make_call(work: Work, side: Callable[[], Tensor], mode: str) -> timing.Call:
    dout = None if mode == "fwd" else torch.randn_like(side())
    return timing.make_call(side, mode, work.leaves, dout)


def _measure_difference(work: Work, sides: dict[str, Callable[[], Tensor]]) -> float | None:
    """How far ours is from upstream's: the largest |a - b| / |b| of the output and of each gradient; None without upstream."""
    if len(sides) < 2:
        return None
    found = []
    for side in sides.values():
        out = side()
        grads = torch.autograd.grad(out, work.leaves, torch.ones_like(out)) if work.leaves else ()
        found.append((out.detach(), *grads))
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(*found, strict=True))


def measure(work: Work, sides: dict[str, Callable[[], Tensor]], mode: str, repeats: int, warmup: int) -> dict[str, dict]:
    """The measured keys of a row for each side, timed side by side; ours is also compared with the other."""
    calls = {name: _make_call(work, side, mode) for name, side in sides.items()}
    for call in calls.values():
        call()  # compiles and tunes
    measured = timing.measure(calls, repeats, warmup)
    for rival, theirs in measured.items():
        if rival != OURS:
            times = (side[key] for side in (measured[OURS], theirs) for key in ("p50_us", "graph_p50_us"))
            measured[OURS] |= {"against": rival, **timing.compare_times(*times)}
    return measured


def _compare_with_copy(work: Work, mode: str, values: dict, ceiling_gbps: float) -> dict:
    """A part's bytes against a copy in the same run, by the kernels' time alone."""
    if mode not in work.nbytes or values["graph_p50_us"] is None:
        return {}
    gbps = work.nbytes[mode] / values["graph_p50_us"] / 1e3
    return {"ideal_bytes": work.nbytes[mode], "effective_gbps": gbps, "copy_gbps": ceiling_gbps, "sol": gbps / ceiling_gbps}


def _count_bytes(forward: int, backward: int, *tensors: Tensor) -> dict[str, int]:
    """Bytes where each of like tensors is read or written so many times."""
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    return {"fwd": forward * nbytes, "bwd": backward * nbytes, "fwd_bwd": (forward + backward) * nbytes}


def _make_projection(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """What a Mamba-2 block's input projection gives, [z | x B C | dt] (batch, seqlen, ...), and the widths of z and x B C."""
    inner, conv = shape.nheads * shape.headdim, shape.nheads * shape.headdim + 2 * shape.ngroups * shape.dstate
    return torch.randn(shape.batch, shape.seqlen, inner + conv + shape.nheads, device=choose_device(), dtype=dtype), inner, conv


def choose_device() -> str:
    """Where tensors are made."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def draw_normal(*size: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Tensor:
    """Numbers drawn from N(0, 1)."""
    return torch.randn(*size, device=choose_device(), dtype=dtype, requires_grad=requires_grad)


def make_conv1d(shape: Shape, dtype: torch.dtype) -> Work:
    """x B C in place in the projection; dx in memory of its own."""
    projection, inner, conv = _make_projection(shape, dtype)
    x = projection[..., inner : inner + conv].mT.detach().requires_grad_()
    weight, bias = draw_normal(conv, WIDTH), draw_normal(conv)

    def theirs():
        from causal_conv1d import causal_conv1d_fn as function

        return lambda: function(x, weight, bias, activation="silu")

    return Work(lambda: causal_conv1d_fn(x, weight, bias, activation="silu"), ("causal_conv1d", theirs), (x, weight, bias),
                _count_bytes(2, 3, x))


def make_gated_norm(shape: Shape, dtype: torch.dtype) -> Work:
    """norm(y silu(z)) in groups, z in place in the projection."""
    projection, inner, _ = _make_projection(shape, dtype)
    z = projection[..., :inner].detach().requires_grad_()
    y, weight = torch.randn_like(z).requires_grad_(), torch.ones(inner, device=z.device, requires_grad=True)
    how = {"z": z, "eps": 1e-5, "group_size": inner // shape.ngroups, "norm_before_gate": False}

    def theirs():
        module = _mamba_ssm("ops.triton.layernorm_gated")
        return lambda: module.rmsnorm_fn(y, weight, None, **how)

    return Work(lambda: rms_norm_gated(y, weight, None, **how), ("mamba_ssm", theirs), (y, z, weight), _count_bytes(3, 5, y))


def make_state_update(shape: Shape, dtype: torch.dtype) -> Work:
    """One token of many sequences, the state in fp32; for inference."""
    h, p, n, g = shape.nheads, shape.headdim, shape.dstate, shape.ngroups
    normal, exact = (partial(draw_normal, dtype=each, requires_grad=False) for each in (dtype, torch.float32))
    state = exact(_DECODED, h, p, n)  # which a call changes, so that each side has its own
    A, D, dt_bias = -exact(h).exp(), torch.ones(h, device=choose_device()), exact(h)
    given = (normal(_DECODED, h, p), normal(_DECODED, h)[..., None].expand(-1, -1, p), A[:, None, None].expand(-1, p, n),
             normal(_DECODED, g, n), normal(_DECODED, g, n), D[:, None].expand(-1, p))
    how = {"dt_bias": dt_bias[:, None].expand(-1, p), "dt_softplus": True}

    def theirs():
        module = _mamba_ssm("ops.triton.selective_state_update")
        their_state = state.clone()
        return lambda: module.selective_state_update(their_state, *given, **how)

    our_state = state.clone()
    return Work(lambda: selective_state_update(our_state, *given, **how), ("mamba_ssm", theirs), (), _count_bytes(2, 0, state))


def make_selective_scan(shape: Shape, dtype: torch.dtype) -> Work:
    """The scan as a Mamba-1 block calls it; without a gate where the model has none."""
    (batch, seqlen, dim, _, dstate, _), normal = shape.sizes.values(), partial(draw_normal, dtype=dtype)
    u, delta, B, C = normal(batch, dim, seqlen), normal(batch, dim, seqlen), *(normal(batch, dstate, seqlen) for _ in range(2))
    A = (-torch.arange(1.0, dstate + 1, device=u.device).repeat(dim, 1)).requires_grad_()
    D, bias = draw_normal(dim), draw_normal(dim)
    z = None if shape.name.startswith("mambavision") else normal(batch, dim, seqlen)
    leaves = tuple(t for t in (u, delta, A, B, C, D, z, bias) if t is not None)

    def theirs():
        import selective_scan_cuda  # noqa: F401 - what mamba_ssm's function calls

        module = _mamba_ssm("ops.selective_scan_interface")
        return lambda: module.selective_scan_fn(u, delta, A, B, C, D, z, bias, True)

    gated = z is not None
    return Work(lambda: selective_scan_fn(u, delta, A, B, C, D, z, bias, True), ("mamba_ssm", theirs), leaves,
                _count_bytes(3 + gated, 5 + 2 * gated, u))


def make_block(shape: Shape, dtype: torch.dtype) -> Work:
    """A whole Mamba-2 block with upstream's weights; its gradients are those of input and parameters."""
    sizes = {"d_model": shape.nheads * shape.headdim // 2, "d_state": shape.dstate, "headdim": shape.headdim,
             "ngroups": shape.ngroups}
    ours = Mamba2(**sizes, device=choose_device(), dtype=dtype)
    x = draw_normal(shape.batch, shape.seqlen, sizes["d_model"], dtype=dtype)

    def theirs():
        import causal_conv1d  # noqa: F401 - without which upstream's block does not run whole

        module = _mamba_ssm("modules.mamba2")
        made = module.Mamba2(**sizes, device=choose_device(), dtype=dtype)
        made.load_state_dict(ours.state_dict())
        # gradients are asked for by tensor: both sides compute on the same ones
        for name, parameter in ours.named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(made.get_submodule(owner), leaf, parameter)
        return lambda: made(x)

    return Work(lambda: ours(x), ("mamba_ssm", theirs), (x, *ours.parameters()), {})


def _mamba_ssm(module: str) -> ModuleType:
    """A module of mamba_ssm, imported without the rest of its package."""
    from ssd.interop.mamba_ssm import skip_its_init

    with skip_its_init():
        return import_module(f"mamba_ssm.{module}")


PARTS: dict[str, Callable[[Shape, torch.dtype], Work]] = dict(zip(
    BLOCK_PARTS, (make_conv1d, make_gated_norm, make_state_update, make_selective_scan, make_block), strict=True))
