"""The constants of the time model: one file for each GPU, whole or refused."""

import json

import pytest

from fused.time_model import CONFIGS, FALLBACK, Step, TimeModel, get_time_model


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_written_as_read(path):
    assert TimeModel.read(get_time_model(path.stem).write()) == get_time_model(path.stem)


def test_a_gpu_without_a_file_has_the_fallback():
    assert get_time_model("a GPU of no name") == get_time_model(FALLBACK)


def test_every_constant_is_asked_for():
    constants = json.loads((CONFIGS / f"{FALLBACK}.json").read_text())
    for name in constants:
        with pytest.raises(ValueError, match=name):
            TimeModel.read(json.dumps({n: value for n, value in constants.items() if n != name}))
    with pytest.raises(ValueError, match="unheard_of"):
        TimeModel.read(json.dumps(constants | {"unheard_of": 1}))


def test_blocks_share_the_memory():
    step = Step(alone=1.0, shared=0.1)
    assert step.among(1) == pytest.approx(1.0, rel=1e-3) and step.among(100) == pytest.approx(10.0, rel=1e-3)
