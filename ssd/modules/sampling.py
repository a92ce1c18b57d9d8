"""The choice of the next token from logits: the likeliest, or one drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..block.arguments import check_number, check_size
from ..types import FP32_LARGEST

_COLDEST = 1e-30  # logits that differ in fp32 are then so far apart that only the likeliest token is drawn


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 for the likeliest token; else tokens are drawn with probabilities softmax(logits / temperature).
        top_k: draw among that many of the likeliest tokens.
        top_p: draw among the likeliest tokens, as many as it takes for their probabilities to sum to top_p, in (0, 1]. With
            top_k, of those.
        generator: of random numbers, on the device of the logits; torch's own unless given.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self):
        check_number("temperature", self.temperature)
        if not 0 <= self.temperature <= FP32_LARGEST:
            raise ValueError(f"temperature: got {self.temperature!r}, expected 0, for the likeliest token, or a finite number "
                             "above it")
        if self.top_k is not None:
            check_size("top_k", self.top_k)
        if self.top_p is not None:
            check_number("top_p", self.top_p)
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p: got {self.top_p!r}, expected a number above 0, at most 1")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(f"generator: got {self.generator!r}, expected a torch.Generator or None; "
                            "torch.Generator(device).manual_seed(SEED) makes one")
        for name in ("top_k", "top_p", "generator"):
            if not self.temperature and getattr(self, name) is not None:
                raise ValueError(f"{name}: got {getattr(self, name)!r} with temperature 0, which draws nothing; expected None, "
                                 "or a temperature above 0")

    def check_device(self, device: torch.device) -> None:
        """Refuses a generator that cannot draw on this device."""
        if self.generator is not None and self.generator.device.type != device.type:
            raise ValueError(f"generator: got one on {self.generator.device}, expected one on {device}, where the model is")

    def choose(self, logits: Tensor) -> Tensor:
        """Token ids (batch,) int64 from logits (batch, tokens); does not wait for a GPU."""
        if not self.temperature:
            return logits.argmax(-1)
        logits = logits.float()
        # at most 0, so that a small temperature overflows nothing; one that is 0 in fp32 would make 0 / 0
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, _COLDEST)
        if self.top_k is None and self.top_p is None:
            return self._draw(logits.softmax(-1))
        likeliest, ids = logits.topk(min(self.top_k or logits.shape[-1], logits.shape[-1]))
        p = likeliest.softmax(-1)
        if self.top_p is not None:
            p = p.masked_fill(p.cumsum(-1) - p >= self.top_p, 0)  # the first is kept: before it the sum is 0
        return ids.gather(-1, self._draw(p)[:, None])[:, 0]

    def _draw(self, p: Tensor) -> Tensor:
        """Indices (batch,) from weights (batch, n), which need not sum to 1: the first of n exponential clocks to ring.

        As torch.multinomial draws one sample, but that reads from the GPU whether the weights are valid.
        """
        return (p / torch.empty_like(p).exponential_(generator=self.generator)).argmax(-1)
