"""Switches in the environment."""

import pytest

from ssd.runtime.switches import is_on


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", True), (None, True)])
def test_values(value, on, monkeypatch):
    monkeypatch.delenv("SSD_REPLAY", raising=False)
    if value is not None:
        monkeypatch.setenv("SSD_REPLAY", value)
    assert is_on("SSD_REPLAY", True) is on


@pytest.mark.parametrize("value", ["no", "False", "2"])
def test_others_are_refused(value, monkeypatch):
    monkeypatch.setenv("SSD_REPLAY", value)
    with pytest.raises(ValueError, match=f"^SSD_REPLAY: got '{value}' in the environment, expected 0 or 1"):
        is_on("SSD_REPLAY", True)
