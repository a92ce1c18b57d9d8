"""The values that pass between the public function, the variants and the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """Switches of the kernels: one field per optimisation, so that each can be turned off by itself and ablated.

    The baseline knows `tf32`, `low_precision_states` and `save_states`. The others are about (fused), (persistent) or, with
    neither said, both.

    Attributes:
        tf32: multiply fp32 operands with 10-bit mantissas (TF32). Off, three TF32 products recover fp32 accuracy.
            No effect on fp16 and bf16 inputs.
        exp2: exponentials as exp2 of exponents that were scaled by log2(e) as vectors. Off, exp of each element.
        fuse_bmm: C B^T is computed in the tile that uses it. Off, bmm_chunk writes it to memory once per group.
        low_precision_CB: without fuse_bmm, C B^T is kept in the dtype of x. Off, in fp32.
        fuse_states: (fused) one kernel walks the chunks with the running state in registers. Off, and in plain Triton for few
            heads of a long sequence, chunk_state and state_passing, through fp32 states in memory.
        two_level: (fused) a block walks a whole chunk, on Hopper up to 512 tokens, in sub-chunks of 64 with the state in
            registers. Off, one block of rows per program, which meets every block of columns before it in its chunk.
        causal_blocks: (fused, without two_level) tiles above the diagonal are skipped. Off, they are computed and masked.
        low_precision_states: states between chunks are kept in C's dtype where `state_dtype` does not say. Off, in fp32.
        stationary: (persistent) a block walks a whole sequence of one head and the state never leaves its registers. Off,
            blocks as many as run side by side take the chunks of the two-level scan in turn.
        segments: (persistent, stationary; the backward on Hopper) sequences are cut where batch and heads alone do not fill the
            GPU. Off, never.
        save_states: states are kept for the backward: as large as x with one every 128 tokens at dstate 128; the kernels for
            Hopper keep one every 64. Off, and always with variant "auto", the backward computes them again.
        fuse_backward: the backward in sub-chunks of 64 tokens, one kernel for each of states, their gradients, dC with
            dCB, and dB with dx. Off, the baseline's.
        gluon: warp-specialised Gluon kernels on Hopper, where the inputs allow. Off, plain Triton everywhere.

    Raises:
        TypeError: a field that is no bool, by name.
    """

    tf32: bool = False
    exp2: bool = True
    fuse_bmm: bool = True
    low_precision_CB: bool = True
    fuse_states: bool = True
    two_level: bool = True
    causal_blocks: bool = True
    low_precision_states: bool = True
    stationary: bool = True
    segments: bool = True
    save_states: bool = True
    fuse_backward: bool = True
    gluon: bool = True

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, bool):
                raise TypeError(f"{name}: got {value!r}, expected True or False")

    @property
    def precision(self) -> str:
        """`input_precision` of tl.dot for fp32 operands."""
        return "tf32" if self.tf32 else "tf32x3"


SUB_CHUNK = 64  # tokens that walks and the kernels for Hopper take at a time
INPUT_TENSORS = 11  # in `SSDInputs.tensors`
HOPPER_HEADDIM, HOPPER_DSTATES = 64, (64, 128)  # that those kernels have tiles for


@dataclass(frozen=True)
class SSDInputs:
    """Checked arguments of one SSD call. `api.ssd_chunk_scan` documents each; its validation is the only one.

    `seq_idx` is canonical here: int32, contiguous, counting documents from 0 along each row, so that two tokens belong
    to one document exactly when their values are equal. Documents that `initial_states` must not reach start at 1.
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
    initial_states: Tensor | None = None  # (batch, nheads, headdim, dstate)
    seq_idx: Tensor | None = None  # (batch, seqlen) int32
    cu_seqlens: Tensor | None = None  # (ndocs + 1,) int32, batch 1: asks for the state at the end of each document
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    state_dtype: torch.dtype | None = None  # of the states between chunks; None: C's

    @classmethod
    def of(cls, tensors: tuple[Tensor | None, ...], settings: tuple) -> SSDInputs:
        """What `tensors` and `settings` were taken from."""
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens = tensors
        chunk_size, dt_softplus, dt_min, dt_max, state_dtype = settings
        return cls(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus,
                   (dt_min, dt_max), state_dtype)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that are differentiable first."""
        return (self.x, self.dt, self.A, self.B, self.C, self.D, self.z, self.dt_bias, self.initial_states, self.seq_idx,
                self.cu_seqlens)

    @property
    def settings(self) -> tuple:
        """All but the tensors; plain values, hashable."""
        return self.chunk_size, self.dt_softplus, *self.dt_limit, self.state_dtype

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


@dataclass(frozen=True)
class SSDSaved:
    """What a forward leaves beside its two outputs.

    Attributes:
        y: (batch, seqlen, nheads, headdim), the output before the gate z, for the backward; None without z, and where no
            backward may follow.
        varlen_states: (ndocs, nheads, headdim, dstate) fp32, the state at the end of each document of `cu_seqlens`;
            None where that was not given.
        prev_states: (batch, nspans, nheads, headdim, dstate) in `inputs.states_dtype`, the state before each span of
            `states_every` tokens, for the backward; None from variants that do not keep it, or without `options.save_states`.
    """

    inputs: SSDInputs
    options: Options
    y: Tensor | None = None
    varlen_states: Tensor | None = None
    prev_states: Tensor | None = None

    @property
    def states_every(self) -> int:
        """Tokens between prev_states: a chunk, or a sub-chunk where there are more of them than chunks."""
        return self.inputs.chunk_size if self.prev_states.shape[1] == self.inputs.nchunks else SUB_CHUNK


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
