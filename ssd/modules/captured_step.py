"""One token of a language model in a CUDA graph: tokens, logits and states stay in the same memory from step to step.

A token takes hundreds of small launches, which a CPU makes more slowly than a GPU runs them; a graph makes them as one.
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

if TYPE_CHECKING:
    from .language_model import Mamba2LM


class Mamba2LMCache(list[Mamba2Cache]):
    """What each block knows of the tokens so far, and the captured step that takes them further, once there is one.

    `Mamba2LM.generate` with the same cache replays the same graph. A copy has tensors of its own, and no graph of them.
    """

    captured: CapturedStep | None = None

    def reset(self) -> None:
        """Forgets every token, so that another prompt can begin; the graph stays."""
        for name in ("conv_state", "ssm_state") if self else ():
            torch._foreach_zero_([getattr(layer, name) for layer in self])  # two launches, not two a layer

    def __reduce__(self):
        return type(self), ([*self],)

    def copy(self) -> Mamba2LMCache:
        """As copy.deepcopy, which copy.copy is, too."""
        return deepcopy(self)

    __copy__ = copy


class CapturedStep:
    """`Mamba2LM.step` with one cache, as a CUDA graph.

    The first call makes its launches one by one, since kernels are compiled and loaded in it; the second captures them.
    """

    def __init__(self, model: Mamba2LM, cache: Sequence[Mamba2Cache], batch: int, device: torch.device):
        self.model, self.cache = model, [*cache]
        with torch.inference_mode(False):  # a cache may keep it for calls outside of inference mode
            self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None
        self.replay: Callable[[], object] | None = None
        self.addresses, self.is_warm = _list_addresses(model, cache), False

    def __call__(self, token: Tensor) -> Tensor:
        """(batch,) integers to logits (batch, padded_vocab_size), which the next call overwrites.

        Raises:
            RuntimeError: something in the step cannot be captured; torch may then not draw numbers on this GPU any more.
        """
        self.token.copy_(token)
        if not self.is_warm:
            self.is_warm = True
            return warm_up(self.run, self.token.device)
        if self.replay is None:
            try:
                self.replay, self.logits = capture(self.run, self.token.device)
            except Exception as error:
                raise RuntimeError("the step of generation cannot be captured in a CUDA graph; with graph=False it runs launch "
                                   "by launch") from error
        self.replay()
        return self.logits

    def run(self) -> Tensor:
        """What is captured."""
        return self.model.step(self.token, self.cache)

    def fits(self, model: Mamba2LM, cache: Sequence[Mamba2Cache], batch: int) -> bool:
        """True when a replay does what a step of this model with this cache would."""
        return len(self.token) == batch and self.addresses == _list_addresses(model, cache)


def explain_refusal(model: Mamba2LM, device: torch.device) -> str | None:
    """Why a step cannot be captured now; None if it can."""
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
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
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
    """Where everything lies that a step reads and writes: weights that moved, or changed their dtype, need another graph."""
    tensors = chain(model.parameters(), model.buffers(), *((layer.conv_state, layer.ssm_state) for layer in cache))
    return [(t.data_ptr(), t.dtype) for t in tensors]
