"""persistent_scan, equations (26), (27) and (5): blocks as many as run side by side, each walks one chunk after another.

Work is numbered so that blocks which run at once walk the heads of one group, then of the next, then the next chunk: B and C
are read from memory once. Tensors as in `scan_chunk`.
"""

import torch
import triton
import triton.language as tl

from fused.kernels.scan_chunk import scan_chunk
from fused.schedule import count_resident_blocks
from ssd.kernels.arguments import cdiv, strides
from ssd.kernels.device import unpack
from ssd.runtime.launch import launch
from ssd.runtime.tuning import ConfigSpace, device_of
from ssd.types import Options, SSDInputs

CONFIGS = ConfigSpace(
    "persistent_scan",
    axes={"BLOCK_M": "chunk_size", "BLOCK_P": "headdim", "BLOCK_N": "dstate"},
    entries=((64, 64, 256, 4, 2), (64, 64, 256, 4, 3), (64, 64, 256, 8, 2), (64, 32, 256, 4, 2)),
    staged=(("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_P")),
    unstaged=(("BLOCK_N", "BLOCK_P"), ("BLOCK_M", "BLOCK_M"), ("BLOCK_M", "BLOCK_P")),
    whole_dstate=True, state_in_registers=True,
)


@triton.jit
def persistent_scan_kernel(x, x_strides, z, z_strides, B, B_strides, C, C_strides, CB, D, D_strides, dt, dA_cumsum, seq_idx,
                           prev_states, out, y, seqlen, nchunks, ntiles, NHEADS: tl.constexpr, NGROUPS: tl.constexpr,
                           HEADDIM: tl.constexpr, DSTATE: tl.constexpr, CHUNK: tl.constexpr, EXP2: tl.constexpr,
                           PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    for number in range(tl.program_id(0), ntiles, tl.num_programs(0)):
        tile, h, c, b = unpack(number, (HEADDIM + BLOCK_P - 1) // BLOCK_P, NHEADS, nchunks)
        scan_chunk(tile, h, c, b, x, x_strides, z, z_strides, B, B_strides, C, C_strides, CB, D, D_strides, dt, dA_cumsum,
                   seq_idx, prev_states, out, y, seqlen, nchunks, NHEADS, NGROUPS, HEADDIM, DSTATE, CHUNK, EXP2, PRECISION,
                   BLOCK_M, BLOCK_P, BLOCK_N)


def persistent_scan(i: SSDInputs, CB, dt, dA_cumsum, prev_states, options: Options,
                    save: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns out and, with z and where a backward may follow (`save`), y.

    dA_cumsum restarts every BLOCK_M tokens of this kernel's config.
    """
    out = torch.empty(i.x.shape, device=i.x.device, dtype=i.x.dtype)
    y = torch.empty_like(out) if save and i.z is not None else None
    config = CONFIGS.pick(i)
    ntiles = cdiv(i.headdim, config["BLOCK_P"]) * i.nheads * i.nchunks * i.batch
    launch(
        persistent_scan_kernel, min(ntiles, count_resident_blocks(device_of(i).sms, config.num_warps)),
        i.x, i.x.stride(), i.z, strides(i.z), i.B, i.B.stride(), i.C, i.C.stride(), CB, i.D, strides(i.D), dt,
        dA_cumsum, i.seq_idx, prev_states, out, y, i.seqlen, i.nchunks, ntiles, i.nheads, i.ngroups, i.headdim, i.dstate,
        i.chunk_size, options.exp2, options.precision, **config.launch)
    return out, y
