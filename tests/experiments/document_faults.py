"""Faults with states of documents, planted around a function that takes cu_seqlens."""

from collections.abc import Callable

import torch
from torch import Tensor


def keep(t: Tensor) -> Tensor:
    return t


def forget(states: Tensor) -> Tensor:
    """The second document's dropped."""
    return states.index_fill(0, torch.tensor([1]), 0.0)


def shift(states: Tensor) -> Tensor:
    """To each document, that of the one before."""
    return states.roll(1, 0)


def change_arguments(**changes: Callable) -> Callable:
    """Of calls with cu_seqlens, which mirrors do not make."""

    def wrap(right: Callable) -> Callable:
        def wrong(*args, **given):
            if given.get("cu_seqlens") is not None:
                given |= {name: change(given[name]) for name, change in changes.items()}
            return right(*args, **given)

        return wrong

    return wrap


def change_results(*changes: Callable) -> Callable:
    """One change for each result of calls with cu_seqlens."""

    def wrap(right: Callable) -> Callable:
        def wrong(*args, **given):
            results = right(*args, **given)
            if given.get("cu_seqlens", args) is None:
                return results
            return tuple(change(t) for change, t in zip(changes, results, strict=True))

        return wrong

    return wrap
