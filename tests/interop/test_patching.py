"""Patches of a library that does not exist: they nest, they end in any order, and each is in force whole or not at all."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import ssd
from ssd.interop import patching
from ssd.interop.patching import Library, check_version, put


@pytest.fixture
def names(monkeypatch) -> dict:
    """Globals of a module of the library."""
    monkeypatch.setattr(patching, "_libraries", [])
    return {"scan": "theirs"}


@pytest.fixture
def library(names) -> Library:
    def install(undo):
        put(undo, names, "scan", "ours")
        put(undo, names, "new", "ours")

    return Library("zebra", install)


def test_a_block(library, names):
    with library.patch("torch") as patch:
        assert names == {"scan": "ours", "new": "ours"}
        assert ssd.patched() == {"zebra": "torch"} and "in force" in repr(patch)
    assert names == {"scan": "theirs"} and ssd.patched() == {} and "undone" in repr(patch)


def test_nested_blocks(library, names):
    with library.patch("torch"):
        with library.patch("baseline"):
            assert library.variant == "baseline" and names["scan"] == "ours"
        assert library.variant == "torch" and names["scan"] == "ours"
    assert names == {"scan": "theirs"}


def test_options(library):
    few = ssd.Options(keep_bytes=100)
    assert library.settings == {"variant": "auto", "options": None}
    with library.patch("torch", few):
        assert library.settings == {"variant": "torch", "options": few}
        with library.patch("auto"):
            assert library.settings == {"variant": "auto", "options": None}, "each patch has its own"
    with pytest.raises(TypeError, match=r"options: got dict, expected ssd\.Options"):
        library.patch("torch", {"keep_bytes": 100})
    assert not library.patched


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_any_order(library, names, order):
    variants = ["torch", "auto", "baseline"]
    patches = [library.patch(variant) for variant in variants]
    left = dict(enumerate(variants))
    for number in order:
        assert library.variant == left[max(left)] and names["scan"] == "ours"
        patches[number].undo()
        del left[number]
    assert names == {"scan": "theirs"} and library.variant == "auto"


def test_threads(library, names):
    """Each has the functions in its block, while others come and go."""
    def come_and_go(_) -> set[str]:
        found = set()
        for _ in range(500):
            with library.patch("torch"):
                found |= {names["scan"], library.variant}
        return found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert set().union(*threads.map(come_and_go, range(4))) == {"ours", "torch"}
    finally:
        sys.setswitchinterval(interval)
    assert names == {"scan": "theirs"} and ssd.patched() == {}


def test_all_or_nothing(names):
    def install(undo):
        put(undo, names, "scan", "ours")
        raise LookupError

    library = Library("zebra", install)
    with pytest.raises(LookupError):
        library.patch("auto")
    assert names == {"scan": "theirs"} and ssd.patched() == {}


@pytest.mark.parametrize("version", ["2.1", "2.4.0", "10.3.1", "unknown"])
def test_versions(monkeypatch, version):
    monkeypatch.setattr(patching.metadata, "version", lambda package: version)
    with pytest.raises(ImportError, match=rf"zebra: got version {version}.*expected 2\.2 to 2\.3"):
        check_version("zebra", (2, 2), (2, 3), "buy one")
    monkeypatch.setattr(patching.metadata, "version", lambda package: "2.3.2.post1")
    assert check_version("zebra", (2, 2), (2, 3), "buy one") == (2, 3)


def test_other_attributes_of_ssd():
    with pytest.raises(AttributeError, match="module 'ssd' has no attribute 'patch_zebra'"):
        ssd.patch_zebra  # noqa: B018
