"""What mixes the tokens of sequences that stand one after another in one row: Mamba-1, or Mamba-2's SSD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ssd.block import causal_conv1d_fn
from ssd.modules import Mamba2

from .mamba1 import choose_scan, draw_step_bias


@dataclass(frozen=True)
class Sequences:
    """Where tokens are whose sequences stand one after another, without padding.

    Attributes:
        number, place: (tokens,) int64, the sequence of each token, which rises, and the token's place in it.
        lengths: (sequences,) int64.
        longest: of the lengths; the last sequence may be longer, and what is beyond is then nobody's.
    """

    number: Tensor
    place: Tensor
    lengths: Tensor
    longest: int

    @classmethod
    def of(cls, number: Tensor, ends: Tensor, longest: int | None = None) -> Sequences:
        """number: as above; ends: (sequences + 1,), 0 and the places in the row at which sequences end; longest: as above, read
        from the lengths unless given.
        """
        place = torch.arange(len(number), device=number.device) - ends[number]
        lengths = ends.diff()
        return cls(number, place, lengths, int(lengths.max()) if longest is None else longest)

    @classmethod
    def make_alike(cls, count: int, length: int, device: torch.device) -> Sequences:
        """That many sequences of one length."""
        tokens = torch.arange(count * length, device=device)
        return cls(tokens // length, tokens % length, torch.full((count,), length, device=device), length)

    def backwards(self) -> Tensor:
        """(tokens,), where the token is that takes each one's place when every sequence is turned round."""
        return torch.arange(len(self.number), device=self.number.device) + self.lengths[self.number] - 1 - 2 * self.place

    def pad(self, row: Tensor) -> Tensor:
        """(tokens, channels) as (sequences, longest, channels), zeros after what is shorter."""
        padded = row.new_zeros(len(self.lengths) * self.longest + 1, row.shape[1])  # the last for what is beyond
        return padded.index_copy(0, self._slots(), row)[:-1].view(-1, self.longest, row.shape[1])

    def pack(self, dense: Tensor) -> Tensor:
        """The row that `pad` was given."""
        return dense.flatten(0, 1).index_select(0, self._slots().clamp(max=len(self.lengths) * self.longest - 1))

    def _slots(self) -> Tensor:
        return (self.number * self.longest + self.place).clamp(max=len(self.lengths) * self.longest)


class Mamba1(nn.Module):
    """A Mamba-1 block (arXiv:2312.00752, section 3.4) that is as wide inside as outside.

    Sequences are padded at their ends, which nothing before them sees. At the start -A is 1 to d_state in every channel, and
    steps are drawn between 0.001 and 0.1, as that paper's code has it.

    Args:
        d_model: channels in and out.
        d_state: states of a channel.
        variant: of the scan, see `mamba1.choose_scan`.
        d_conv: width of the causal convolution.
    """

    def __init__(self, d_model: int, d_state: int, variant: str, d_conv: int = 4):
        super().__init__()
        rank = -(-d_model // 16)
        choose_scan(variant)  # refuses it before there is a model
        self.splits, self.variant = (rank, d_state, d_state), variant
        self.in_proj = nn.Linear(d_model, 2 * d_model, bias=False)
        self.conv1d = nn.Conv1d(d_model, d_model, d_conv, groups=d_model)  # its parameters; the kernels of `ssd.block` convolve
        self.x_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.dt_proj = nn.Linear(rank, d_model)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        bias = draw_step_bias(d_model)
        with torch.no_grad():
            nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
            self.dt_proj.bias.copy_(bias)
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(d_model, 1))
        self.D = nn.Parameter(torch.ones(d_model))
        self.A_log._no_weight_decay = True  # nor does anything of one dimension decay

    def forward(self, row: Tensor, sequences: Sequences) -> Tensor:
        """row: (tokens, d_model), to the same."""
        x, z = sequences.pad(self.in_proj(row)).mT.chunk(2, 1)  # [sequences, d_model, longest]
        x = causal_conv1d_fn(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        shape = (x.shape[0], x.shape[2])

        def by_sequence(t: Tensor) -> Tensor:
            """[features, sequences * longest] as (sequences, features, longest), in place: the scan likes tokens contiguous."""
            return t.unflatten(1, shape).transpose(0, 1)

        dt, B, C = (self.x_proj.weight @ x.transpose(0, 1).flatten(1)).split(self.splits)
        delta = self.dt_proj.weight @ dt
        scan = choose_scan(self.variant)
        y = scan(x.contiguous(), by_sequence(delta), -self.A_log.exp(), by_sequence(B), by_sequence(C), self.D, z.contiguous(),
                 self.dt_proj.bias)
        return self.out_proj(sequences.pack(y.mT))


class PackedMamba2(Mamba2):
    """A Mamba-2 block as wide inside as outside, on all sequences in one row, without padding: seq_idx keeps them apart."""

    def forward(self, row: Tensor, sequences: Sequences) -> Tensor:
        """row: (tokens, d_model), to the same."""
        return super().forward(row[None], seq_idx=sequences.number.int()[None])[0]


class Bidirectional(nn.Module):
    """The sum of one mixer along each sequence and of another against it."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.along, self.against = make(), make()

    def forward(self, row: Tensor, sequences: Sequences) -> Tensor:
        """row: (tokens, d_model), to the same."""
        backwards = sequences.backwards()
        turned = self.against(row.index_select(0, backwards), sequences)
        return self.along(row, sequences) + turned.index_select(0, backwards)
