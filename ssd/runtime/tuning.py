"""Tile sizes of every kernel: the spaces that a tuner may search, and the choice for a call.

A choice is frozen: from `configs/<gpu>.json` where that device and size were measured, else the first of the space that
fits the device. Nothing is tuned during a call.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

import torch

from ..types import SSDInputs

CONFIGS = Path(__file__).parents[1] / "configs"

# Each entry: the tile sizes, then warps, then pipeline stages. The first entry is the default.
_BLOCKS = {
    "chunk_cumsum": ("BLOCK_H",),
    "chunk_state": ("BLOCK_P", "BLOCK_N", "BLOCK_K"),
    "state_passing": ("BLOCK",),
    "bmm_chunk": ("BLOCK_M", "BLOCK_N", "BLOCK_K"),
    "chunk_scan": ("BLOCK_M", "BLOCK_P", "BLOCK_K", "BLOCK_N"),
    "chunk_scan_dz": ("BLOCK",),
    "chunk_scan_dstates": ("BLOCK_P", "BLOCK_N", "BLOCK_K"),
    "state_passing_bwd": ("BLOCK",),
    "chunk_scan_chunk_state_dx": ("BLOCK_M", "BLOCK_P", "BLOCK_K", "BLOCK_N"),
    "chunk_state_dB": ("BLOCK_M", "BLOCK_N", "BLOCK_P"),
    "chunk_scan_dC": ("BLOCK_M", "BLOCK_N", "BLOCK_P"),
    "chunk_scan_dCB": ("BLOCK_M", "BLOCK_N", "BLOCK_P"),
    "bmm_bwd": ("BLOCK_M", "BLOCK_N", "BLOCK_K"),
    "ddA_cumsum": ("BLOCK_M", "BLOCK_K", "BLOCK_P"),
    "chunk_cumsum_bwd": ("BLOCK_H",),
    "walk_states": ("BLOCK_P", "BLOCK_N", "BLOCK_K"),
    "two_level_scan": ("BLOCK_M", "BLOCK_P", "BLOCK_N"),
    "block_scan": ("BLOCK_M", "BLOCK_P", "BLOCK_K", "BLOCK_N"),
    "persistent_scan": ("BLOCK_M", "BLOCK_P", "BLOCK_N"),
    "stationary_scan": ("BLOCK_M", "BLOCK_P", "BLOCK_N"),
    "walk_dstates": ("BLOCK_M", "BLOCK_P", "BLOCK_N"),
    "group_dC": ("BLOCK_M", "BLOCK_P", "BLOCK_N"),
    "group_dB_dx": ("BLOCK_M", "BLOCK_P", "BLOCK_N"),
}
_SPACES = {
    "chunk_cumsum": [(16, 4, 1), (8, 4, 1), (32, 4, 1), (16, 8, 1)],
    "chunk_state": [(64, 128, 64, 4, 3), (64, 128, 32, 4, 3), (64, 64, 64, 4, 3), (64, 128, 64, 8, 3), (64, 128, 32, 4, 4),
                    (64, 128, 64, 4, 2), (64, 128, 128, 4, 2), (64, 64, 32, 4, 4)],
    "state_passing": [(1024, 4, 3), (512, 4, 3), (512, 4, 5), (1024, 4, 1), (256, 2, 4), (2048, 8, 3), (1024, 4, 5),
                      (128, 1, 8)],
    "bmm_chunk": [(64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 64, 128, 4, 2), (64, 128, 64, 4, 3)],
    "chunk_scan": [(64, 64, 64, 64, 4, 3), (128, 64, 64, 64, 4, 3), (64, 64, 32, 128, 4, 3), (128, 64, 32, 64, 4, 3),
                   (128, 64, 64, 64, 8, 3), (64, 64, 64, 128, 4, 2), (64, 64, 64, 64, 4, 2), (128, 64, 32, 64, 8, 3)],
    "chunk_scan_dz": [(2048, 4, 1), (4096, 4, 1), (1024, 4, 1)],
    "chunk_scan_dstates": [(64, 128, 64, 4, 3), (64, 128, 32, 4, 3), (64, 64, 64, 4, 3), (64, 128, 64, 8, 3),
                           (64, 128, 32, 4, 4), (64, 128, 64, 4, 2), (64, 128, 128, 4, 2)],
    "state_passing_bwd": [(1024, 4, 3), (512, 4, 3), (512, 4, 5), (1024, 4, 1), (256, 2, 4), (2048, 8, 3), (1024, 4, 5),
                          (128, 1, 8)],
    "chunk_scan_chunk_state_dx": [(64, 64, 64, 64, 4, 3), (128, 64, 64, 64, 8, 3), (64, 64, 32, 64, 4, 3),
                                  (128, 64, 32, 64, 4, 3), (64, 64, 64, 128, 4, 2), (64, 64, 64, 64, 4, 2),
                                  (128, 64, 32, 64, 8, 3), (64, 64, 32, 128, 4, 2)],
    "chunk_state_dB": [(64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 8, 3),
                       (64, 128, 64, 4, 4), (64, 128, 64, 4, 2), (128, 128, 64, 8, 2)],
    "chunk_scan_dC": [(64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 8, 3),
                      (64, 128, 64, 4, 4), (64, 128, 64, 4, 2), (128, 128, 64, 8, 2)],
    "chunk_scan_dCB": [(64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 64, 64, 8, 3), (128, 128, 64, 8, 3), (64, 64, 64, 4, 4),
                       (64, 128, 64, 4, 3), (64, 64, 64, 4, 2)],
    "bmm_bwd": [(64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (64, 128, 32, 4, 3)],
    "ddA_cumsum": [(64, 64, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (64, 64, 64, 4, 2), (128, 64, 64, 8, 3),
                   (128, 64, 64, 8, 2)],
    "chunk_cumsum_bwd": [(8, 4, 1), (4, 4, 1), (16, 4, 1), (8, 8, 1)],
    "walk_states": [(32, 128, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 3), (32, 128, 64, 4, 4), (32, 64, 64, 4, 4),
                    (32, 128, 64, 4, 2), (64, 128, 32, 4, 4)],
    "two_level_scan": [(64, 64, 256, 4, 2), (64, 64, 256, 4, 3), (64, 64, 256, 8, 2), (64, 32, 256, 4, 2)],
    "block_scan": [(64, 64, 64, 256, 4, 2), (64, 64, 64, 256, 4, 3), (128, 64, 64, 256, 8, 2), (64, 64, 32, 256, 4, 3)],
    "persistent_scan": [(64, 64, 256, 4, 2), (64, 64, 256, 4, 3), (64, 64, 256, 8, 2), (64, 32, 256, 4, 2)],
    "stationary_scan": [(64, 64, 256, 4, 2), (64, 64, 256, 4, 3), (64, 64, 256, 8, 2), (64, 32, 256, 4, 2)],
    "walk_dstates": [(64, 32, 128, 4, 3), (64, 64, 128, 4, 3), (64, 64, 64, 4, 3), (64, 32, 128, 4, 2)],
    "group_dC": [(64, 64, 256, 8, 3), (64, 64, 256, 8, 2), (64, 64, 256, 4, 2), (64, 32, 256, 8, 3)],
    "group_dB_dx": [(64, 64, 256, 8, 2), (64, 64, 256, 8, 3), (64, 32, 256, 8, 2)],
}
KERNELS = tuple(_SPACES)
# Kernels whose tiles hold the whole of dstate, as BLOCK_N; those whose state stays in registers hold that many elements of it,
# as do the tiles of it that a group loop meets.
_WALKS = ("two_level_scan", "persistent_scan", "stationary_scan")
_GROUP_LOOPS = ("group_dC", "group_dB_dx")
_LOOPS = (*_WALKS, *_GROUP_LOOPS)
_WHOLE_DSTATE = (*_LOOPS, "block_scan")
_STATE_ELEMENTS = 8192
_forced: dict[str, Config] = {}


@dataclass(frozen=True)
class Config:
    """Tile sizes by name, warps and pipeline stages of one launch."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int

    @cached_property
    def launch(self) -> dict[str, int]:
        """As keyword arguments of a launch."""
        return {**dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages}

    def __getitem__(self, block: str) -> int:
        return self.launch[block]


# The tiles a kernel keeps in shared memory per pipeline stage, as pairs of sizes.
_WALK_TILES = (("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"))
_GROUP_TILES = (("BLOCK_P", "BLOCK_N"), ("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_P"))
_TILES = {
    "chunk_state": (("BLOCK_P", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
    "bmm_chunk": (("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
    "chunk_scan": (("BLOCK_M", "BLOCK_K"), ("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_P"), ("BLOCK_N", "BLOCK_P")),
    "chunk_scan_dstates": (("BLOCK_P", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
    "chunk_scan_chunk_state_dx": (("BLOCK_M", "BLOCK_K"), ("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_P"),
                                  ("BLOCK_N", "BLOCK_P")),
    "chunk_state_dB": (("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_N")),
    "chunk_scan_dC": (("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_N")),
    "chunk_scan_dCB": (("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_N")),
    "bmm_bwd": (("BLOCK_M", "BLOCK_K"), ("BLOCK_K", "BLOCK_N")),
    "ddA_cumsum": (("BLOCK_M", "BLOCK_P"), ("BLOCK_P", "BLOCK_K"), ("BLOCK_M", "BLOCK_K"), ("BLOCK_M", "BLOCK_K")),
    "walk_states": (("BLOCK_K", "BLOCK_P"), ("BLOCK_K", "BLOCK_N")),
    "block_scan": (("BLOCK_K", "BLOCK_N"), ("BLOCK_K", "BLOCK_P")),
    "walk_dstates": (("BLOCK_M", "BLOCK_P"), ("BLOCK_M", "BLOCK_N"), ("BLOCK_P", "BLOCK_N")),
    **dict.fromkeys(_WALKS, _WALK_TILES),
    **dict.fromkeys(_GROUP_LOOPS, _GROUP_TILES),
}
# The tiles that pass through it between two products, once whatever the stages.
_PASSING = {
    "walk_states": (("BLOCK_K", "BLOCK_P"),),
    "block_scan": (("BLOCK_M", "BLOCK_N"), ("BLOCK_N", "BLOCK_P")),
    **dict.fromkeys(_WALKS, (("BLOCK_N", "BLOCK_P"), ("BLOCK_M", "BLOCK_M"), ("BLOCK_M", "BLOCK_P"))),
    "walk_dstates": (("BLOCK_M", "BLOCK_P"),),
    **dict.fromkeys(_GROUP_LOOPS, (*_WALK_TILES, ("BLOCK_M", "BLOCK_M"))),
}
_SMALLEST = 16  # of a tile axis that enters tl.dot


@dataclass(frozen=True)
class Device:
    """What a choice depends on.

    Attributes:
        name: of its frozen table.
        shared: bytes of shared memory that one block may have.
        sms: how many blocks run side by side at least.
        major: of its compute capability.
    """

    name: str
    shared: int
    sms: int = 132
    major: int = 9


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def device_slug(name: str) -> str:
    """"NVIDIA H100 80GB HBM3" -> "h100": the name of a device's config and result files."""
    words = [w for w in name.lower().replace("-", " ").split() if w not in ("nvidia", "geforce", "tesla")]
    if "rtx" in words:
        return "_".join(words)
    return words[0] if words else "unknown"


@lru_cache
def current_device(index: int | None) -> Device:
    """The CUDA device of that index; None: the interpreter, which has no limit of its own."""
    if index is None:
        return Device("interpreter", 232448)
    properties = torch.cuda.get_device_properties(index)
    return Device(device_slug(properties.name), properties.shared_memory_per_block_optin, properties.multi_processor_count,
                  properties.major)


@lru_cache
def _frozen(name: str) -> dict[str, list[int]]:
    path = CONFIGS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def size_key(kernel: str, dtype: torch.dtype, headdim: int, dstate: int, chunk_size: int) -> str:
    """The line of a config file that serves these sizes: kernel, bytes per element, and sizes rounded up to powers of two."""
    sizes = (max(_SMALLEST, next_power_of_2(n)) for n in (headdim, dstate, chunk_size))
    return "/".join(map(str, (kernel, f"{dtype.itemsize}B", *sizes)))


def to_entry(config: Config) -> list[int]:
    """The config as a config file keeps it: tile sizes in the order of `_BLOCKS`, warps, stages."""
    return [*(size for _, size in config.blocks), config.num_warps, config.num_stages]


def space(kernel: str, dtype: torch.dtype, headdim: int, dstate: int, chunk_size: int, device: Device) -> list[Config]:
    """Every config that a tuner may try at these sizes on that device, the default first, none twice."""
    fitted = (_fit(kernel, entry, dtype.itemsize, headdim, dstate, chunk_size, device) for entry in _SPACES[kernel])
    return list(dict.fromkeys(fitted))


def _fit(kernel, entry, itemsize, headdim, dstate, chunk_size, device) -> Config:
    """The entry with no tile larger than its axis, made smaller until the device's shared memory holds it."""
    *sizes, num_warps, num_stages = entry
    if itemsize == 4 and kernel in _TILES:
        num_warps = 8  # operands of three products each: with 4 warps they spill
    blocks = dict(zip(_BLOCKS[kernel], sizes, strict=True))
    if kernel in _WHOLE_DSTATE and itemsize == 4:
        # all of dstate is an operand of three products each, for which the state is split in two
        blocks["BLOCK_M"] = _SMALLEST
        blocks["BLOCK_P"] = min(blocks["BLOCK_P"], _STATE_ELEMENTS // 2 // next_power_of_2(dstate))
    elif kernel in _LOOPS and device.major != 9:
        # without Hopper's products from shared memory, operands pass through registers beside the state
        num_warps, blocks["BLOCK_M"] = 8, 32
    limits = _axis_limits(kernel, headdim, dstate, chunk_size)
    blocks = {b: min(n, max(_SMALLEST, next_power_of_2(limits[b]))) if b in limits else n for b, n in blocks.items()}
    cut = [block for block in blocks if not (block == "BLOCK_N" and kernel in _WHOLE_DSTATE)]
    while _shared(kernel, blocks, itemsize, num_stages) > device.shared:
        if num_stages > (1 if kernel in _WHOLE_DSTATE else 2):
            num_stages -= 1
            continue
        largest = max(cut, key=blocks.get)
        if blocks[largest] == _SMALLEST:
            raise ValueError(f"{kernel}: its smallest tiles need {_shared(kernel, blocks, itemsize, num_stages)} bytes of "
                             f"shared memory; a block on {device.name} may have {device.shared}")
        blocks[largest] //= 2
    return Config(tuple(blocks.items()), num_warps, num_stages)


def _axis_limits(kernel: str, headdim: int, dstate: int, chunk_size: int) -> dict[str, int]:
    """How long the axis is that each tile size cuts."""
    limits = {"BLOCK_P": headdim, "BLOCK_M": chunk_size, "BLOCK_K": chunk_size, "BLOCK_N": dstate}
    if kernel == "bmm_chunk":
        limits |= {"BLOCK_K": dstate, "BLOCK_N": chunk_size}
    if kernel == "chunk_scan_dCB":
        limits["BLOCK_N"] = chunk_size
    if kernel in _LOOPS:
        limits["BLOCK_P"] = min(headdim, _STATE_ELEMENTS // next_power_of_2(dstate))
    return limits


def _shared(kernel: str, blocks: dict[str, int], itemsize: int, num_stages: int) -> int:
    """An upper estimate of a block's shared memory in bytes: the pipelined tiles, each once a stage, and the passing ones.

    fp32 tiles of a pipeline once more: a computed operand passes through shared memory on its way into three products.
    """
    copies = num_stages + (itemsize == 4 and num_stages > 1)
    pipelined, passing = (sum(blocks[a] * blocks[b] for a, b in of.get(kernel, ())) for of in (_TILES, _PASSING))
    return itemsize * (copies * pipelined + passing)


def pick(kernel: str, inputs: SSDInputs) -> Config:
    """The config of a launch of `kernel` on these inputs."""
    if kernel in _forced:
        return _forced[kernel]
    return _pick(kernel, inputs.x.dtype, inputs.headdim, inputs.dstate, inputs.chunk_size, _index(inputs))


def device_of(inputs: SSDInputs) -> Device:
    """The device that runs these inputs."""
    return current_device(_index(inputs))


def head_splits(inputs: SSDInputs, programs: int) -> int:
    """How many programs share a group's heads where one program for each tile, `programs` in all, leaves SMs idle.

    A power of two, at most 16 and at most the number of heads. Each split costs a partial sum in memory.
    """
    heads, wanted = inputs.nheads // inputs.ngroups, 2 * device_of(inputs).sms
    splits = 1
    while programs * splits < wanted and 2 * splits <= min(heads, 16):
        splits *= 2
    return splits


def _index(inputs: SSDInputs) -> int | None:
    return inputs.x.device.index if inputs.x.is_cuda else None


@cache
def _pick(kernel, dtype, headdim, dstate, chunk_size, index) -> Config:
    device = current_device(index)
    measured = _frozen(device.name).get(size_key(kernel, dtype, headdim, dstate, chunk_size))
    if measured is None:
        return space(kernel, dtype, headdim, dstate, chunk_size, device)[0]
    return _fit(kernel, measured, dtype.itemsize, headdim, dstate, chunk_size, device)


def is_forced(kernel: str | None = None) -> bool:
    """Whether the config of the kernel, or of some kernel, is not the one that its sizes have."""
    return bool(_forced) if kernel is None else kernel in _forced


@contextmanager
def forced(kernel: str, config: Config):
    """Launches of `kernel` take `config` inside this context: for the tuner and for tests that try every config."""
    _forced[kernel] = config
    try:
        yield
    finally:
        del _forced[kernel]
