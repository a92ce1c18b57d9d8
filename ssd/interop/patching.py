"""What patches of other libraries share: how one is put in place, which variant is in force, and how it is taken out again."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from threading import RLock
from types import ModuleType

from ..options import Options, check_options
from ..registry import check_known, get_variant

INSTALL_MAMBA_SSM = (
    "install it without its CUDA extensions, which these kernels do not use: "
    "MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm==2.3.2.post1"
)
_ABSENT = object()
_libraries: list[Library] = []


class Library:
    """A library that can be patched, and the patches of it that nobody has undone, the newest last.

    The first patch puts functions in place and the last to be undone takes them out; in between nothing moves, since those
    functions ask for the newest patch's variant and options whenever they are called. So patches nest, and may be undone in any
    order.
    """

    def __init__(self, name: str, install: Callable[[ExitStack], None]):
        """install: puts the functions in place, and registers with the stack how each step is undone."""
        self.name, self._install = name, install
        self.alone = RLock()  # held while functions are moved: what one thread takes for in place another may be taking out
        self._patches: list[Patch] = []
        self._undo = ExitStack()
        _libraries.append(self)

    @property
    def variant(self) -> str:
        """The newest patch's; "auto" for functions that somebody still holds when no patch is in force."""
        return self.settings["variant"]

    @property
    def settings(self) -> dict[str, object]:
        """The newest patch's variant and options, as `ssd.ssd_chunk_scan` takes them."""
        newest = self._patches[-1:]  # which another thread may take out meanwhile
        return {"variant": newest[0].variant, "options": newest[0].options} if newest else {"variant": "auto", "options": None}

    @property
    def patched(self) -> bool:
        return bool(self._patches)

    def patch(self, variant: str, options: Options | None = None) -> Patch:
        """Puts a patch in force, all of it or, when this raises, nothing."""
        check_known(variant)
        if variant != "auto":
            get_variant(variant)
        check_options(options)
        with self.alone:
            if not self._patches:
                try:
                    self._install(self._undo)
                except BaseException:
                    self._undo.close()
                    raise
            patch = Patch(self, variant, options)
            self._patches.append(patch)
            return patch

    def remove(self, patch: Patch) -> None:
        with self.alone:
            if patch in self._patches:
                self._patches.remove(patch)
                if not self._patches:
                    self._undo.close()

    def holds(self, patch: Patch) -> bool:
        return patch in self._patches


class Patch:
    """A patch in force, until `undo` is called or a `with` block of it ends. One that was undone is not used again."""

    def __init__(self, library: Library, variant: str, options: Options | None):
        self.variant, self.options, self._library = variant, options, library

    def undo(self) -> None:
        """Takes the patch out; again does nothing. What other patches of the library put in place stays."""
        self._library.remove(self)

    def __enter__(self) -> Patch:
        if not self._library.holds(self):
            raise RuntimeError(f"this patch of {self._library.name} was undone; call patch_{self._library.name} again")
        return self

    def __exit__(self, *_) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "in force" if self._library.holds(self) else "undone"
        return f"<patch of {self._library.name} with variant {self.variant!r}, {state}>"


def patched() -> dict[str, str]:
    """The libraries that are patched now, each with the variant that its functions run."""
    return {library.name: library.variant for library in _libraries if library.patched}


def put(undo: ExitStack, where: dict, name: str, value: object) -> None:
    """Sets where[name], of a module's globals or `sys.modules`; `undo` sets it back or removes it."""
    before = where.get(name, _ABSENT)

    def put_back() -> None:
        if before is _ABSENT:
            where.pop(name, None)
        else:
            where[name] = before

    where[name] = value
    undo.callback(put_back)


def replace_functions(undo: ExitStack, packages: tuple[str, ...], pairs: list[tuple[Callable, Callable]]) -> None:
    """Puts the second of a pair wherever a global of these packages' loaded modules is the first; `undo` does the opposite,
    in modules too that were loaded since.
    """
    undo.callback(_swap, packages, [(new, old) for old, new in pairs])
    _swap(packages, pairs)


def _swap(packages: tuple[str, ...], pairs: list[tuple[Callable, Callable]]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in packages and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                for old, new in pairs:
                    if value is old:
                        setattr(module, name, new)


def check_version(package: str, first: tuple[int, int], last: tuple[int, int], install: str) -> tuple[int, int]:
    """Major and minor version of an installed package, from first to last inclusive; `install` says how it is installed.

    Raises:
        ImportError: the package is not installed, or its version is another one.
    """
    accepted = f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"
    loaded = getattr(sys.modules.get(package), "__version__", None)
    try:
        version = loaded or metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed; accepted versions: {accepted}; {install}", name=package) from None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = tuple(map(int, numbers.groups())) if numbers else None
    if found is None or not first <= found <= last:
        raise ImportError(f"{package}: got version {version}, which this patch was not tested with, expected {accepted}",
                          name=package)
    return found
