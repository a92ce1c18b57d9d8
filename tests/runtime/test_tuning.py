"""The choice of tile sizes: what a frozen file may hold, and what becomes of it at other sizes and on other devices."""

import json

import pytest
import torch

from ssd.baseline.kernels import bmm_chunk
from ssd.registry import config_spaces
from ssd.runtime import tuning
from tests.inputs import Shape, random_inputs

H200 = tuning.Device("h200", 232_448)
FILES = sorted(tuning.CONFIGS.glob("*.json"))
SIZES = [(1, 1, 16), (5, 17, 16), (64, 128, 256), (256, 256, 256)]


@pytest.fixture
def chosen_on(monkeypatch):
    """Chooses as if on a device with the given frozen table."""

    def choose(kernel, device, frozen=None, dtype=torch.bfloat16, sizes=(64, 128, 256)):
        monkeypatch.setattr(tuning, "current_device", lambda index: device)
        monkeypatch.setattr(tuning, "_frozen", lambda name: frozen or {})
        tuning._pick.cache_clear()
        return tuning._pick(config_spaces()[kernel], dtype, *sizes, 0)

    yield choose
    tuning._pick.cache_clear()


@pytest.mark.parametrize("name, slug", [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("Tesla T4", "t4"),
    ("NVIDIA GeForce RTX 4090", "rtx_4090"), ("", "unknown")])
def test_device_slug(name, slug):
    assert tuning.device_slug(name) == slug


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_frozen_files_are_choices_that_a_tuner_has(path):
    """Every line names a kernel and sizes as calls look them up, and holds one config of that kernel's space."""
    assert tuning.device_slug(path.stem.replace("_", " ")) == path.stem
    for key, entry in json.loads(path.read_text()).items():
        kernel, itemsize, *sizes = key.split("/")
        dtype = {"2B": torch.bfloat16, "4B": torch.float32}[itemsize]
        sizes = tuple(map(int, sizes))
        assert tuning.size_key(kernel, dtype, *sizes) == key
        assert entry in [tuning.to_entry(config) for config in config_spaces()[kernel].configs(dtype, *sizes, H200)], key


@pytest.mark.parametrize("space", config_spaces().values(), ids=lambda space: space.kernel)
def test_no_tile_is_longer_than_its_axis_nor_beyond_the_device(space):
    small = tuning.Device("small", 64 * 1024)
    for dtype in (torch.bfloat16, torch.float32):
        for sizes in SIZES:
            for config in space.configs(dtype, *sizes, small):
                blocks = dict(config.blocks)
                assert space.count_shared_bytes(blocks, dtype.itemsize, config.num_stages) <= small.shared
                for block, length in space.axis_lengths(*sizes).items():
                    assert 16 <= blocks[block] <= max(16, tuning.next_power_of_2(length))


def test_a_frozen_choice_is_taken_where_it_was_measured(chosen_on):
    frozen = {tuning.size_key("bmm_chunk", torch.bfloat16, 64, 128, 256): [128, 32, 64, 8, 2]}
    assert tuning.to_entry(chosen_on("bmm_chunk", H200, frozen)) == [128, 32, 64, 8, 2]
    default = bmm_chunk.CONFIGS.configs(torch.bfloat16, 64, 128, 256, H200)[0]
    assert chosen_on("bmm_chunk", H200) == default
    # Sizes that round up to the same powers of two share a line; other dtypes have their own.
    assert tuning.to_entry(chosen_on("bmm_chunk", H200, frozen, sizes=(33, 100, 256))) == [128, 32, 64, 8, 2]
    assert tuning.to_entry(chosen_on("bmm_chunk", H200, frozen, dtype=torch.float32)) != [128, 32, 64, 8, 2]


def test_a_frozen_choice_shrinks_to_a_smaller_device(chosen_on):
    frozen = {tuning.size_key("bmm_chunk", torch.bfloat16, 64, 128, 256): [128, 128, 64, 8, 4]}
    small = tuning.Device("small", 32 * 1024)
    config = chosen_on("bmm_chunk", small, frozen)
    assert bmm_chunk.CONFIGS.count_shared_bytes(dict(config.blocks), 2, config.num_stages) <= small.shared


def test_a_forced_config_ends_with_its_context():
    inputs = random_inputs(Shape(), device="cpu")
    before = bmm_chunk.CONFIGS.pick(inputs)
    forced = tuning.Config((("BLOCK_M", 16), ("BLOCK_N", 16), ("BLOCK_K", 16)), 2, 1)
    with tuning.force_config("bmm_chunk", forced):
        assert bmm_chunk.CONFIGS.pick(inputs) is forced
        assert forced["BLOCK_M"] == 16 and forced.launch["num_warps"] == 2
    assert bmm_chunk.CONFIGS.pick(inputs) == before
