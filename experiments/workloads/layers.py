"""The layers of a hybrid that are not Mamba-2: attention and MLP, as arXiv:2406.07887 has them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_QUERIES = 4096  # that attend at a time, where documents are kept apart


class Attention(nn.Module):
    """Causal attention with grouped queries, without bias and positional encoding; (batch, seqlen, d_model) to the same.

    Args:
        d_model: channels in and out.
        heads, kv_heads: of the queries, and of keys and values, each of which serves heads / kv_heads consecutive queries.
        headdim: channels of a head.

    Attributes:
        context_group: the ranks that sequences are cut over, in parts of one length; None unless it is set. Each then attends
            with its share of the heads, whose number the ranks divide, from all tokens.
    """

    context_group: dist.ProcessGroup | None = None

    def __init__(self, d_model: int, heads: int, kv_heads: int, headdim: int):
        super().__init__()
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"kv_heads: got {kv_heads}, expected a divisor of heads = {heads}")
        self.heads, self.kv_heads, self.headdim = heads, kv_heads, headdim
        self.in_proj = nn.Linear(d_model, (heads + 2 * kv_heads) * headdim, bias=False)
        self.out_proj = nn.Linear(heads * headdim, d_model, bias=False)

    def forward(self, u: Tensor, documents: Tensor | None = None) -> Tensor:
        """documents: (batch, seqlen), that of each token, of all ranks' tokens; None where a row is one document."""
        heads = self.in_proj(u).unflatten(-1, (-1, self.headdim)).transpose(1, 2)  # [batch, heads, seqlen, headdim]
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.context_group is not None:
            q, k, v = (_gather_tokens(t, self.context_group) for t in (q, k, v))
        # torch's attention that takes a mask and keeps no scores does not know groups
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if documents is None else _attend(q, k, v, documents)
        if self.context_group is not None:
            y = _gather_heads(y, self.context_group)
        return self.out_proj(y.transpose(1, 2).flatten(2))


def _attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Causal attention within documents; all (batch, heads, seqlen, headdim). Few queries at a time, and again in the backward:
    a mask of all pairs of tokens would grow with their square.
    """
    if q.shape[2] <= _QUERIES:
        return _attend_from(0, q, k, v, documents)
    parts = []
    for first, queries in zip(range(0, q.shape[2], _QUERIES), q.split(_QUERIES, 2), strict=True):
        end = first + _QUERIES
        parts.append(compute_again(_attend_from, first, queries, k[:, :, :end], v[:, :, :end], documents[:, :end]))
    return torch.cat(parts, 2)


def _attend_from(first: int, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """q: of the tokens from `first` on."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(documents, first))


class _Deal(torch.autograd.Function):
    """(ranks, ...), of which each rank is sent its own, to what every rank sent this one."""

    @staticmethod
    def forward(ctx, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, received = group, torch.empty_like(t, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, t.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _Deal.apply(grad, ctx.group), None


def _gather_tokens(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, heads, tokens of this rank, headdim) to (batch, heads of this rank, tokens, headdim)."""
    by_heads = t.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0)
    return _Deal.apply(by_heads, group).movedim(0, 2).flatten(2, 3)


def _gather_heads(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The other way."""
    by_tokens = t.unflatten(2, (dist.get_world_size(group), -1)).movedim(2, 0)
    return _Deal.apply(by_tokens, group).movedim(0, 1).flatten(1, 2)


class MLP(nn.Module):
    """Four times as wide inside, GELU without a gate; (..., d_model) to the same."""

    def __init__(self, d_model: int):
        super().__init__()
        self.in_proj = nn.Linear(d_model, 4 * d_model, bias=False)
        self.out_proj = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        return self.out_proj(F.gelu(self.in_proj(u)))


def compute_again(function: Callable[..., Tensor], *args: object) -> Tensor:
    """function(*args), of which the backward keeps the arguments alone."""
    # nothing here draws, and a CUDA graph cannot hold what keeps the generator's state
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def document_mask(documents: Tensor, first: int = 0) -> Tensor:
    """What each token from `first` on attends to: itself and those before it in its document.

    Args:
        documents: (batch, seqlen), that of each token.

    Returns:
        (batch, 1, seqlen - first, seqlen), True where the token of the row attends to that of the column.
    """
    return (documents[:, first:, None] == documents[:, None, :]).tril_(first)[:, None]
