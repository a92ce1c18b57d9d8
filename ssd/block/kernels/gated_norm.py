"""RMSNorm of each group of channels with a SiLU gate, docs/block.md, equations (N1) to (N8): forward and backward.

Reads x, z (rows, width), any row stride, contiguous channels, and dout like them; weight, bias (width,), contiguous; each fp16,
bf16 or fp32. Writes out (rows, width) in the dtype of x and rstd (rows, ngroups) fp32; dx and dz in the dtypes of x and z, dz
with any row stride; dweight and dbias in those of weight and bias, from partial sums of programs whose number the device alone
decides. All arithmetic is fp32.

A tile is some rows of one group. It stays in registers between the sum over its channels and their scaling, so every element
is read once. Sizes of tiles are powers of two; a group of 3, 5 or 7 times such a size is as many of them in the forward, which
leaves no thread idle: 5120 channels in one tile of 8192 had too few bytes under way.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.arguments import COUNTS, cdiv
from ...kernels.sum_parts import sum_first
from ...runtime import tuning
from ...runtime.launch import launch
from .conv1d import sigmoid

WIDEST_GROUP = 32768  # channels: 32 for each thread of the largest block
_PER_WARP = 512  # elements of a tile: 16 for each thread
_FORWARD_TILE = 2048  # elements, where a row of the group has no more
_MOST_PIECES, _SHORTEST_PIECE = 7, 256  # of a group in the forward; channels of one
_WARPS, _REGISTERS = 16, 65536  # of the backward's programs that run side by side on one SM, and of the SM
_STAGES = 3  # two tiles of the backward on their way beside the one at hand, where shared memory holds them
_ALIGNMENT = 16  # the divisor of a stride that Triton finds by itself


@triton.jit
def locate(tile, group, rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows [M, 1] int64 and channels [1, N] of a tile, and which of its elements are there."""
    offs_m = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    return offs_m, group * WIDTH + offs_n, (offs_m < rows) & (offs_n < WIDTH)


@triton.jit
def load_rows(t, stride, offs_m, channels, inside, UNIT: tl.constexpr):
    """A tile in fp32 [M, N], zero where it has no element. stride: in units of UNIT elements."""
    return tl.load(t + offs_m * UNIT * stride + channels, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_channels(t, group, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """weight or bias of one group in fp32, the same in each row [M, N]: of a tile's shape, so as to get its layout."""
    offs_n = tl.arange(0, BLOCK_N)[None, :] + tl.zeros([BLOCK_M, 1], tl.int32)
    return tl.load(t + group * WIDTH + offs_n, mask=offs_n < WIDTH, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def gated_norm_kernel(x, x_stride, z, z_stride, weight, bias, out, rstd, rows, eps, UNIT: tl.constexpr, NGROUPS: tl.constexpr,
                      WIDTH: tl.constexpr, NORM_BEFORE_GATE: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr):
    tile, group = tl.program_id(0) // NGROUPS, tl.program_id(0) % NGROUPS
    PIECE: tl.constexpr = WIDTH // PIECES
    vs, zs = (), ()
    for i in tl.static_range(PIECES):
        offs_m, channels, inside = locate(tile, group * PIECES + i, rows, PIECE, BLOCK_M, BLOCK_N)
        vs += (load_rows(x, x_stride, offs_m, channels, inside, UNIT),)
        if z is not None:
            zs += (load_rows(z, z_stride, offs_m, channels, inside, UNIT),)
    normed, gates = (), ()
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(PIECES):
        v = vs[i]
        if z is not None:
            gate = zs[i] * sigmoid(zs[i])
            if not NORM_BEFORE_GATE:
                v *= gate
            gates += (gate,)
        squares += v * v
        normed += (v,)
    scale = tl.math.rsqrt(tl.sum(squares, 1, keep_dims=True) / WIDTH + eps)
    ys = ()  # all of them before the first store, which no load of the weight may pass
    for i in tl.static_range(PIECES):
        y = normed[i] * scale * load_channels(weight, group * PIECES + i, PIECE, BLOCK_M, BLOCK_N)
        if bias is not None:
            y += load_channels(bias, group * PIECES + i, PIECE, BLOCK_M, BLOCK_N)
        if z is not None and NORM_BEFORE_GATE:
            y *= gates[i]
        ys += (y,)
    for i in tl.static_range(PIECES):
        offs_m, channels, inside = locate(tile, group * PIECES + i, rows, PIECE, BLOCK_M, BLOCK_N)
        tl.store(out + offs_m * (NGROUPS * WIDTH) + channels, ys[i].to(out.dtype.element_ty), mask=inside)
    tl.store(rstd + offs_m * NGROUPS + group, scale, mask=offs_m < rows)


def gated_norm(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, eps: float, group_size: int,
               norm_before_gate: bool, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns out and rstd. shape: of out, which is no view: autograd would not let a caller change one in place."""
    rows, width = x.shape
    ngroups = width // group_size
    out = torch.empty(shape, device=x.device, dtype=x.dtype)
    rstd = torch.empty(rows, ngroups, device=x.device, dtype=torch.float32)
    pieces = _pieces(group_size)
    tile = _tile(rows, group_size // pieces, _FORWARD_TILE // pieces, _PER_WARP if pieces == 1 else _PER_WARP // 2)
    unit, x_stride, z_stride = _strides(x, z)
    launch(
        gated_norm_kernel, cdiv(rows, tile["BLOCK_M"]) * ngroups,
        x, x_stride, z, z_stride, weight, bias, out, rstd, rows, eps, unit, ngroups, group_size, norm_before_gate, pieces,
        **tile)
    return out, rstd


@triton.jit(do_not_specialize=COUNTS)
def gated_norm_bwd_kernel(dout, dout_stride, x, x_stride, z, z_stride, weight, bias, rstd, dx, dz, dz_stride, dweight, dbias,
                          rows, slots, UNIT: tl.constexpr, DZ_UNIT: tl.constexpr, NGROUPS: tl.constexpr, WIDTH: tl.constexpr,
                          NORM_BEFORE_GATE: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    slot, group = tl.program_id(0) // NGROUPS, tl.program_id(0) % NGROUPS
    w = load_channels(weight, group, WIDTH, BLOCK_M, BLOCK_N)
    if bias is not None:
        b = load_channels(bias, group, WIDTH, BLOCK_M, BLOCK_N)
    dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # over tiles first, over their rows at the end
    db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # slots take the tiles in turn, so that all of them are in one part of memory at a time
    for tile in tl.range(slot, (rows + BLOCK_M - 1) // BLOCK_M, slots, num_stages=STAGES):
        offs_m, channels, inside = locate(tile, group, rows, WIDTH, BLOCK_M, BLOCK_N)
        at = offs_m * (NGROUPS * WIDTH) + channels
        dz_at = at if dz_stride is None else offs_m * DZ_UNIT * dz_stride + channels
        scale = tl.load(rstd + offs_m * NGROUPS + group, mask=offs_m < rows, other=0.0)
        dy = load_rows(dout, dout_stride, offs_m, channels, inside, UNIT)
        v = load_rows(x, x_stride, offs_m, channels, inside, UNIT)
        if z is not None:
            z_i = load_rows(z, z_stride, offs_m, channels, inside, UNIT)
            s = sigmoid(z_i)
            gate = z_i * s
            slope = s + gate * (1 - s)
        if z is not None and not NORM_BEFORE_GATE:
            slope *= v
            v *= gate
        n = v * scale
        if z is not None and NORM_BEFORE_GATE:
            y = n * w
            if bias is not None:
                y += b
            tl.store(dz + dz_at, (dy * y * slope).to(dz.dtype.element_ty), mask=inside)
            dy *= gate
        dw += dy * n
        if bias is not None:
            db += dy
        dn = dy * w
        dv = scale * (dn - n * (tl.sum(dn * n, 1, keep_dims=True) / WIDTH))
        if z is not None and not NORM_BEFORE_GATE:
            tl.store(dz + dz_at, (dv * slope).to(dz.dtype.element_ty), mask=inside)
            dv *= gate
        tl.store(dx + at, dv.to(dx.dtype.element_ty), mask=inside)
    offs_n = tl.arange(0, BLOCK_N)
    part = (slot * NGROUPS + group) * WIDTH + offs_n
    tl.store(dweight + part, tl.sum(dw, 0), mask=offs_n < WIDTH)
    if bias is not None:
        tl.store(dbias + part, tl.sum(db, 0), mask=offs_n < WIDTH)


def gated_norm_bwd(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, rstd: Tensor,
                   group_size: int, norm_before_gate: bool,
                   into: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns dx, dweight, dbias (None without bias) and dz (None without z). into: where dz is to lie, contiguous channels.
    """
    rows, width = x.shape
    ngroups = width // group_size
    dx = torch.empty(rows, width, device=x.device, dtype=x.dtype)
    dz = torch.empty(rows, width, device=x.device, dtype=z.dtype) if into is None and z is not None else into
    tile = _tile(rows, group_size, _PER_WARP)
    device = tuning.current_device(x.device.index)
    blocks = max(1, _WARPS // tile["num_warps"])  # on an SM
    registers = _REGISTERS // (32 * tile["num_warps"] * blocks)  # more, and fewer blocks would run side by side
    bytes_of_tile = tile["BLOCK_M"] * tile["BLOCK_N"] * sum(t.element_size() for t in (dout, x, z) if t is not None)
    stages = 1 + min(_STAGES - 1, device.shared // blocks // bytes_of_tile)
    slots = min(max(1, blocks * device.sms // ngroups), cdiv(rows, tile["BLOCK_M"]))
    parts = torch.empty(1 if bias is None else 2, slots, width, device=x.device, dtype=torch.float32)
    unit, dout_stride, x_stride, z_stride = _strides(dout, x, z)
    dz_unit, dz_stride = _strides(into)  # one address less where dz lies as dx does
    launch(
        gated_norm_bwd_kernel, slots * ngroups,
        dout, dout_stride, x, x_stride, z, z_stride, weight, bias, rstd, dx, dz, dz_stride, parts[0],
        None if bias is None else parts[1], rows, slots, unit, dz_unit, ngroups, group_size, norm_before_gate, stages, **tile,
        maxnreg=registers)

    def add_up(part: int, parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else sum_first(parts[part], torch.empty_like(parameter))

    return dx, add_up(0, weight), add_up(1, bias), dz


def _pieces(group_size: int) -> int:
    """Into how many tiles of whole powers of two a group falls; 1 if these would be too many or too short."""
    pieces = group_size // (group_size & -group_size)
    return pieces if pieces <= _MOST_PIECES and group_size // pieces >= _SHORTEST_PIECE else 1


def _tile(rows: int, channels: int, elements: int, per_warp: int = _PER_WARP) -> dict[str, int]:
    """Sizes and warps of a tile of `elements`, or of one row of so many channels; no more rows than there are."""
    channels = tuning.next_power_of_2(channels)
    block_m = min(max(1, elements // channels), tuning.next_power_of_2(max(1, rows)))
    return {"BLOCK_M": block_m, "BLOCK_N": channels, "num_warps": min(32, max(1, block_m * channels // per_warp))}


def _strides(*tensors: Tensor | None) -> tuple[int | None, ...]:
    """A unit, and each tensor's row stride in it.

    Of a stride Triton knows whether 16 divides it, and no more. That of a packed projection may be a multiple of 8 only, as in
    mamba2-130m: enough for loads of 16 bytes, if the unit says so.
    """
    unit = gcd(_ALIGNMENT, *(t.stride(0) for t in tensors if t is not None))
    return unit, *(None if t is None else t.stride(0) // unit for t in tensors)
