"""Tokens of a language model in CUDA graphs: tokens, logits and states stay in the same memory from call to call.

A token takes hundreds of small launches, and so does a prompt, which a CPU makes more slowly than a GPU runs them; one graph
replaces those of a token, a few those of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cache as cached
from functools import partial
from itertools import pairwise
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..runtime import value_checks
from .mamba2 import Mamba2Cache
from .token_step import is_seen, list_modules

if TYPE_CHECKING:
    from .language_model import Mamba2LM

MOST_CHANNELS = 1 << 25  # of all tokens of a prompt: beyond, a graph saves less than a hundredth, and keeps 1.8 GB
_MOST_PROMPTS = 8  # shapes of them, of a cache; together of twice as many channels at most
_alone = RLock()  # or the launches of one thread in the side stream would be captured by another


class Mamba2LMCache(list[Mamba2Cache]):
    """What each block knows of the tokens so far, and what was captured to take them further, once there is something.

    `Mamba2LM.generate` with the same cache replays the same graphs. A copy has tensors of its own, and no graph of them.

    Attributes:
        pad_prompts: of `Mamba2LM.new_cache`.
    """

    captured: Captured | None = None
    pad_prompts: bool = False
    _zeroed: tuple | None = None  # states when last zeroed, held lest others get their memory, and their `_get_versions`

    def reset(self) -> None:
        """Forgets every token, so that another prompt can begin; the graphs stay."""
        for name in ("conv_state", "ssm_state") if self else ():
            torch._foreach_zero_([getattr(layer, name) for layer in self])  # two launches, not two a layer
        self.mark_new()

    def mark_new(self) -> None:
        """Notes that all states are zeros, unless they are tensors of inference mode, which have no versions. Where no prompts
        are padded nobody asks, and it would take the host's time.
        """
        self._zeroed = None
        if self.pad_prompts:
            states = _list_states(self)
            if not any(t.is_inference() for t in states):
                self._zeroed = states, _get_versions(states)

    def mark_used(self) -> None:
        """Notes that states may change without a new version: by a replay, through `.data` or numpy."""
        self._zeroed = None

    def is_new(self) -> bool:
        """True while all states are known to be zeros; the GPU is not asked. Only where prompts are padded."""
        return self._zeroed is not None and self._zeroed[1] == _get_versions(_list_states(self))

    def __reduce__(self):
        return type(self), ([*self],), {"pad_prompts": self.pad_prompts}

    def copy(self) -> Mamba2LMCache:
        """As copy.deepcopy, which copy.copy is, too."""
        return deepcopy(self)

    __copy__ = copy


class Captured:
    """`Mamba2LM.step` and `Mamba2LM.read` with one cache, as CUDA graphs: of a step, and of the prompts' shapes that came last.

    Results are overwritten by the next call. The model is not kept alive.
    """

    def __init__(self, model: Mamba2LM, cache: Sequence[Mamba2Cache]):
        self.model, self.cache, self.states = ref(model), [*cache], _describe_memory(_list_states(cache))
        self.parts = model.list_parts()
        self.places = [_list_places(model, part) for part in self.parts]
        self.one: _Chain | None = None
        self.prompts: dict[tuple, _Chain] = {}

    def fits(self, model: Mamba2LM, cache: Sequence[Mamba2Cache], begins: bool = False) -> bool:
        """True when a replay does what this model does with this cache, if its modules' settings are as they were.

        begins: only the first part is looked at; `read` looks at each of the others before its replay.
        """
        indices = range(1 if begins else len(self.parts))
        return (self.model() is model and self.states == _describe_memory(_list_states(cache))
                and all(map(self._fits_part, indices)))

    def has_replay(self, input_ids: Tensor) -> bool:
        """Whether `read` would only replay a prompt of this shape, without a mask."""
        chain = self.prompts.get((1, *input_ids.shape))
        return chain is not None and bool(chain.replays)

    def step(self, token: Tensor) -> Tensor:
        """(batch,) integers to logits (batch, padded_vocab_size).

        Raises:
            RuntimeError: something in it cannot be captured; torch may then not draw numbers on this GPU any more.
        """
        model = self.model()
        self.one = self.one or _Chain(token)
        return self.one([lambda given: model.step(*given, cache=self.cache)], (token,))[0]

    def read(self, input_ids: Tensor, mask: Tensor | None) -> tuple[Tensor, bool]:
        """A prompt (batch, seqlen), or a piece of one, to the logits after it; and whether the model fits. Raises as `step`.

        In a replay the host looks at a part of the layers while the GPU computes the part before. A part that does not fit is
        launched, and so are those after it.
        """
        model, given = self.model(), (input_ids,) if mask is None else (input_ids, mask)
        key = len(given), *input_ids.shape
        chain = self.prompts.pop(key, None) or _Chain(*given)
        self.prompts[key] = chain  # the last of them now
        most = 2 * MOST_CHANNELS / model.config.d_model  # tokens of all
        while len(self.prompts) > _MOST_PROMPTS or sum(batch * seqlen for _, batch, seqlen in self.prompts) > most:
            del self.prompts[next(iter(self.prompts))]
        if len(self.parts) == 1:
            return chain([lambda given: model.read(*given, cache=self.cache)], given)
        return chain([partial(model.read_part, part, cache=self.cache) for part in self.parts], given, self._fits_part)

    def _fits_part(self, index: int) -> bool:
        """Whether what a part's graphs read is where it was."""
        return self.places[index] == _list_places(self.model(), self.parts[index])


class _Chain:
    """Calls, each given what the one before returned, with tensors that stay in the same memory.

    The first time they are launched, since kernels are compiled and loaded then; the second time each is captured as a CUDA
    graph, in memory of their own; later they are replayed.
    """

    def __init__(self, *like: Tensor):
        with torch.inference_mode(False):  # a cache may keep it for calls outside of inference mode
            self.given = tuple(torch.zeros_like(t, dtype=t.dtype if t.dtype == torch.bool else torch.int64) for t in like)
        self.replays: list[Callable[[], object]] = []
        self.results: list = []
        self.is_warm = False

    def __call__(self, calls: Sequence[Callable], given: tuple[Tensor, ...],
                 fits: Callable[[int], bool] = lambda index: True) -> tuple[Tensor, bool]:
        """What the last call returns, and whether all that are replayed still fit.

        fits: whether the call of that number is still the one that was captured; asked before each replay but the first.
        """
        for own, t in zip(self.given, given, strict=True):
            own.copy_(t)
        device = self.given[0].device
        if not self.is_warm:
            result = warm_up(partial(_call_in_turn, calls, self.given), device)
            self.is_warm = True
            return result, True
        if not self.replays:
            self.is_warm = False  # unless this succeeds, the next call is launched
            try:
                self._capture(calls, device)
            except Exception as error:
                raise RuntimeError("generation cannot be captured in a CUDA graph; with graph=False it runs launch by launch"
                                   ) from error
            self.is_warm = True
        for index, replay in enumerate(self.replays):
            if index and not fits(index):
                return _call_in_turn(calls[index:], self.results[index - 1]), False
            replay()
        return self.results[-1], True

    def _capture(self, calls: Sequence[Callable], device: torch.device) -> None:
        replays, results, pool = [], [self.given], torch.cuda.graph_pool_handle()
        for call in calls:
            replay, result = capture(partial(call, results[-1]), device, pool)
            replays.append(replay)
            results.append(result)
        self.replays, self.results = replays, results[1:]


def _call_in_turn(calls: Sequence[Callable], given: tuple[Tensor, ...]) -> Tensor:
    """What the last returns, each given what the one before returned."""
    for call in calls:
        given = call(given)
    return given


def split_layers(layers: int) -> list[range]:
    """Parts of 1, 2, 4, ... layers, so that the GPU has more to do with one than the host with the next. What is left in the
    end, if it is less than half a part, joins the last.
    """
    starts = [0]
    while (following := 2 * starts[-1] + 1) * 3 // 2 < layers:
        starts.append(following)
    return [range(*ends) for ends in pairwise([*starts, layers])]


def explain_moment(device: torch.device) -> str | None:
    """Why nothing can be captured, or replayed, here and now; None if it can."""
    if device.type != "cuda":
        return f"the tokens are on {device}, and CUDA graphs need a GPU"
    if torch.is_autocast_enabled("cuda"):
        return "autocast casts weights into memory of its own, which a graph would read after it was freed"
    if value_checks.ENABLED:
        return "SSD_CHECK=1 reads every token"
    if torch.cuda.is_current_stream_capturing():
        return "another graph is being captured"
    return None


def explain_model(model: Mamba2LM, device: torch.device) -> str | None:
    """Why nothing of the model can be captured; None if it can."""
    if elsewhere := {layer.mixer.A_log.device for layer in model.backbone.layers} - {device}:
        return f"layers are on {', '.join(sorted(map(str, elsewhere)))} too, and a graph is of one GPU"
    if is_seen(model):
        return "the model has forward hooks, or a forward that was put in place of its own, which a replay would not call"
    others = {type(t).__name__ for t in _list_weights(list_modules(model)) if type(t) not in (Tensor, nn.Parameter)}
    return f"weights are of the class {', '.join(sorted(others))}, whose memory is not known" if others else None


def warm_up(run: Callable[[], Tensor], device: torch.device) -> Tensor:
    """run(), in the stream that will capture it."""
    with _alone:
        side, current = get_side_stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            out = run()
        current.wait_stream(side)
        out.record_stream(current)
        return out


def capture(run: Callable, device: torch.device, pool: tuple[int, int]) -> tuple[Callable[[], object], Any]:
    """What replays run(), and where its result then lies. Nothing runs yet. pool: of memory, which graphs may share."""
    graph, side = torch.cuda.CUDAGraph(), get_side_stream(device)
    # this context as well: a capture that fails leaves its own without going back to the stream before
    with _alone, torch.cuda.stream(side), torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
        out = run()
    return graph.replay, out


@cached
def get_side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device that captures."""
    return torch.cuda.Stream(device)


def _list_weights(modules: Iterable[nn.Module]) -> list[Tensor]:
    found = []
    for one in modules:
        for own in (one._parameters, one._buffers):
            if own:
                found += own.values()
    return [t for t in found if t is not None]


def _list_places(model: Mamba2LM, part: range) -> tuple[list, ...] | None:
    """The memory that a graph of these layers reads, and with the first layer that of embedding, norm and head: weights that
    moved, or are others now, need another graph. None where something `is_seen`.
    """
    layers = [*model.backbone.layers]
    found = [list_modules(layer) for layer in layers[part.start : part.stop]]
    if not part.start:
        found.append(list_modules(model, without=model.backbone.layers))
    if None in found:
        return None
    return len(layers), *_describe_memory(_list_weights([one for modules in found for one in modules]))


def _describe_memory(tensors: Sequence[Tensor]) -> tuple[list, ...]:
    forms = [(t.dtype, t.shape, t.stride()) for t in tensors]
    return [t.data_ptr() for t in tensors], forms, [*map(type, tensors)]


def _list_states(cache: Sequence[Mamba2Cache]) -> list[Tensor]:
    return [t for layer in cache for t in (layer.conv_state, layer.ssm_state)]


def _get_versions(states: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where each tensor is, and how often torch has written to it."""
    return [(t.data_ptr(), t._version) for t in states]
