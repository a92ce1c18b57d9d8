"""What the package says of a torch or Triton that it is not tested with."""

import re
import sys
import warnings

import pytest
import torch
import triton

from ssd.runtime.versions import TESTED, check, release
from tests.programs import ROOT
from tools import tritons


@pytest.mark.parametrize("version, expected", [("3.7.1", (3, 7)), ("2.11.0+cu130", (2, 11)), ("3.10.0a0+git12", (3, 10))])
def test_release(version, expected):
    assert release(version) == expected


def test_tested_versions_are_welcome():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check()


@pytest.mark.parametrize("module, version, accepted", [(triton, "3.5.1", "3.6 to 3.9"), (torch, "2.9.0", "2.11 to 2.15")])
def test_older_ones_are_refused(module, version, accepted, monkeypatch):
    monkeypatch.setattr(module, "__version__", version)
    with pytest.raises(ImportError, match=f"got {module.__name__} {version}, expected .* {accepted}"):
        check()


@pytest.mark.parametrize("module, version, known", [(triton, "3.10.0", "3.6 to 3.9"), (torch, "2.16.0", "2.11 to 2.15")])
def test_newer_ones_are_warned_of(module, version, known, monkeypatch):
    monkeypatch.setattr(module, "__version__", version)
    with pytest.warns(UserWarning, match=f"untested with {module.__name__} {version}.* {known}"):
        check()


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"triton is not installed, expected triton 3\.6 or newer"):
        check()


def test_bounds_are_those_of_the_package():
    """And of the versions that CI compiles with."""
    project = (ROOT / "pyproject.toml").read_text()
    for package, (oldest, newest) in TESTED.items():
        (given,) = re.findall(rf'"{package}(>[^";]*)', project)
        low, high = (release(bound) for bound in re.findall(r"[>=<]+(\d+\.\d+)", given))
        assert low == oldest and high == (newest[0], newest[1] + 1)
    assert tuple(map(release, tritons.PINNED)) == TESTED["triton"] and {*tritons.PINNED} <= {*tritons.ALL}
