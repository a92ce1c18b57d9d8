"""The ways in which a call is made: several times in a row on two sets of inputs in turn, so that launches are replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .poison import poison_memory
from .problem import Problem, Tensors, compute_gradients

Results = dict[str, Tensor]

WITHOUT_GRADIENT = ("no_grad", "inference")
ON_CPU = ("plain", "no_grad", "inference", "checkpoint", "compile")
MODES = (*ON_CPU, "streams", "capture")


def run(problems: list[Problem], cotangents: list[dict[str, Tensor]], mode: str, calls: int) -> list[tuple[int, Results]]:
    """`calls` calls on the problems in turn: which problem each was, and its outputs and gradients by name.

    Raises:
        ValueError: no such mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}")
    turns = [call % len(problems) for call in range(calls)]
    with nullcontext() if mode == "compile" else poison_memory():
        if mode == "capture":
            return list(_run_graph(problems, cotangents, turns))
        with _surround_calls(mode, problems[0]) as around:
            call = _prepare_call(problems[0], mode)
            results = []
            for n, turn in enumerate(turns):
                with around(n):
                    results.append((turn, _take_step(call, problems[turn], cotangents[turn])))
        return results


def _take_step(call: Callable[[Tensors], Results], problem: Problem, cotangents: dict[str, Tensor]) -> Results:
    outputs = call(problem.tensors)
    grads = compute_gradients(outputs, problem.tensors, problem.wanted, cotangents)
    return {name: t.detach() for name, t in outputs.items()} | grads


def _prepare_call(problem: Problem, mode: str) -> Callable[[Tensors], Results]:
    if mode == "compile":
        torch._dynamo.reset()
        return torch.compile(problem.run, fullgraph=True, backend="inductor" if _on_gpu(problem) else "aot_eager")
    if mode == "checkpoint":
        return lambda tensors: checkpoint(problem.run, tensors, use_reentrant=False)
    return problem.run


@contextmanager
def _surround_calls(mode: str, problem: Problem) -> Iterator[Callable]:
    """The context in which the n-th call is made."""
    if mode == "streams" and _on_gpu(problem):
        streams = [torch.cuda.Stream() for _ in range(2)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        yield lambda n: torch.cuda.stream(streams[n % 2])
        torch.cuda.synchronize()
    else:
        made = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, nullcontext)
        yield lambda n: made()


def _run_graph(problems: list[Problem], cotangents: list[dict[str, Tensor]], turns: list[int]) -> Iterator[tuple[int, Results]]:
    """The call in a CUDA graph, replayed on one problem's memory with the values of each."""
    first, given = problems[0], cotangents[0]
    warmups = 1 + first.seed % 3  # launches are recorded in the second call and replayed in the third
    values = [[None if t is None else t.detach().clone() for t in (*p.tensors.values(), *c.values())]
              for p, c in zip(problems, cotangents, strict=True)]
    places = [None if t is None else t.detach() for t in (*first.tensors.values(), *given.values())]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            _take_step(first.run, first, given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = _take_step(first.run, first, given)
    for turn in turns:
        for place, value in zip(places, values[turn], strict=True):
            if place is not None:
                place.copy_(value)
        graph.replay()
        yield turn, {name: t.clone() for name, t in results.items()}


def _on_gpu(problem: Problem) -> bool:
    return any(t is not None and t.is_cuda for t in problem.tensors.values())
