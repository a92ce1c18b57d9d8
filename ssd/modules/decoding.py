"""Generation: a prompt through the SSD's kernels, then token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runtime.tuning import next_power_of_2
from .captured import MOST_CHANNELS, Captured, Mamba2LMCache, explain_model, explain_moment
from .mamba2 import Mamba2Cache
from .sampling import Sampling

if TYPE_CHECKING:
    from .language_model import Mamba2LM

_WORTH_A_GRAPH = 8  # steps: a capture takes as long as a few of them
_MOST_PADDED = 1 << 22  # channels of all tokens of a prompt: up to here launching takes longer than twice the computing


@torch.no_grad()
def decode(model: Mamba2LM, input_ids: Tensor, mask: Tensor | None, max_new_tokens: int, cache: Sequence[Mamba2Cache],
           stops: tuple[int, ...], sampling: Sampling, graph: bool | None, reads: bool) -> Iterator[Tensor]:
    """The new tokens of each sequence, (batch,) at a time in the dtype of input_ids, until all have ended.

    Args:
        input_ids, mask: as `align_right` gives them.
        stops: tokens that end a sequence; the first then fills it up.
        graph: as of `Mamba2LM.stream`.
        reads: whether the prompt is captured as well, of `captures_prompt`.
    """
    long = max_new_tokens > _WORTH_A_GRAPH
    device = input_ids.device
    captured = _find_graphs(model, device, cache, graph, reads or long, input_ids if reads and mask is None else None)
    reads = reads and captured is not None
    if reads and mask is None and wants_padding(model, input_ids, cache):
        input_ids, mask = pad_left(input_ids)
    if isinstance(cache, Mamba2LMCache):
        cache.mark_used()
    if reads:
        logits, fits = captured.read(input_ids, mask)
        if not fits:
            cache.captured = None
            captured = _find_graphs(model, device, cache, graph, long)
    else:
        logits = model.read(input_ids, mask, cache)
    ends = torch.tensor(stops, dtype=input_ids.dtype, device=device)
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=device)
    step = None
    for left in reversed(range(max_new_tokens)):
        token = sampling.choose(logits[:, : model.config.vocab_size]).to(input_ids.dtype)
        if stops:
            token = token.masked_fill(ended, stops[0])
            ended = ended | (token[:, None] == ends).any(1)  # not in place: inference mode may begin or end on the way
        yield token
        if not left or (stops and ended.all()):
            return
        if step is None:
            step = captured.step if captured and (graph or captured.one or long) else partial(model.step, cache=cache)
        logits = step(token)


def check_graph(model: Mamba2LM, device: torch.device, graph: bool | None) -> None:
    """Raises:
        TypeError, ValueError: it is not True, False or None; or steps are to be captured, and cannot.
    """
    if graph is not None and not isinstance(graph, bool):
        raise TypeError(f"graph: got {graph!r}, expected True, False or None")
    if graph and (reason := explain_moment(device) or explain_model(model, device)):
        raise ValueError(f"graph: got True, expected False or None: {reason}")


def _find_graphs(model: Mamba2LM, device: torch.device, cache: Sequence[Mamba2Cache], graph: bool | None, worth: bool,
                 prompt: Tensor | None = None) -> Captured | None:
    """What holds the graphs of this model with this cache; None where there are none, and none is worth it.

    prompt: what `Captured.read` is given next, without a mask: if it only replays it, that looks at most of the model itself.
    """
    keeps = isinstance(cache, Mamba2LMCache)
    kept = cache.captured if keeps else None
    if graph is False or (graph is None and (not (worth or kept) or explain_moment(device))):
        return None
    # who pads must know before whether somebody looks into a layer
    begins = kept is not None and prompt is not None and not cache.pad_prompts and kept.has_replay(prompt)
    if kept and kept.fits(model, cache, begins):
        return kept
    if explain_model(model, device):
        return None
    made = Captured(model, cache)
    if keeps:
        cache.captured = made
    return made


def captures_prompt(model: Mamba2LM, input_ids: Tensor, cache: Sequence[Mamba2Cache] | None, graph: bool | None) -> bool:
    """Whether a prompt is to be captured, if the model allows it: for a cache that may come again with others of its shape."""
    return (isinstance(cache, Mamba2LMCache) and graph is not False
            and input_ids.numel() * model.config.d_model <= MOST_CHANNELS and not explain_moment(input_ids.device))


def wants_padding(model: Mamba2LM, input_ids: Tensor, cache: Mamba2LMCache) -> bool:
    """Whether a prompt is to be padded, for which the cache must have had no token."""
    return cache.pad_prompts and cache.is_new() and input_ids.numel() * model.config.d_model <= _MOST_PADDED


def pad_left(input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Prompts of one length to a power of two, by the first token of each, and which columns are theirs; None if all are."""
    batch, length = input_ids.shape
    width = next_power_of_2(length)
    if length == width:
        return input_ids, None
    mask = torch.arange(width, device=input_ids.device) >= width - length
    padding = input_ids[:, :1].expand(batch, width - length)
    return torch.cat([padding, input_ids], 1), mask.expand(batch, width).contiguous()


def list_stops(eos_token_id: int | Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a sequence.

    Raises:
        TypeError, ValueError: one of them is no token.
    """
    stops = () if eos_token_id is None else tuple(eos_token_id) if isinstance(eos_token_id, Sequence) else (eos_token_id,)
    for stop in stops:
        if isinstance(stop, bool) or not isinstance(stop, int):
            raise TypeError(f"eos_token_id: got {stop!r}, expected an int, several, or None")
        if not 0 <= stop < vocab_size:
            raise ValueError(f"eos_token_id: got {stop}, expected tokens from 0 to {vocab_size - 1}")
    return stops


def align_right(input_ids: Tensor, attention_mask: Tensor | None, few: bool) -> tuple[Tensor, Tensor | None]:
    """Prompts of unequal lengths that end in the same column, and which of its columns are theirs; None if all are.

    Args:
        input_ids: (batch, seqlen) integers.
        attention_mask: (batch, seqlen) of True or 1 at tokens, False or 0 at padding, to the left or right of them.
        few: whether there are to be few widths, powers of two or that of input_ids; else there is no column of padding alone.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """
    if attention_mask is None:
        return input_ids, None
    _check_mask(attention_mask, input_ids)
    mask = attention_mask != 0
    lengths, columns = mask.sum(1, keepdim=True), torch.arange(mask.shape[1], device=mask.device)
    first = mask.int().argmax(1, keepdim=True)
    if bool(((columns >= first) & (columns < first + lengths) != mask).any()):
        raise ValueError("attention_mask: got padding between tokens of a row, expected it to their left or right")
    shortest, longest = map(int, lengths.aminmax())
    if not shortest:
        raise ValueError("attention_mask: got a row without a token, expected at least one in each")
    moved = (columns + first + lengths) % mask.shape[1]  # the last token of a row goes to the last column
    width = min(mask.shape[1], next_power_of_2(longest)) if few else longest
    ids, mask = (t.gather(1, moved)[:, -width:] for t in (input_ids, mask))
    return ids.masked_fill(~mask, 0), None if shortest == width else mask.contiguous()


def _check_mask(attention_mask: object, input_ids: Tensor) -> None:
    shape = tuple(input_ids.shape)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask: got {type(attention_mask).__name__}, expected a tensor {shape}")
    if attention_mask.dtype not in (torch.bool, torch.int32, torch.int64):
        raise TypeError(f"attention_mask: got {attention_mask.dtype}, expected torch.bool, torch.int32 or torch.int64")
    if attention_mask.shape != shape:
        raise ValueError(f"attention_mask: got shape {tuple(attention_mask.shape)}, expected {shape}, that of input_ids")
    if attention_mask.device != input_ids.device:
        raise ValueError(f"attention_mask: got a tensor on {attention_mask.device}, expected {input_ids.device}, as input_ids")
    if attention_mask.dtype != torch.bool and bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError("attention_mask: got other values, expected 1 at tokens and 0 at padding")
