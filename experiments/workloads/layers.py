"""The layers of a hybrid that are not Mamba-2: attention and MLP, as arXiv:2406.07887 has them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


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

    def forward(self, u: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: of `document_mask`; None where a row is one document."""
        heads = self.in_proj(u).unflatten(-1, (-1, self.headdim)).transpose(1, 2)  # [batch, heads, seqlen, headdim]
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.context_group is not None:
            q, k, v = (_gather_tokens(t, self.context_group) for t in (q, k, v))
        # torch's attention that takes a mask and keeps no scores does not know groups
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        if self.context_group is not None:
            y = _gather_heads(y, self.context_group)
        return self.out_proj(y.transpose(1, 2).flatten(2))


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


def document_mask(seq_idx: Tensor) -> Tensor:
    """What each token attends to: itself and those before it in its document.

    Args:
        seq_idx: (batch, seqlen), the document of each token.

    Returns:
        (batch, 1, seqlen, seqlen), True where the token of the row attends to that of the column.
    """
    return (seq_idx[:, :, None] == seq_idx[:, None, :]).tril_()[:, None]
