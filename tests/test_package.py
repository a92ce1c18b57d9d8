"""The package that users install: what is in it, and that it works where their own modules have our names."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.programs import ROOT
from tests.shared import make_once

pytest.importorskip("build", reason="build is not installed")
pytest.importorskip("twine", reason="twine is not installed")

NEEDED = {"torch", "triton"}


def run(*command: str | Path, **how) -> subprocess.CompletedProcess:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **how)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of what git tracks, or of the files at the top and of all packages where there is no git."""
    (found,) = make_once(tmp_path_factory, "package", build).glob("dist/*.whl")
    return found


def build(folder: Path) -> None:
    source, out = folder / "source", folder / "dist"
    packages = [path for name in ("ssd", "fused", "persistent", "experiments") for path in (ROOT / name).rglob("*.*")]
    found = [str(path.relative_to(ROOT)) for path in (*ROOT.glob("[!.]*"), *packages) if path.suffix != ".pyc"]
    for name in run("git", "-C", ROOT, "ls-files").stdout.split() or found:
        if not name.startswith(("tests/", "docs/", "experiments/results/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    checked = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir()))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def link(names: set[str], site: Path) -> None:
    """Put these distributions, as they are installed here, and what they depend on into the environment of `site`."""
    waiting, linked = [*names], set()
    while waiting:
        name = waiting.pop()
        if name in linked:
            continue
        linked.add(name)
        found = distribution(name)
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (site / top).exists():  # what several share, such as nvidia/, is linked once
                (site / top).symlink_to(found.locate_file(top))
        waiting += list_required(found.requires)


def list_required(lines: list[str] | None) -> set[str]:
    """The names in these requirements, but for those of extras and of other platforms."""
    return {need.name for need in map(Requirement, lines or ()) if not need.marker or need.marker.evaluate({"extra": ""})}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The Python of an environment that holds the wheel, torch, Triton and what these two depend on, and nothing else."""
    def install(folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        asked = run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
        assert asked.returncode == 0, asked.stderr
        (site,) = folder.glob("lib/python*/site-packages")
        link(NEEDED, site)

    return make_once(tmp_path_factory, "environment", install) / "bin" / "python"


@pytest.fixture
def project(tmp_path) -> Path:
    """A user's folder, with modules of their own that have our names."""
    (tmp_path / "fused.py").write_text("mine = True\n")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("mine = True\n")
    return tmp_path


def start(python: Path, program: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return run(python, "-c", program, cwd=folder, env=environment)


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"ssd", "fused", "persistent"}
    assert "ssd/py.typed" in names and any(name.startswith("ssd/configs/") for name in names)


def test_the_library_asks_for_torch_and_triton_alone(installed):
    (found,) = distributions(name="ssd-kernels", path=[str(next(installed.parents[1].glob("lib/python*/site-packages")))])
    assert list_required(found.requires) == NEEDED


def test_the_whole_example_runs_beside_modules_of_our_names(installed, project):
    (example,) = re.findall(r"```python\n(import torch\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    program = example + """
import ssd, fused, experiments
assert "site-packages" in ssd.__file__ and ssd.__version__ and fused.mine and experiments.mine
"""
    done = start(installed, program, project)
    assert done.returncode == 0, done.stderr


HIDDEN = """
import ssd
for variant in ("fused", "persistent"):
    try:
        print(ssd.get_variant(variant))
    except ImportError as error:
        print(error)
"""


def test_a_module_that_hides_a_package_is_named(installed, project):
    assert start(installed, HIDDEN, project).stdout.count(str(project / "fused.py")) == 2


def test_a_variant_is_found_where_nothing_hides_it(installed, tmp_path):
    done = start(installed, "import ssd; ssd.get_variant('persistent')", tmp_path)
    assert done.returncode == 0, done.stderr
