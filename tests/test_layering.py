"""The rules of the source tree: which package may import which, how long a file may be, what no kernel uses."""

import ast
import re
from importlib.util import resolve_name
from pathlib import Path

import pytest

from tests.programs import ROOT

# Each imports its own and earlier ones. What of ssd is in no layer of its own is in the last: "ssd".
LAYERS = ({"ssd.types", "ssd.options", "ssd.variants"}, {"ssd.runtime"}, {"ssd.kernels"}, {"ssd"}, {"fused"}, {"persistent"},
          {"experiments"}, {"tools", "tests"})
PACKAGES = sorted({name.partition(".")[0] for names in LAYERS for name in names})
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def list_imported(source: str, module: str, is_package: bool) -> set[str]:
    """Absolute names of the modules that a source imports; relative imports are resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), module if is_package else module.rpartition(".")[0])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def imports(path: Path) -> set[str]:
    return list_imported(path.read_text(), name(path), path.name == "__init__.py")


def layer(module: str) -> int:
    """Index in LAYERS; below all of them for what is not of this tree."""
    package, _, rest = module.partition(".")
    known = {name: index for index, names in enumerate(LAYERS) for name in names}
    return known.get(f"{package}.{rest.partition('.')[0]}", known.get(package, -1))


def test_imports_are_resolved():
    """The judge itself: relative imports of modules and of packages."""
    assert list_imported("from ..types import A\nfrom . import b", "ssd.kernels.x", False) == {"ssd.types.A", "ssd.kernels.b"}
    assert list_imported("from .api import f\nimport torch.nn", "ssd", True) == {"ssd.api.f", "torch.nn"}
    assert list_imported("def f():\n from fused.variant import V", "ssd.registry", False) == {"fused.variant.V"}
    found = map(layer, ("torch", "ssd.types.SSDInputs", "ssd.kernels.chunk_cumsum", "ssd.baseline.forward", "fused", "tests.a"))
    assert [*found] == [-1, 0, 2, 3, 4, 7]


def test_nothing_imports_from_above():
    assert not {(name(path), module) for path in SOURCES for module in imports(path) if layer(module) > layer(name(path))}


def test_ssd_does_not_name_what_is_built_on_it():
    """But for the table of variants: neither the variants nor their kernels, in code, docstrings or comments."""
    above = ("fused", "persistent")
    kernels = {path.stem for package in above for path in (ROOT / package / "kernels").glob("*.py") if "_" in path.stem}
    names = re.compile(rf"\b({'|'.join(sorted({*above, *kernels} - {'__init__'}))})\b")
    found = {f"{path.relative_to(ROOT)}: {match[0]}" for path in SOURCES if name(path).startswith("ssd.")
             for match in names.finditer(path.read_text()) if name(path) != "ssd.variants"}
    assert not found


def test_files_are_short():
    assert not {name(path) for path in SOURCES if len(path.read_text().splitlines()) > 400}


@pytest.mark.parametrize("forbidden, why", [
    (r"make_block_ptr", "block pointers leave Triton"),
    (r"atomic_\w+\((?!arrivals \+ \w+, 1, )", "whole numbers alone are the same in any order: an atomic may count arrivals"),
    (r"[\"'](/(?:home|root|work|Users|mnt|opt|tmp|usr|data)/[^\"']*)", "a path of one machine helps none"),
], ids=("block pointers", "atomics", "paths"))
def test_what_no_source_contains(forbidden, why):
    others = (path for path in SOURCES if path != Path(__file__))
    assert not {name(path) for path in others if re.search(forbidden, path.read_text())}, why
