"""What the custom ops share: when one is needed, how absent tensors pass through it, and how it is registered.

An op is opaque to torch.compile, so what runs inside launches what it likes. Its outputs are fixed in number: an absent one is
an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .replay import replayed

_PLAIN = (Tensor, torch.nn.Parameter)
_libraries: list[torch.library.Library] = []  # registrations live as long as the library that made them


def are_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody but autograd watches what becomes of the tensors, so that an op around the launches has no use.

    An op costs two trips through torch's dispatcher. It is needed where torch.compile, a transform, a mode or a subclass must
    see one opaque call, not the launches.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and all([t is None or (type(t) in _PLAIN and not t.is_neg()) for t in tensors])
    )


def launched(call: Callable, op: Callable, tensors: tuple[Tensor | None, ...], settings: tuple):
    """call(*tensors, *settings), from its tape if it has one; where an op is needed, op(*tensors, *settings)."""
    return replayed(call, tensors, settings) if are_plain(tensors) else op(*tensors, *settings)


def below_autograd(op: Callable) -> Callable:
    """The op as the forward of its autograd function calls it."""

    def called(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return called


def wants_gradient(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether a backward may follow what is computed from these."""
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def or_empty(t: Tensor | None, like: Tensor) -> Tensor:
    """The tensor as an op's output."""
    return like.new_empty(0) if t is None else t


def all_present(call: Callable) -> Callable:
    """`call`, whose first result is a tensor, with its results as an op returns them."""

    def op(*args):
        out, *others = call(*args)
        return out, *(or_empty(t, out) for t in others)

    return op


def or_none(t: Tensor | None) -> Tensor | None:
    """An op's output as what it stands for."""
    return t if t is not None and t.numel() else None


def register(op: str, run: Callable, differentiable: Callable, run_backward: Callable | None = None) -> None:
    """Gives the op ssd::<op> its implementation, and what autograd runs instead, which joins it to its backward.

    run_backward: the implementation of ssd::<op>_bwd, if that is an op as well.
    """
    torch.library.impl(f"ssd::{op}", "default", run)
    if run_backward is not None:
        torch.library.impl(f"ssd::{op}_bwd", "default", run_backward)
    _libraries.append(torch.library.Library("ssd", "FRAGMENT"))
    _libraries[-1].impl(op, lambda *args: differentiable(*args), "Autograd")


def register_inference(op: str, run: Callable, instead: str) -> None:
    """Gives the op ssd::<op> its implementation, and no gradient: better an error when one is asked for than one too short.

    instead: what to train through.
    """

    class Inference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            with torch._C._AutoDispatchBelowAutograd():
                return getattr(torch.ops.ssd, op)(*args)

        @staticmethod
        def backward(ctx, dout):
            raise RuntimeError(f"{op} has no gradient: call it under torch.no_grad(), or train through {instead}")

    register(op, run, Inference.apply)
