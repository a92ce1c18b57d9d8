"""Modules of Gluon kernels, loaded anew with the stand-in for the language, so that what they launch runs here."""

import importlib
import importlib.util
import linecache
import sys
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from unittest.mock import patch

import torch
import triton.experimental
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssd.runtime import dependent_launch, launch
from ssd.runtime.late import includes_late, receive
from tests.executor.copies import Descriptor
from tests.executor.language import NAMES, Jit, Pointer, stand_ins
from tests.executor.schedule import Block, Fault, Touched
from tests.executor.values import Int, count

_OPTIONS = ("num_warps", "maxnreg")
Edits = dict[str, list[tuple[str, str]]]


class Executor:
    """Modules whose Gluon kernels run on CPU tensors, one block after the other.

    Attributes:
        modules: by name. `install` puts them where others import them from.
        seed: of the schedules of the launches to come.
        launched: the names of the kernels that ran, in order.
    """

    def __init__(self, *names: str, edits: Edits | None = None):
        """names: of modules that launch kernels. edits: texts to be replaced in the source of some of these, by name; each
        must be there, once.
        """
        self.modules, self.seed, self.launched = _load(names, edits or {}), 0, []
        self.beside: Touched | None = None  # what the last launch touched, if it let the next one begin and nothing came since
        self.after_other = False  # the last launch was plain Triton's, and lets the next one begin
        for module in self.modules.values():
            if hasattr(module, "launch"):
                module.launch = self._launcher(module.launch)

    @contextmanager
    def install(self):
        """Context in which imports find these modules, and in which it is seen what comes between launches."""
        def launch_other(kernel, programs: int, args: tuple, config: dict):
            lets = config.get("LETS_NEXT", False)
            before = [(t, t.clone()) for t in args if lets and isinstance(t, Tensor)]
            result = compile_and_launch(kernel, programs, args, config)
            written = {_get_memory(t) for t, old in before if not torch.equal(t, old)}
            self.beside, self.after_other = Touched({_get_memory(t) for t, _ in before}, written) if lets else None, lets
            return result

        compile_and_launch = launch._compile_and_launch
        with (patch.dict(sys.modules, self.modules), _Watch(self),
              patch.object(dependent_launch, "gdc_launch_dependents", lambda: None),  # the interpreter has none
              patch.object(launch, "_compile_and_launch", launch_other)):
            yield

    def _launcher(self, launch):
        return lambda kernel, *args, **config: (self._launch if isinstance(kernel, Jit) else launch)(kernel, *args, **config)

    def _launch(self, kernel: Jit, programs: int, *args, launch_pdl: bool = False, **config) -> None:
        if includes_late(args):  # as `launch` does
            self.beside = None
            receive()
        given = [_of_kernel(arg) for arg in args]
        config = {name: _of_kernel(value) for name, value in config.items() if name not in _OPTIONS}
        name, beside = kernel.function.__name__, self.beside if launch_pdl else None
        if launch_pdl and beside is None:
            raise Fault(f"{name} begins early, which what came before it does not let it")
        self.launched.append(name)
        self.after_other = False
        threads, touched, lets, waited = torch.get_num_threads(), Touched(), True, not launch_pdl
        torch.set_num_threads(1)  # the tiles are small
        try:
            for number in range(programs):
                block = Block(number, programs, kernel.function, (self.seed, len(self.launched), number), beside)
                block.run(*given, **config)
                touched.add(block.touched)
                lets, waited = lets and block.lets_next_begin, waited or block.has_waited
        finally:
            torch.set_num_threads(threads)
        if not waited:
            raise Fault(f"{name} may end before the launch before, which the next one would not know")
        self.beside = touched if lets else None


class _Watch(TorchFunctionMode):
    """Notes that torch computed a tensor between two launches, which on a GPU is a launch, too."""

    def __init__(self, executor: Executor):
        super().__init__()
        self.executor = executor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        name = function.__name__
        in_place = name.endswith("_") and not name.endswith("__")
        made = isinstance(result, Tensor) and not _is_view(result, args) and "empty" not in name
        if in_place or made:
            executor = self.executor
            if executor.after_other and executor.beside is not None and isinstance(result, Tensor):
                executor.beside.written.add(_get_memory(result))  # as if it were a part of that launch
            else:
                executor.beside = None
        return result


def _is_view(t: Tensor, of: tuple) -> bool:
    return _get_memory(t) in [_get_memory(other) for other in of if isinstance(other, Tensor)]


def _get_memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _of_kernel(arg):
    """An argument of a launch as the kernel sees it."""
    if isinstance(arg, Tensor):
        return Pointer(arg, Int(arg.storage_offset()))
    if isinstance(arg, TensorDescriptor):
        return Descriptor(arg)
    if isinstance(arg, tuple):
        given = map(_of_kernel, arg)
        return type(arg)(*given) if hasattr(arg, "_fields") else tuple(given)
    return Int(arg) if type(arg) is int else arg


def _load(names: tuple[str, ...], edits: Edits) -> dict[str, ModuleType]:
    assert edits.keys() <= set(names), "only named modules can be edited"
    for name in names:
        importlib.import_module(name)
    packages = {"ssd", *(name.partition(".")[0] for name in names)}
    stale = [name for name, module in sys.modules.items() if name.partition(".")[0] in packages and _uses_gluon(module)]
    standing_in = stand_ins()
    with ExitStack() as stack:
        stack.enter_context(patch.object(SourceFileLoader, "source_to_code", _compile))
        stack.enter_context(patch.dict(sys.modules, standing_in))
        stack.enter_context(patch.object(triton.experimental, "gluon", standing_in[NAMES[0]]))
        for package in {name.rpartition(".")[0] for name in stale}:
            stack.enter_context(patch.dict(vars(sys.modules[package])))
        for name in stale:
            del sys.modules[name]
        for name in names:
            _import(name, edits.get(name, []))
        fresh = {name: sys.modules[name] for name in stale if name in sys.modules}
    for module in fresh.values():
        module.range = count
    return fresh


@cache
def _compile_once(source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def _compile(self: SourceFileLoader, data: bytes, path: str, **options) -> CodeType:
    """Instead of a loader's own: the same modules are loaded by many tests, and not everywhere is their bytecode kept."""
    return _compile_once(data, path)


def _uses_gluon(module: ModuleType) -> bool:
    """Whether something of it is Gluon's: a module or a function."""
    names = ((getattr(value, "__name__", None), type(value).__module__) for value in vars(module).values())
    return any(isinstance(name, str) and name.startswith(NAMES[0]) for pair in names for name in pair)


def _import(name: str, edits: list[tuple[str, str]]) -> None:
    if not edits:
        importlib.import_module(name)
        return
    assert name not in sys.modules, f"{name} has been imported by a module named before it, without its edits: name it first"
    spec = importlib.util.find_spec(name)
    source, file = spec.loader.get_source(name), f"{spec.origin}, edited"
    for old, new in edits:
        assert source.count(old) == 1, f"{name} has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    exec(compile(source, file, "exec"), vars(module))
