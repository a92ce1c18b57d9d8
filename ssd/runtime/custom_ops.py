"""Custom ops: how torch.compile and autograd see a function that launches kernels.

An op is opaque to torch.compile, so what runs inside launches what it likes. It costs two trips through torch's dispatcher, so
it is called only where somebody must see one call instead of the launches (`are_plain`). Elsewhere the launches are made
directly, or repeated from a recording (`replay`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from .replay import replay

Tensors = tuple[Tensor | None, ...]

_PLAIN = (Tensor, torch.nn.Parameter)
_libraries: list[torch.library.Library] = []  # registrations live as long as the library that made them


def are_plain(tensors: Tensors) -> bool:
    """True when no tracer, mode, transform or tensor subclass is active; autograd may be."""
    return (
        not torch.compiler.is_compiling()
        and not get_eval_frame_callback()  # torch.compile left out the caller, but not what it calls
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and all([t is None or (type(t) in _PLAIN and not t.is_neg()) for t in tensors])
    )


def wants_gradient(tensors: Tensors) -> bool:
    """True when a backward may follow what is computed from these."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def define_op(name: str, schema: str, run: Callable, fake: Callable, any_strides: bool = False) -> Callable:
    """The op ssd::<name>, which runs `run` and is traced by `fake`. It has no gradient.

    any_strides: `run` takes tensors of any strides, whatever `fake` saw, and arranges itself what it cannot take. Else
        torch.compile copies what its matrix products have padded.
    """
    torch.library.define(f"ssd::{name}", schema, tags=(torch.Tag.flexible_layout,) if any_strides else ())
    torch.library.impl(f"ssd::{name}", "default", _hide_from_compile(run))
    torch.library.register_fake(f"ssd::{name}", fake)
    return getattr(torch.ops.ssd, name)


def define_inference_op(name: str, schema: str, run: Callable, fake: Callable, instead: str) -> Callable:
    """As `define_op`, of an op whose backward raises RuntimeError: better than a gradient that is incomplete.

    instead: what to train through.
    """
    op = define_op(name, schema, run, fake)

    class Inference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)

        @staticmethod
        def backward(ctx, dout):
            raise RuntimeError(f"{name} has no gradient: call it under torch.no_grad(), or train through {instead}")

    _register_autograd(name, Inference.apply)
    return op


class DifferentiableOp:
    """A function of tensors and settings with a gradient: the ops ssd::<name> and ssd::<name>_bwd, joined for autograd.

    An op's outputs are fixed in number: an absent one is None where launches are made directly, and empty from the op.

    Args:
        name: of the op.
        tensors, settings: the arguments as a schema lists them, "Tensor x, Tensor? bias" and "bool silu".
        outputs: names of the outputs that have a gradient. The first is never absent.
        extra: names of outputs without one.
        kept: names of outputs for the backward alone.
        forward: (*tensors, *settings) -> (*outputs, *extra, *kept).
        fake: the same, of tensors without memory; absent outputs are empty.
        backward: (*tensors, the first output where `reads_first` is given, *kept, *gradients of outputs, *settings) -> a
            gradient or None for each of the tensors.
        fake_backward: (*tensors) -> what the op of the backward returns; by default, tensors of their shapes and dtypes.
        arrange: changes a gradient of the first output, outside of what is recorded, before the backward takes it.
        replays: (settings) -> whether launches may be recorded and repeated; by default, always.
        reads_first: (tensors, settings) -> whether the backward reads the first output, which nobody may then change; else it
            is given None.
        any_strides: of `define_op`.
    """

    def __init__(self, name: str, tensors: str, settings: str, outputs: tuple[str, ...], forward: Callable, fake: Callable,
                 backward: Callable, extra: tuple[str, ...] = (), kept: tuple[str, ...] = (),
                 fake_backward: Callable | None = None, arrange: Callable[[Tensor], Tensor] | None = None,
                 replays: Callable[[tuple], bool] | None = None, reads_first: Callable[[Tensors, tuple], bool] | None = None,
                 any_strides: bool = True):
        self.forward, self.backward, self.arrange, self.replays = forward, backward, arrange, replays
        self.reads_first = reads_first
        self.saves = settings.endswith("bool save")
        self.ntensors, self.noutputs, self.nkept = tensors.count("Tensor"), len(outputs), len(kept)
        leaving = ", ".join(f"Tensor {out}" for out in (*outputs, *extra, *kept))
        read = outputs[: reads_first is not None]
        entering = ", ".join(f"Tensor? {t}" for t in (*read, *kept, *(f"d{out}" for out in outputs)))
        self.op = define_op(name, f"({tensors}, {settings}) -> ({leaving})", lambda *args: _fill(forward(*args)), fake,
                            any_strides)
        self.op_backward = define_op(
            f"{name}_bwd", f"({tensors}, {entering}, {settings}) -> ({', '.join(['Tensor'] * self.ntensors)})",
            lambda *args: _separate(_fill(backward(*args), like=args[0])),
            lambda *args: _fill((fake_backward or _make_like)(*args[: self.ntensors]), like=args[0]), any_strides)
        self.function = _join(name, self)
        _register_autograd(name, lambda *args: _fill(self.function.apply(*self._save_for_gradient(args))))

    def __call__(self, tensors: Tensors, settings: tuple, save: bool | None = None) -> Tensors:
        """Returns every output. settings: hashable. save: whether a backward may follow, if that is known."""
        if not are_plain(tensors):
            return self.op(*tensors, *settings)
        if wants_gradient(tensors) if save is None else save:
            return self.function.apply(*tensors, *settings)
        return self.launch(self.forward, tensors, settings, settings)

    def _save_for_gradient(self, args: tuple) -> tuple:
        """The op's arguments, with `save` where a backward may follow: a trace, as of torch.export, may not have known."""
        if self.saves and not args[-1] and wants_gradient(args[: self.ntensors]):
            return *args[:-1], True
        return args

    def launch(self, call: Callable, tensors: Tensors, arguments: tuple, settings: tuple) -> Tensors:
        """call(*tensors, *arguments), from a recording if there is one and settings allow it."""
        if self.replays is None or self.replays(settings):
            return replay(call, tensors, arguments)
        return call(*tensors, *arguments)


def differentiate_once(backward: Callable) -> Callable:
    """The backward of an autograd.Function, without a second derivative: better an error than one that is incomplete.

    torch's once_differentiable raises none where no incoming gradient requires one, as that of a sum, nor where the derivative
    by a tensor is asked for by name. The function must have saved all that its gradients depend on.
    """
    @wraps(backward)
    def run(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        saved = ctx.saved_tensors  # once: a checkpoint has them for one reader
        with torch.no_grad():
            results = backward(SimpleNamespace(**vars(ctx), saved_tensors=saved), *grads)
        found = [t for t in results if t is not None]
        sources = [t for t in (*saved, *grads) if t is not None and t.requires_grad]
        refused = iter(_Refused.apply(len(found), *found, *sources))
        return tuple([None if t is None else next(refused) for t in results])

    return run


class _Refused(torch.autograd.Function):
    """The first so many tensors as they are, as if they were computed from all; without a derivative."""

    @staticmethod
    def forward(ctx, count, *tensors):
        # a view could not be changed in place; torch's own vmap, which some of its functions use, has no rule for `detach`
        return tuple([t.view_as(t) if torch._C._functorch.is_legacy_batchedtensor(t) else t.detach() for t in tensors[:count]])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("second derivatives: got a backward through one, expected the first alone, which is all that there "
                           "is here")


def _join(name: str, op: DifferentiableOp) -> type[torch.autograd.Function]:
    """The function that joins the two ops. torch.library.register_autograd would take 120 us more of a call (torch 2.13)."""
    ntensors = op.ntensors

    def forward(ctx, *args):
        tensors, settings = args[:ntensors], args[ntensors:]
        if are_plain(tensors):
            outputs = op.launch(op.forward, tensors, settings, settings)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                outputs = op.op(*args)
        read = () if op.reads_first is None else (outputs[0] if op.reads_first(tensors, settings) else None,)
        ctx.save_for_backward(*tensors, *read, *outputs[len(outputs) - op.nkept :])
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        absent = [t for t in outputs[1 : op.noutputs] if t is not None and not t.numel()]
        ctx.mark_non_differentiable(*absent, *[t for t in outputs[op.noutputs :] if t is not None])
        return outputs

    @differentiate_once
    def backward(ctx, *grads):
        settings = ctx.settings
        if all([g is None for g in grads[: op.noutputs]]):
            return (None,) * (ntensors + len(settings))
        first, *others = grads[: op.noutputs]
        if op.arrange is not None and first is not None:
            first = op.arrange(first)
        entering = (*ctx.saved_tensors, first, *others)
        batched = any([g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in (first, *others)])
        if are_plain(entering) and not batched:
            grads = op.launch(op.backward, entering, settings, settings)
        else:
            grads = op.op_backward(*entering, *settings)
        grads = [None if t is None or not t.is_floating_point() else g if g.dtype == t.dtype else g.to(t.dtype)
                 for t, g in zip(entering[:ntensors], grads, strict=True)]
        return (*grads, *[None] * len(settings))

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def _register_autograd(name: str, differentiable: Callable) -> None:
    _libraries.append(torch.library.Library("ssd", "FRAGMENT"))
    _libraries[-1].impl(name, _hide_from_compile(differentiable), "Autograd")


def _hide_from_compile(run: Callable) -> Callable:
    """`run` for torch's dispatcher, without torch.compile looking into it; without importing that, which takes seconds."""
    untraced = _disable_dynamo(lambda *args: run(*args))  # a method takes no marks
    return lambda *args: (untraced if "torch._dynamo" in sys.modules else run)(*args)


def _fill(results: Tensors, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Results as an op returns them: an empty tensor in the place of an absent one."""
    like = results[0] if like is None else like
    return tuple([like.new_empty(0) if t is None else t for t in results])


def _separate(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results, each in memory of its own and from its beginning, as those of an op must be."""
    separate, taken = [], set()
    for t in results:
        memory = t.untyped_storage().data_ptr()
        separate.append(t.clone() if (memory in taken or t.storage_offset()) and t.numel() else t)
        taken.add(memory)
    return tuple(separate)


def new_like(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """A contiguous tensor of that shape, in its dtype unless given; None for None."""
    return None if t is None else t.new_empty(t.shape, dtype=dtype or t.dtype)


def _make_like(*tensors: Tensor | None) -> Tensors:
    return tuple([None if t is None or not t.is_floating_point() else new_like(t) for t in tensors])
