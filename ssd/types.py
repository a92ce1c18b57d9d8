"""The values that pass between the public function, the variants and the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .options import Options

SUB_CHUNK = 64  # tokens that a walk takes at a time
SPAN = 2 * SUB_CHUNK  # tokens between the states that a backward reads where a state is large
LEAST_Z = 2.0**-64  # of a gate, in size
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of x, B, C, weights and caches
INPUT_TENSORS = 11  # in `SSDInputs.tensors`
FP32_LARGEST = torch.finfo(torch.float32).max


@dataclass(eq=False)  # not frozen: that would take 1.3 us of every call
class SSDInputs:
    """Checked arguments of one SSD call, which nobody changes.

    `api.ssd_chunk_scan` says what each is, and checks it.

    `seq_idx` is canonical here: int32, contiguous, counting documents from 0 along each row, so that two tokens belong
    to one document exactly when their values are equal. Documents that `initial_states` must not reach start at 1.
    Where `cu_seqlens` stands alone, each document has states of its own (`has_document_states`).
    """

    x: Tensor  # (batch, seqlen, nheads, headdim)
    dt: Tensor  # (batch, seqlen, nheads), before bias and softplus
    A: Tensor  # (nheads,)
    B: Tensor  # (batch, seqlen, ngroups, dstate)
    C: Tensor  # (batch, seqlen, ngroups, dstate)
    chunk_size: int
    D: Tensor | None = None  # (nheads,) or (nheads, headdim)
    z: Tensor | None = None  # (batch, seqlen, nheads, headdim)
    dt_bias: Tensor | None = None  # (nheads,)
    initial_states: Tensor | None = None  # (batch, nheads, headdim, dstate), or (ndocs, ...) with cu_seqlens alone
    seq_idx: Tensor | None = None  # (batch, seqlen) int32
    cu_seqlens: Tensor | None = None  # (ndocs + 1,) int32, batch 1: with seq_idx, asks for states at ends of documents
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    state_dtype: torch.dtype | None = None  # of the states between chunks; None: C's
    return_states_every: int | None = None  # asks for `SSDSaved.states` or `prev_states`, also where no backward may follow

    @classmethod
    def of(cls, tensors: tuple[Tensor | None, ...], settings: tuple) -> SSDInputs:
        """What `tensors` and `settings` were taken from."""
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens = tensors
        chunk_size, dt_softplus, dt_min, dt_max, state_dtype, return_states_every = settings
        return cls(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
                   (dt_min, dt_max), state_dtype, return_states_every)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that are differentiable first."""
        return (self.x, self.dt, self.A, self.B, self.C, self.D, self.z, self.dt_bias, self.initial_states, self.seq_idx,
                self.cu_seqlens)

    @property
    def settings(self) -> tuple:
        """All but the tensors; plain values, hashable."""
        return self.chunk_size, self.dt_softplus, *self.dt_limit, self.state_dtype, self.return_states_every

    @property
    def has_D_of_channels(self) -> bool:
        """True when D is (nheads, headdim)."""
        return self.D is not None and self.D.dim() == 2

    @property
    def has_document_states(self) -> bool:
        """True when initial_states, if given, and final_states are (ndocs, nheads, headdim, dstate)."""
        return self.cu_seqlens is not None and self.seq_idx is None

    def keeps_states(self, options: Options, save: bool) -> bool:
        """True when a forward is to leave `SSDSaved.prev_states`. save: a backward may follow."""
        return self.return_states_every is not None or (save and options.save_states)

    def count_states(self, every: int) -> int:
        """States of a row that a forward keeps, one before every so many tokens. Where documents have states: of each document,
        as many as the worst lengths need.
        """
        if self.has_document_states:
            return self.seqlen // every + self.cu_seqlens.shape[0] - 1
        return -(-self.seqlen // every)

    def keeps_y(self, save: bool) -> bool:
        """True when a forward is to leave `SSDSaved.y`. save: a backward may follow."""
        return save and self.z is not None and self.x.dtype == torch.float16

    def reads_out(self, save: bool) -> bool:
        """True when a backward is to read `SSDSaved.out` in place of y. save: a backward may follow.

        What it finds by dividing by the gate has the relative error of the output's rounding, as y has of its own. In fp16,
        which has few exponents, small gates would leave too few digits.
        """
        return save and self.z is not None and not self.keeps_y(save)

    def asks_for_states_alone(self, options: Options, save: bool) -> bool:
        """Whether a forward is asked for states, and none are kept for a backward. save: a backward may follow."""
        return self.return_states_every is not None and not (save and options.save_states)

    @property
    def batch(self) -> int:
        return self.x.shape[0]

    @property
    def seqlen(self) -> int:
        return self.x.shape[1]

    @property
    def nheads(self) -> int:
        return self.x.shape[2]

    @property
    def headdim(self) -> int:
        return self.x.shape[3]

    @property
    def ngroups(self) -> int:
        return self.B.shape[2]

    @property
    def dstate(self) -> int:
        return self.B.shape[3]

    @property
    def nchunks(self) -> int:
        return -(-self.seqlen // self.chunk_size)

    @property
    def states_dtype(self) -> torch.dtype:
        return self.state_dtype or self.C.dtype


def count_between(i: SSDInputs, prev_states: Tensor) -> int:
    """Tokens between `SSDSaved.prev_states`: the fewest that make so many states."""
    sizes = () if i.has_document_states else sorted((i.chunk_size, SUB_CHUNK, SPAN))
    return next((n for n in sizes if i.count_states(n) == prev_states.shape[1]), SUB_CHUNK)


@dataclass(frozen=True)
class SSDSaved:
    """What a forward leaves beside its two outputs.

    Attributes:
        y: (batch, seqlen, nheads, headdim), the output before the gate z, for the backward, where `inputs.keeps_y` says so;
            else None.
        varlen_states: (ndocs, nheads, headdim, dstate) fp32, the state at the end of each document of `cu_seqlens`;
            None where that was not given.
        prev_states: (batch, nspans, nheads, headdim, dstate) in `inputs.states_dtype`, the state before each span of
            `states_every` tokens, for the backward and for `inputs.return_states_every`; None from variants that do not keep
            it, or where neither that nor `options.save_states` asks for it.
        states: (batch, seqlen // every, nheads, headdim, dstate) in `inputs.states_dtype`, those that
            `inputs.return_states_every` asks for, from variants that write them apart where a backward needs none
            (`Variant.writes_states`); else None.
        out: the contiguous output, for the backward, where `inputs.reads_out`. It is y silu(z) with |z| raised to at least
            LEAST_Z, since y could not be found again where z is 0.
    """

    inputs: SSDInputs
    options: Options
    y: Tensor | None = None
    varlen_states: Tensor | None = None
    prev_states: Tensor | None = None
    states: Tensor | None = None
    out: Tensor | None = None

    @property
    def states_every(self) -> int:
        """Tokens between prev_states."""
        return count_between(self.inputs, self.prev_states)


@dataclass(frozen=True)
class SSDGrads:
    """Gradients, named after the input they belong to. None: that input was absent, or (as `into`) is to be allocated.

    dx, ddt, dB, dC, dz have their input's shape and dtype; dA, dD, ddt_bias, dinitial_states are fp32. As `into`, all but the
    sums over tokens, dA, dD and ddt_bias, may be given, with any strides: slices of the gradient of one packed projection, say.
    """

    dx: Tensor | None = None
    ddt: Tensor | None = None
    dA: Tensor | None = None
    dB: Tensor | None = None
    dC: Tensor | None = None
    dD: Tensor | None = None
    dz: Tensor | None = None
    ddt_bias: Tensor | None = None
    dinitial_states: Tensor | None = None
