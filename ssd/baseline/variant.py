"""Variant `baseline`: one kernel a stage, as the paper describes the operator."""

from __future__ import annotations

import torch
from triton import knobs

from ..kernels.arguments import LONGEST_TILE, fits_tiles
from ..registry import Variant
from ..types import SSDInputs
from .backward import backward
from .forward import forward

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _supports(inputs: SSDInputs) -> str | None:
    i, interpreted = inputs, knobs.runtime.interpret
    if not i.x.is_cuda and not interpreted:
        return f"its kernels need a CUDA device, got tensors on {i.x.device} (TRITON_INTERPRET=1 interprets them on the CPU)"
    if i.x.dtype not in _DTYPES:
        return f"x: got dtype {i.x.dtype}, its kernels take {', '.join(map(str, _DTYPES))}"
    if interpreted and torch.bfloat16 in (i.x.dtype, i.B.dtype, i.C.dtype):
        return "Triton's interpreter gets bf16 arithmetic wrong: expected fp16 or fp32 with TRITON_INTERPRET=1"
    if max(i.headdim, i.dstate) > LONGEST_TILE:
        return f"got headdim = {i.headdim}, dstate = {i.dstate}, its kernels take at most {LONGEST_TILE} of each"
    limit = 2**31 // LONGEST_TILE  # of the strides along seqlen and channels together: offsets inside a chunk are int32
    if max(i.nheads * i.headdim, i.ngroups * i.dstate) + 1 >= limit:  # those of what is written, whatever those of x, B and C
        return (f"got nheads * headdim = {i.nheads * i.headdim}, ngroups * dstate = {i.ngroups * i.dstate}, its kernels take "
                f"less than {limit - 1} of each")
    if i.seqlen > 2**31 - 2 * LONGEST_TILE:
        return f"got seqlen = {i.seqlen}, its kernels count tokens in int32"
    for name, t in (("x", i.x), ("z", i.z), ("B", i.B), ("C", i.C)):
        if not fits_tiles(t):
            return f"{name}: got strides {t.stride()}, expected below {limit} along seqlen and channels together"
    return None


VARIANT = Variant("baseline", supports=_supports, forward=forward, backward=backward,
                  options=("low_precision_states", "save_states", "replay"),
                  states_every=lambda inputs, options: inputs.chunk_size,
                  kernels=lambda inputs, options, mode, keeps: "baseline")
