"""How a launch gets its tile sizes, warps and pipeline stages.

Each kernel's file declares a `ConfigSpace`. A call takes the config that `configs/<gpu>.json` holds for its device and sizes,
else the first of the space, made smaller until it fits the device. Nothing is tuned during a call.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path

import torch

from ..types import SSDInputs
from .devices import HOPPER

CONFIGS = Path(__file__).parents[1] / "configs"

SPACES: dict[str, ConfigSpace] = {}  # by kernel, of every kernel whose module was imported
_SMALLEST = 16  # of a tile axis that enters tl.dot
_STATE_ELEMENTS = 8192  # of a state that a program keeps in registers
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
    major: int = HOPPER


@dataclass(frozen=True, eq=False)
class ConfigSpace:
    """The configs that a kernel may be launched with. Its file declares them; `SPACES` has the space of every imported kernel.

    Attributes:
        kernel: the kernel's name, without `_kernel` at its end.
        axes: the kernel's tile sizes by name, in the order of entries, each with the axis that it cuts: "headdim", "dstate",
            "chunk_size", or None for no axis.
        entries: tile sizes, warps and pipeline stages. The first entry is the default.
        staged: tiles that take shared memory once for every pipeline stage, as pairs of tile sizes.
        unstaged: tiles that take shared memory once: they pass from one product to the next.
        whole_dstate: BLOCK_N spans all of dstate and is never cut.
        state_in_registers: a program keeps an fp32 state, BLOCK_P x dstate, in registers. A large dstate then bounds BLOCK_P.
    """

    kernel: str
    axes: dict[str, str | None]
    entries: tuple[tuple[int, ...], ...]
    staged: tuple[tuple[str, str], ...] = ()
    unstaged: tuple[tuple[str, str], ...] = ()
    whole_dstate: bool = False
    state_in_registers: bool = False

    def __post_init__(self):
        SPACES[self.kernel] = self

    def pick(self, inputs: SSDInputs) -> Config:
        """The config of a launch on these inputs."""
        if self.kernel in _forced:
            return _forced[self.kernel]
        return _pick(self, inputs.x.dtype, inputs.headdim, inputs.dstate, inputs.chunk_size, _index(inputs))

    def configs(self, dtype: torch.dtype, headdim: int, dstate: int, chunk_size: int, device: Device) -> list[Config]:
        """Every config that a tuner may try at these sizes on that device, the default first, none twice."""
        fitted = (self.fit(entry, dtype.itemsize, headdim, dstate, chunk_size, device) for entry in self.entries)
        return list(dict.fromkeys(fitted))

    def fit(self, entry: tuple[int, ...], itemsize: int, headdim: int, dstate: int, chunk_size: int, device: Device) -> Config:
        """The entry with no tile larger than its axis, made smaller until the device's shared memory holds it.

        Raises:
            ValueError: the smallest tiles need more shared memory than the device has.
        """
        *sizes, num_warps, num_stages = entry
        if itemsize == 4 and self.staged:
            num_warps = 8  # operands of three products each: with 4 warps they spill
        blocks = dict(zip(self.axes, sizes, strict=True))
        if self.whole_dstate and itemsize == 4:
            # all of dstate is an operand of three products each, for which the state is split in two
            blocks["BLOCK_M"] = _SMALLEST
            blocks["BLOCK_P"] = min(blocks["BLOCK_P"], _STATE_ELEMENTS // 2 // next_power_of_2(dstate))
        elif self.state_in_registers and device.major != HOPPER:
            # without Hopper's products from shared memory, operands pass through registers beside the state
            num_warps, blocks["BLOCK_M"] = 8, 32
        lengths = self.axis_lengths(headdim, dstate, chunk_size)
        blocks = {b: min(n, max(_SMALLEST, next_power_of_2(lengths[b]))) if b in lengths else n for b, n in blocks.items()}
        cut = [block for block in blocks if not (block == "BLOCK_N" and self.whole_dstate)]
        while self.count_shared_bytes(blocks, itemsize, num_stages) > device.shared:
            if num_stages > (1 if self.whole_dstate else 2):
                num_stages -= 1
                continue
            largest = max(cut, key=blocks.get)
            if blocks[largest] == _SMALLEST:
                needed = self.count_shared_bytes(blocks, itemsize, num_stages)
                raise ValueError(f"{self.kernel}: its smallest tiles need {needed} bytes of shared memory; a block on "
                                 f"{device.name} may have {device.shared}")
            blocks[largest] //= 2
        return Config(tuple(blocks.items()), num_warps, num_stages)

    def axis_lengths(self, headdim: int, dstate: int, chunk_size: int) -> dict[str, int]:
        """How long the axis is that each tile size cuts, for those that cut one."""
        lengths = {"headdim": headdim, "dstate": dstate, "chunk_size": chunk_size}
        if self.state_in_registers:
            lengths["headdim"] = min(headdim, _STATE_ELEMENTS // next_power_of_2(dstate))
        return {block: lengths[axis] for block, axis in self.axes.items() if axis}

    def count_shared_bytes(self, blocks: dict[str, int], itemsize: int, num_stages: int) -> int:
        """An upper estimate of a thread block's shared memory in bytes.

        fp32 tiles of a pipeline count once more: a computed operand passes through shared memory into its three products.
        """
        copies = num_stages + (itemsize == 4 and num_stages > 1)
        staged, unstaged = (sum(blocks[a] * blocks[b] for a, b in tiles) for tiles in (self.staged, self.unstaged))
        return itemsize * (copies * staged + unstaged)


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
    """The config as a config file keeps it: tile sizes in the order of `ConfigSpace.axes`, warps, stages."""
    return [*(size for _, size in config.blocks), config.num_warps, config.num_stages]


def pick(kernel: str, inputs: SSDInputs) -> Config:
    """The config of a launch of `kernel`, whose module must have been imported, on these inputs."""
    return SPACES[kernel].pick(inputs)


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
def _pick(space: ConfigSpace, dtype, headdim, dstate, chunk_size, index) -> Config:
    device = current_device(index)
    measured = _frozen(device.name).get(size_key(space.kernel, dtype, headdim, dstate, chunk_size))
    return space.fit(measured or space.entries[0], dtype.itemsize, headdim, dstate, chunk_size, device)


def is_forced(kernel: str | None = None) -> bool:
    """Whether the config of the kernel, or of some kernel, is not the one that its sizes have."""
    return bool(_forced) if kernel is None else kernel in _forced


@contextmanager
def force_config(kernel: str, config: Config):
    """Launches of `kernel` take `config` inside this context: for the tuner and for tests that try every config."""
    _forced[kernel] = config
    try:
        yield
    finally:
        del _forced[kernel]
