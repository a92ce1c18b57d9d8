"""Tokens of a language model in CUDA graphs: tokens, logits and states stay in the same memory from call to call.

A token takes hundreds of small launches, and so does a prompt, which a CPU makes more slowly than a GPU runs them; a graph
makes them as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache as cached
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runtime import value_checks
from .mamba2 import Mamba2Cache
from .token_step import list_modules

if TYPE_CHECKING:
    from .language_model import Mamba2LM

_MOST_PROMPTS = 4  # shapes of them, of a cache


class Mamba2LMCache(list[Mamba2Cache]):
    """What each block knows of the tokens so far, and what was captured to take them further, once there is something.

    `Mamba2LM.generate` with the same cache replays the same graphs. A copy has tensors of its own, and no graph of them.
    """

    captured: Captured | None = None

    def reset(self) -> None:
        """Forgets every token, so that another prompt can begin; the graphs stay."""
        for name in ("conv_state", "ssm_state") if self else ():
            torch._foreach_zero_([getattr(layer, name) for layer in self])  # two launches, not two a layer

    def __reduce__(self):
        return type(self), ([*self],)

    def copy(self) -> Mamba2LMCache:
        """As copy.deepcopy, which copy.copy is, too."""
        return deepcopy(self)

    __copy__ = copy


class Captured:
    """`Mamba2LM.step` and `Mamba2LM.read` with one cache, as CUDA graphs: of a step, and of the prompts' shapes that came last.

    Results are overwritten by the next call.
    """

    def __init__(self, model: Mamba2LM, cache: Sequence[Mamba2Cache]):
        self.model, self.cache, self.addresses = model, [*cache], _list_addresses(model, cache)
        # of memory, for all: no two run at once
        self.pool = torch.cuda.graph_pool_handle() if cache[0].ssm_state.is_cuda else None
        self.one: _Graph | None = None
        self.prompts: dict[tuple, _Graph] = {}

    def fits(self, model: Mamba2LM, cache: Sequence[Mamba2Cache]) -> bool:
        """True when a replay does what this model with this cache would do."""
        return self.addresses == _list_addresses(model, cache)

    def step(self, token: Tensor) -> Tensor:
        """(batch,) integers to logits (batch, padded_vocab_size).

        Raises:
            RuntimeError: something in it cannot be captured; torch may then not draw numbers on this GPU any more.
        """
        self.one = self.one or _Graph(self.model.step, self.cache, self.pool, token)
        return self.one(token)

    def read(self, input_ids: Tensor, mask: Tensor | None) -> Tensor:
        """A prompt (batch, seqlen), or a piece of one, to the logits after it. Raises as `step`."""
        given = (input_ids,) if mask is None else (input_ids, mask)
        key = len(given), *input_ids.shape
        graph = self.prompts.pop(key, None) or _Graph(self.model.read, self.cache, self.pool, *given)
        self.prompts[key] = graph  # the last of them now
        if len(self.prompts) > _MOST_PROMPTS:
            del self.prompts[next(iter(self.prompts))]
        return graph(*given)


class _Graph:
    """A call with one cache, as a CUDA graph, of tensors that stay in the same memory.

    The first call makes its launches one by one, since kernels are compiled and loaded in it; the second captures them.
    """

    def __init__(self, call: Callable[..., Tensor], cache: list[Mamba2Cache], pool: tuple[int, int] | None, *like: Tensor):
        self.call, self.cache, self.pool = call, cache, pool
        with torch.inference_mode(False):  # a cache may keep it for calls outside of inference mode
            self.given = [torch.zeros_like(t, dtype=t.dtype if t.dtype == torch.bool else torch.int64) for t in like]
        self.result: Tensor | None = None
        self.replay: Callable[[], object] | None = None
        self.is_warm = False

    def __call__(self, *given: Tensor) -> Tensor:
        for own, t in zip(self.given, given, strict=True):
            own.copy_(t)
        device = self.given[0].device
        if not self.is_warm:
            self.is_warm = True
            return warm_up(self.run, device)
        if self.replay is None:
            try:
                self.replay, self.result = capture(self.run, device, self.pool)
            except Exception as error:
                raise RuntimeError("generation cannot be captured in a CUDA graph; with graph=False it runs launch by launch"
                                   ) from error
        self.replay()
        return self.result

    def run(self) -> Tensor:
        """What is captured."""
        return self.call(*self.given, cache=self.cache)


def explain_refusal(model: Mamba2LM, device: torch.device) -> str | None:
    """Why nothing can be captured now; None if it can."""
    if device.type != "cuda":
        return f"the tokens are on {device}, and CUDA graphs need a GPU"
    if elsewhere := {layer.mixer.A_log.device for layer in model.backbone.layers} - {device}:
        return f"layers are on {', '.join(sorted(map(str, elsewhere)))} too, and a graph is of one GPU"
    if torch.is_autocast_enabled("cuda"):
        return "autocast casts weights into memory of its own, which a graph would read after it was freed"
    if value_checks.ENABLED:
        return "SSD_CHECK=1 reads every token"
    if torch.cuda.is_current_stream_capturing():
        return "another graph is being captured"
    if any(module._forward_hooks or module._forward_pre_hooks for module in list_modules(model)):
        return "the model has forward hooks, which a replay would not call"
    return None


def warm_up(run: Callable[[], Tensor], device: torch.device) -> Tensor:
    """run(), in the stream that will capture it."""
    side, current = get_side_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        out = run()
    current.wait_stream(side)
    out.record_stream(current)
    return out


def capture(run: Callable[[], Tensor], device: torch.device,
            pool: tuple[int, int] | None = None) -> tuple[Callable[[], object], Tensor]:
    """What replays run(), and where its result then lies. Nothing runs yet. pool: of memory, which graphs may share."""
    graph, side = torch.cuda.CUDAGraph(), get_side_stream(device)
    # this context as well: a capture that fails leaves its own without going back to the stream before
    with torch.cuda.stream(side), torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
        out = run()
    return graph.replay, out


@cached
def get_side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device that captures."""
    return torch.cuda.Stream(device)


def _list_addresses(model: Mamba2LM, cache: Sequence[Mamba2Cache]) -> list[tuple]:
    """Where everything lies that a graph reads and writes: weights that moved, or changed their dtype, need another graph."""
    weights = chain.from_iterable(chain(one._parameters.values(), one._buffers.values()) for one in list_modules(model))
    states = chain.from_iterable((layer.conv_state, layer.ssm_state) for layer in cache)
    return [(t.data_ptr(), t.dtype) for t in chain(weights, states) if t is not None]
