"""The layers of a hybrid that are not Mamba-2: attention and MLP, as arXiv:2406.07887 has them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal attention with grouped queries, without bias and positional encoding; (batch, seqlen, d_model) to the same.

    Args:
        d_model: channels in and out.
        heads, kv_heads: of the queries, and of keys and values, each of which serves heads / kv_heads consecutive queries.
        headdim: channels of a head.
    """

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
        # torch's attention that takes a mask and keeps no scores does not know groups
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out_proj(y.transpose(1, 2).flatten(2))


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
    seqlen = seq_idx.shape[1]
    causal = torch.ones(seqlen, seqlen, dtype=torch.bool, device=seq_idx.device).tril()
    return ((seq_idx[:, :, None] == seq_idx[:, None, :]) & causal)[:, None]
