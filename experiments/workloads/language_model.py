"""A language model of pre-norm residual layers, which a pattern names one by one: Mamba-2, attention or MLP."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ssd.cost import Problem
from ssd.distributed import gather
from ssd.modules import Mamba2

from .layers import MLP, Attention, compute_again

MAMBA, ATTENTION, MLP_LAYER = "M", "*", "-"
IGNORED = -100  # the label of a token after which no other of its document comes
_LOGIT_TOKENS = 4096  # whose logits are held at a time, where activations are computed again


@dataclass(frozen=True)
class LanguageSizes:
    """Attributes:
        d_model: channels of the residual stream.
        pattern: a character for each layer, M (Mamba-2), * (attention) or - (MLP).
        vocab_size: tokens.
        tie_embeddings: the head's weight is the embedding's.
        d_state, headdim, ngroups, chunk_size: of Mamba-2.
        heads, kv_heads, attention_headdim: of attention.
    """

    d_model: int
    pattern: str
    vocab_size: int
    tie_embeddings: bool = False
    d_state: int = 128
    headdim: int = 64
    ngroups: int = 8
    chunk_size: int = 256
    heads: int = 0
    kv_heads: int = 0
    attention_headdim: int = 128

    def __post_init__(self):
        if unknown := set(self.pattern) - {MAMBA, ATTENTION, MLP_LAYER}:
            raise ValueError(f"pattern: got {''.join(sorted(unknown))!r} in {self.pattern!r}, expected M, * and - alone")


class LanguageModel(nn.Module):
    """Token ids to the logits of the next.

    At the start linear weights and the embedding are normal with deviation 0.02, those of each layer's output smaller by the
    square root of the number of layers, so that their sum is as large as one of them; Mamba-2's A, dt and D are as `Mamba2`
    draws them.

    Args:
        sizes: of the model.
        variant: of the Mamba-2 layers, see `ssd.ssd_chunk_scan`.
        checkpoint_activations: the backward computes each layer, and the logits of 4,096 tokens at a time, again from the
            residual stream, which alone is kept.

    Attributes:
        context_group: the ranks that sequences are cut over; None unless it is set, here and in the mixers.
    """

    context_group: ProcessGroup | None = None

    def __init__(self, sizes: LanguageSizes, variant: str = "auto", checkpoint_activations: bool = False):
        super().__init__()
        self.sizes, self.checkpoint_activations = sizes, checkpoint_activations
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.layers = nn.ModuleList(_Layer(sizes, kind, variant) for kind in sizes.pattern)
        self.norm_f = nn.RMSNorm(sizes.d_model, eps=1e-5)
        self.lm_head = nn.Linear(sizes.d_model, sizes.vocab_size, bias=False)
        if sizes.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.loss = _Loss()
        self._initialise()

    @property
    def compiled_beside_layers(self) -> list[nn.Module]:
        """What torch.compile takes besides layers."""
        return [self.loss]

    def forward(self, input_ids: Tensor, seq_idx: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Args:
            input_ids: (batch, seqlen) int64.
            seq_idx: (batch, seqlen) int32, the document of each token, which rises along a row.
            labels: (batch, seqlen) int64, IGNORED where there is none.

        Returns:
            Logits (batch, seqlen, vocab_size), in the dtype of the weights or of autocast; with labels, the sum of their
            cross-entropies in nats, () fp32.
        """
        packed = seq_idx is not None and ATTENTION in self.sizes.pattern
        beside = {MAMBA: (seq_idx,), ATTENTION: (self._gather(seq_idx) if packed else None,), MLP_LAYER: ()}
        residual, again = self.embedding(input_ids), self.checkpoint_activations and self.training
        for kind, layer in zip(self.sizes.pattern, self.layers, strict=True):
            residual = compute_again(layer, residual, *beside[kind]) if again else layer(residual, *beside[kind])
        if labels is None:
            return self.lm_head(self.norm_f(residual))
        residual, labels = residual.flatten(0, 1), labels.flatten()
        if not self.checkpoint_activations:
            return self._sum_losses(residual, labels)
        pieces = zip(residual.split(_LOGIT_TOKENS), labels.split(_LOGIT_TOKENS), strict=True)
        return torch.stack([compute_again(self._sum_losses, *piece) for piece in pieces]).sum()

    def _sum_losses(self, residual: Tensor, labels: Tensor) -> Tensor:
        device = residual.device.type
        # without autocast's cache, by which the head's gradients of all pieces would be added up in bf16
        with torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), cache_enabled=False):
            logits = self.lm_head(self.norm_f(residual))
        return self.loss(logits, labels)

    def _gather(self, seq_idx: Tensor) -> Tensor:
        """The documents of all tokens, gathered where a rank has a part of them."""
        if self.context_group is None:
            return seq_idx
        return gather(self.context_group, seq_idx)[0].transpose(0, 1).flatten(1)

    @torch.no_grad()
    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                is_output = name.endswith("out_proj")
                nn.init.normal_(module.weight, std=0.02 / (len(self.layers) ** 0.5 if is_output else 1))


class _Layer(nn.Module):
    """A mixer and the norm before it; adds its result to the residual stream."""

    def __init__(self, sizes: LanguageSizes, kind: str, variant: str):
        super().__init__()
        self.norm = nn.RMSNorm(sizes.d_model, eps=1e-5)
        match kind:
            case "M":
                self.mixer = Mamba2(sizes.d_model, d_state=sizes.d_state, headdim=sizes.headdim, ngroups=sizes.ngroups,
                                    chunk_size=sizes.chunk_size, variant=variant)
            case "*":
                self.mixer = Attention(sizes.d_model, sizes.heads, sizes.kv_heads, sizes.attention_headdim)
            case "-":
                self.mixer = MLP(sizes.d_model)

    def forward(self, residual: Tensor, *beside: Tensor | None) -> Tensor:
        """beside: what the mixer takes besides its input."""
        return residual + self.mixer(self.norm(residual), *beside)


class _Loss(nn.Module):
    """Logits (tokens, vocab_size) to the sum of their cross-entropies in nats, fp32; compiled, it makes no logits in fp32."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next token in nats, over the tokens that have one; batch: as `text.Rows` has it."""
    total = model(batch["input_ids"], batch.get("seq_idx"), batch["labels"])
    return total / count_labelled(batch).clamp(min=1)  # of documents of one token nothing can be learnt


def list_scans(sizes: LanguageSizes, batch: int, seqlen: int) -> list[Problem]:
    """The scan of each Mamba-2 layer."""
    nheads = 2 * sizes.d_model // sizes.headdim
    one = Problem(batch, seqlen, nheads, sizes.headdim, sizes.d_state, sizes.ngroups, sizes.chunk_size)
    return [one] * sizes.pattern.count(MAMBA)


def count_labelled(batch: dict[str, Tensor]) -> Tensor:
    """How many tokens have a next one, a number on the batch's device."""
    return (batch["labels"] != IGNORED).sum()
