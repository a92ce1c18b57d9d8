"""Variants of the operator by name. A variant's module is imported when it is first asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from . import auto_variant
from .options import suggest
from .runtime.tuning import SPACES, ConfigSpace
from .types import Options, SSDGrads, SSDInputs, SSDSaved
from .variants import VARIANTS


@dataclass(frozen=True)
class Variant:
    """One implementation of the operator. Ours give `forward` and `backward`; a peer gives `apply` alone.

    Attributes:
        name: as users and benchmarks write it.
        supports: (SSDInputs) -> None, or the reason why this variant cannot run them.
        forward: (SSDInputs, Options, save: bool) -> (out, final_states, SSDSaved); save: a backward may follow. With a
            gate z, out is what `SSDSaved.out` says, or `SSDSaved.y` is left.
        backward: (SSDSaved, dout, dfinal_states, into: SSDGrads) -> SSDGrads.
        apply: (SSDInputs) -> (out, final_states), differentiable by itself.
        options: names of the fields of `Options` that this variant knows, but tf32, in the order in which an ablation adds
            them.
        states_every: (SSDInputs, Options) -> tokens between the states that a forward leaves in `SSDSaved.prev_states` where
            `SSDInputs.keeps_states`: chunk_size, 128 or 64; None: it leaves none.
        writes_states: (SSDInputs, Options) -> whether a forward writes the states that `SSDInputs.return_states_every` asks for
            into `SSDSaved.states`, and leaves no others, where none are kept for a backward. None: never.
        kernels: (SSDInputs, Options, mode: "fwd" or "bwd", keeps: bool) -> the name, in the tables of times, of the kernels
            that would run; keeps: whether states are kept between the two. Of variants that "auto" may choose.
        takes_documents: whether forward and backward take documents with states (`SSDInputs.has_document_states`) as they are.
            Other variants get them in rows with `initial_states`, see `baseline.document_rows`.
        takes_these: (SSDInputs, Options, mode: "fwd" or "bwd") -> whether it takes these documents with states as they are, of
            a variant that takes some.
        scan_deferring_norm: (SSDInputs with a gate, Options, weight (nheads, headdim), contiguous) -> (out, final_states,
            sums), of a forward alone: out is y silu(z) weight, for a gated norm's factor to come later, (N9) of docs/block.md;
            sums, (batch, seqlen or more, slices) fp32, are those of the squares of y silu(z) over slices of all channels. Both
            are contiguous. None: there is none. Not asked of variants that users add.
        explain_no_deferred_norm: (SSDInputs, Options) -> None, or why `scan_deferring_norm` cannot run them; beside that one.
        adapts: what `apply` does around the peer's own kernels, and so is in its times; None: nothing.
    """

    name: str
    supports: Callable
    forward: Callable | None = None
    backward: Callable | None = None
    apply: Callable | None = None
    options: tuple[str, ...] = ()
    states_every: Callable | None = None
    writes_states: Callable | None = None
    kernels: Callable | None = None
    takes_documents: bool = False
    takes_these: Callable | None = None
    scan_deferring_norm: Callable | None = None
    explain_no_deferred_norm: Callable | None = None
    adapts: str | None = None


_ADDED: dict[str, Variant] = {}  # by `add_variant`


def variant_names() -> tuple[str, ...]:
    """Every name that `get_variant` knows, whether or not its packages are installed."""
    return (*VARIANTS, *_ADDED)


def check_known(name: object, known: tuple[str, ...] | None = None) -> None:
    """known: the names that are accepted; those of all variants and "auto" unless given.

    Raises:
        ValueError: it is none of them; the message lists them.
    """
    known = (*variant_names(), "auto") if known is None else known
    if name not in known:
        raise ValueError(f"variant: got {name!r}, expected one of {', '.join(map(repr, known))}{suggest(name, known)}")


def add_variant(variant: Variant) -> None:
    """Make a variant of your own known by its name, in this process. The same name twice replaces it.

    Raises:
        TypeError: it is no Variant.
        ValueError: the name is that of a variant here.
    """
    if not isinstance(variant, Variant):
        raise TypeError(f"variant: got {type(variant).__name__}, expected an ssd.registry.Variant")
    if variant.name in (*VARIANTS, "auto"):
        raise ValueError(f"variant.name: got {variant.name!r}, expected none of {', '.join(map(repr, (*VARIANTS, 'auto')))}")
    _ADDED[variant.name] = variant


def belongs_to_user(name: str) -> bool:
    """Whether the name is a variant of the user's."""
    return name in _ADDED


def is_peer(name: str) -> bool:
    """Whether the name is another project's implementation, differentiable by itself."""
    # names are looked for in a tuple first, since what is no name need not be hashable
    return name in variant_names() and (_ADDED[name].apply is not None if name in _ADDED else VARIANTS[name].peer)


def get_variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        ValueError: no such name; the message lists the known ones.
        ImportError: a peer's package is missing, or a module of the user's hides a package of ours; the message names it.
    """
    check_known(name, variant_names())
    if name in _ADDED:
        return _ADDED[name]
    module = VARIANTS[name].module
    try:
        found = getattr(sys.modules.get(module), "VARIANT", None)  # not there yet while another thread imports it
        return found or import_module(module).VARIANT
    except ModuleNotFoundError as reason:
        for package in {entry.module.partition(".")[0] for entry in VARIANTS.values()}:
            if hidden_by := _find_other(package):
                raise ImportError(f"variant {name!r} needs this project's package {package!r}, but `import {package}` finds "
                                  f"{hidden_by}: rename that, or run elsewhere") from reason
        raise


def _find_other(package: str) -> str | None:
    """The file that a package's name stands for where that is not the package beside this one."""
    found = sys.modules.get(package)
    spec = found.__spec__ if found else find_spec(package)
    origin = getattr(found, "__file__", None) or (spec and spec.origin)
    return origin if origin and Path(origin).parents[1] != Path(__file__).parents[1] else None


@cache
def list_candidates() -> tuple[str, ...]:
    """The names that "auto" chooses from on a GPU, in the order in which it tries them where it knows no better."""
    return tuple(name for name, entry in reversed(VARIANTS.items()) if entry.auto)


def config_spaces() -> dict[str, ConfigSpace]:
    """The config space of every kernel of our variants, by the kernel's name."""
    for name in list_candidates():
        get_variant(name)
    return SPACES


def find_states_interval(name: str, inputs: SSDInputs, options: Options) -> int | None:
    """Tokens between the states that a forward of the variant of that name keeps; None if it keeps none.

    "auto" keeps states as the first of its candidates does, whichever of them runs, where they take at most
    `options.keep_bytes`, and as many as there are for `inputs.return_states_every`.
    """
    asked = inputs.return_states_every is not None
    if not (asked or (options.save_states and (name != "auto" or options.keep_bytes))):
        return None
    variant = get_variant(_list_choices(inputs)[0] if name == "auto" else name)
    if inputs.has_document_states and not all(_takes_these(variant, inputs, options, mode) for mode in ("fwd", "bwd")):
        return None
    every = variant.states_every and variant.states_every(inputs, options)
    if name == "auto" and every is not None and not asked and _count_bytes(inputs, every) > options.keep_bytes:
        return None
    return every


def writes_asked_states(name: str, inputs: SSDInputs, options: Options, save: bool) -> bool:
    """True when a forward of the variant of that name writes `SSDSaved.states`. save: a backward may follow."""
    if not inputs.asks_for_states_alone(options, save):
        return False
    return _writes_states(get_variant(_list_choices(inputs)[0] if name == "auto" else name), inputs, options)


def _writes_states(variant: Variant, inputs: SSDInputs, options: Options) -> bool:
    return variant.writes_states is not None and variant.writes_states(inputs, options)


def adapt_options(name: str, inputs: SSDInputs, options: Options) -> Options:
    """The options that a forward of the variant of that name gets: with "auto", save_states says whether it keeps states."""
    if name == "auto" and find_states_interval(name, inputs, options) is None:
        return _keep_nothing(options)
    return options


@lru_cache
def _keep_nothing(options: Options) -> Options:
    return replace(options, save_states=False)


def _count_bytes(i: SSDInputs, every: int) -> int:
    """Bytes of a state every so many tokens."""
    return i.batch * i.count_states(every) * i.nheads * i.headdim * i.dstate * i.states_dtype.itemsize


def _list_choices(inputs: SSDInputs) -> tuple[str, ...]:
    """The names that "auto" chooses from for these inputs."""
    return ("torch",) if inputs.x.device.type == "cpu" else list_candidates()


def resolve(name: str, inputs: SSDInputs, options: Options, mode: str, keeps: bool = False, writes: bool = False) -> Variant:
    """The variant that runs these inputs: the one named, or with "auto" the best that can, which is said once.

    mode: "fwd" or "bwd". "auto" may choose another variant for each, since `SSDSaved` has one form.
    keeps: whether states are kept between the two.
    writes: whether a forward must write `SSDSaved.states`.

    Raises:
        ValueError: the variant named cannot run them, or none that "auto" may choose; the message gives the reasons.
    """
    if name == "auto":
        return _choose(inputs, options, mode, keeps, writes)
    variant = get_variant(name)
    _check_support(variant, inputs)
    return variant


def _check_support(variant: Variant, inputs: SSDInputs) -> None:
    if reason := variant.supports(inputs):
        raise ValueError(f"variant {variant.name!r} cannot run these inputs: {reason}")


def run_rows(variant: Variant, inputs: SSDInputs) -> Callable:
    """Its forward, of the rows that documents with states are cut into: with initial states, which it may refuse.

    Raises:
        ValueError: the kernels that cut documents cannot run them, or on a call the variant cannot run the rows.
    """
    if reason := get_variant("baseline").supports(inputs):
        raise ValueError(f"variant {variant.name!r} gets documents with states in rows, and the kernels of 'baseline' that cut "
                         f"them cannot run: {reason}")

    def forward(rows: SSDInputs, options: Options, save: bool) -> tuple:
        _check_support(variant, rows)
        return variant.forward(rows, options, save)

    return forward


def adapt_to_documents(variant: Variant, inputs: SSDInputs) -> Variant:
    """The variant as it runs these inputs: documents with states go to most variants in rows."""
    if variant.takes_documents or not inputs.has_document_states:
        return variant
    from .baseline import document_rows

    def forward(i: SSDInputs, options: Options, save: bool) -> tuple:
        if _takes_these(variant, i, options, "fwd"):
            return variant.forward(i, options, save)
        return document_rows.forward(run_rows(variant, i), i, options, save)

    def backward(saved: SSDSaved, *args) -> SSDGrads:
        if _takes_these(variant, saved.inputs, saved.options, "bwd"):
            return variant.backward(saved, *args)
        return document_rows.backward(variant.backward, saved, *args)

    return replace(variant, forward=forward, backward=backward)


def _takes_these(variant: Variant, inputs: SSDInputs, options: Options, mode: str) -> bool:
    return variant.takes_documents or (variant.takes_these is not None and variant.takes_these(inputs, options, mode))


def _choose(inputs: SSDInputs, options: Options, mode: str, keeps: bool, writes: bool) -> Variant:
    names, why = auto_variant.rank_variants(inputs, options, mode, keeps, list_candidates(), get_variant)
    every = find_states_interval("auto", inputs, options) if keeps and mode == "fwd" else None
    whole = inputs.has_document_states and any(_takes_these(get_variant(name), inputs, options, mode) for name in names)
    refused = ()
    for name in names:
        variant = get_variant(name)
        reason = variant.supports(inputs)
        if reason:
            refused += (f"{name} cannot run these inputs: {reason}",)
        elif every is not None and variant.states_every(inputs, options) != every:
            refused += (f"{name} does not keep a state every {every} tokens",)
        elif writes and not _writes_states(variant, inputs, options):
            refused += (f"{name} does not write the states that are asked for alone",)
        elif whole and not _takes_these(variant, inputs, options, mode):
            refused += (f"{name} cuts documents with states into rows",)
        else:
            _say(name, f"{mode}, states kept" if keeps else mode, why, refused)
            return variant
    raise ValueError(f"variant 'auto': {'; '.join(refused)}")


@lru_cache
def _say(name: str, what: str, why: str, refused: tuple[str, ...]) -> None:
    logging.getLogger("ssd").info("variant 'auto' runs %r (%s): %s", name, what, "; ".join((why, *refused)))
