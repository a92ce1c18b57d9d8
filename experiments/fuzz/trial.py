"""One configuration, run and judged."""

import time
import traceback
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd.runtime import replay

from . import judge, modes
from .layouts import lay_out
from .parts import PARTS, part_of
from .problem import Problem, Refused, compute_gradients

_SETS = 2  # of inputs, which take turns
_REASON_LINES, _REASON_FRAMES, _REASON_CHARACTERS = 12, 4, 300


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration.

    Attributes:
        status: "passed", "failed", "refused" (the variant does not take it) or "skipped" (memory ran out).
        why: what failed or was refused, the worst first.
        ratio: the largest share of a bound that an error took; 1 is all of it.
        seconds: that the trial took.
        replays: whether launches of this call were recorded, so that later calls replayed them.
        lost: the process can run no more, as after an illegal access of memory.
    """

    status: str
    why: str = ""
    ratio: float = 0.0
    seconds: float = 0.0
    replays: bool = False
    lost: bool = False

    @property
    def failed(self) -> bool:
        return self.status == "failed"


def run(config: object, device: str) -> Outcome:
    """Runs a configuration `config.calls` times and judges what came."""
    started = time.monotonic()

    def outcome(status: str, why: str = "", **more) -> Outcome:
        return Outcome(status, why, seconds=round(time.monotonic() - started, 2), **more)

    replay.clear()
    try:
        checks, differing = _results(config, device)
    except Refused as reason:
        return outcome("refused", str(reason))
    except torch.OutOfMemoryError as reason:
        torch.cuda.empty_cache()
        return outcome("skipped", str(reason).splitlines()[0])
    except Exception as reason:  # whatever a call raises on inputs that it should take is a finding
        where = traceback.format_exception(reason, chain=False)[-_REASON_FRAMES:]
        return outcome("failed", "\n".join([*_causes(reason), *"".join(where).splitlines()]), lost=_is_lost(reason))
    failed = differing + [check.what for check in sorted(checks, reverse=True) if not check.passed]
    worst = max(checks, default=judge.Check(0.0, ""))
    return outcome("failed" if failed else "passed", "\n".join(failed[:_REASON_LINES]) if failed else worst.what,
                   ratio=worst.ratio, replays=replay.has_recordings())


def _causes(reason: BaseException) -> list[str]:
    """A line of the exception and one of each behind it: a compiler's says in the last what is wrong."""
    lines = [f"{type(reason).__name__}: {' '.join(str(reason).split())[-_REASON_CHARACTERS:]}"]
    behind = reason.__cause__ or reason.__context__
    return lines if behind is None else lines + _causes(behind)


def _results(config: object, device: str) -> tuple[list[judge.Check], list[str]]:
    """The comparisons of a first call with the truth and of the last one on other inputs, and which calls' bits differ."""
    problems = [PARTS[part_of(config)].problem(config, turn, device) for turn in range(min(_SETS, config.calls))]
    truths, cotangents = zip(*(_truth(p) for p in problems), strict=True)
    mirrors = [[mirror(p.tensors, p.wanted, c) for mirror in p.mirrors] for p, c in zip(problems, cotangents, strict=True)]
    results = modes.run(problems, list(cotangents), config.mode, config.calls)
    if device == "cuda":
        torch.cuda.synchronize()
    slacks = [judge.compute_slacks(p, truth, c) for p, truth, c in zip(problems, truths, cotangents, strict=True)]
    first, checks, differing = {}, [], []
    for call, (turn, got) in enumerate(results):
        if got.keys() != truths[turn].keys():
            return checks, [f"results: got {sorted(got)}, expected {sorted(truths[turn])}"]
        if problems[turn].exact and turn in first:
            differing += [f"{name}: call {call + 1} gives other bits than call {first[turn][0] + 1} on the same inputs"
                          for name, value in got.items() if not _same(value, first[turn][1][name])]
        elif turn not in first or not problems[turn].exact:
            for name, value in got.items():
                others = [mirror[name] for mirror in mirrors[turn] if name in mirror]
                checks += judge.compare(name, value, truths[turn][name], others, problems[turn], slacks[turn].get(name, 0.0))
        first.setdefault(turn, (call, got))
    return checks, differing


def _truth(p: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and gradients in fp64, and the gradients that the outputs receive.

    These are noise, plus what a loss that pulls the outputs to zero would send: without that, sums over tokens would nearly
    cancel, and their relative errors say little.
    """
    tensors = {name: t if t is None or not t.is_floating_point() else t.detach().double().requires_grad_(name in p.wanted)
               for name, t in p.tensors.items()}
    with torch.set_grad_enabled(bool(p.wanted)):
        outputs = p.truth(tensors)
    cotangents = {}
    for name, dtype in p.ways.items():
        out = outputs[name].detach()
        layout = p.layouts.get(name, "contiguous")
        rng = torch.Generator(out.device).manual_seed(p.seed)
        noise = torch.randn(out.shape, generator=rng, device=out.device)
        given = (noise + out / out.square().mean().sqrt().clamp(min=1e-30)).to(dtype)
        cotangents[name] = torch.ones((), dtype=dtype, device=out.device).expand(out.shape) if layout == "scalar" else lay_out(
            given, layout)
    grads = compute_gradients(outputs, tensors, p.wanted, cotangents)
    return {name: t.detach() for name, t in outputs.items()} | grads, cotangents


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or not a.isfinite().all()  # what is not finite was found already


def _is_lost(reason: Exception) -> bool:
    """Whether the error is the GPU's, after which its context answers no more."""
    return isinstance(reason, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(reason)
