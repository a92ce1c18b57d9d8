"""Configurations of the operator drawn at random, in families that share their kernels.

Most of a run goes into compiling, once for each set of sizes, dtypes and options. So these are drawn once for a family; its
members differ in what costs little: batch, seqlen, layouts, documents, values, gradients and the way of calling.
"""

from dataclasses import replace
from random import Random

from ssd.registry import get_variant

from . import modes
from .layouts import LAYOUTS
from .limits import Limits, draw_mode, draw_size, draw_subset
from .operator import CUTS, DIFFERENTIABLE, DOCUMENTS, Config

_HOPPER = 0.4  # of families, of sizes that the kernels for Hopper take
_SECOND = 0.25  # of members, with the family's second layouts and lengths of any kind
_LIMITS = ((0.0, 0.05), (0.02, 0.06), (0.01, None), (0.05, 0.05))
_OPTION_VARIANTS = ("fused", "persistent")  # whose options "auto" is given


def draw(seed: int, index: int, variants: list[str], device: str, size: int) -> list[Config]:
    """The family of that number in the run of that seed; variants take turns."""
    variant, rng = variants[index % len(variants)], Random(f"operator {seed} {index}")
    limits = Limits.of(variant, device)
    if limits.long and index == seed % len(variants):
        return [_draw_long(rng, variant, limits)]
    shared = draw_shared(rng, variant, limits)
    compiled_for = (draw_layouts(rng, shared), rng.random() < 0.5), (draw_layouts(rng, shared), None)
    return [_draw_member(rng, shared, *compiled_for[rng.random() < _SECOND], limits) for _ in range(size)]


def draw_shared(rng: Random, variant: str, limits: Limits) -> Config:
    """Draw what the kernels are compiled for: sizes, dtypes and options."""
    favoured = (16, 32, 64, 128, 256)
    dtype = rng.choices(limits.dtypes, [{"bf16": 45, "fp16": 25, "fp32": 30}[name] for name in limits.dtypes])[0]
    heads_per_group = draw_size(rng, min(16, limits.nheads), (1, 8))
    documents = rng.choice((None, None, None, *DOCUMENTS))
    c = Config(
        variant=variant,
        ngroups=draw_size(rng, max(1, min(8, limits.nheads // heads_per_group))), heads_per_group=heads_per_group,
        headdim=draw_size(rng, limits.channels, favoured), dstate=draw_size(rng, limits.channels, favoured),
        chunk_size=rng.choice([size for size in (16, 32, 64, 128, 256) if size <= limits.chunk_size]), dtype=dtype,
        dtypes=_draw_dtypes(rng, limits), D=rng.choice((None, "h", "h", "hp")), z=rng.random() < 0.4,
        dt_bias=rng.random() < 0.6, dt_softplus=rng.random() < 0.6,
        dt_limit=rng.choice(_LIMITS) if rng.random() < 0.25 else None,
        initial_states=rng.random() < 0.4, final_states=rng.random() < 0.5,
        state_dtype=rng.choice((None, None, None, *limits.dtypes)), documents=documents, int64=rng.random() < 0.3,
        options=_draw_options(rng, variant, dtype))
    return _fit_to_hopper(rng, c) if limits.channels >= 128 and rng.random() < _HOPPER else c


def _fit_to_hopper(rng: Random, c: Config) -> Config:
    """Change the draw so that the kernels for Hopper take it: in their commonest form, or in any."""
    options = {name: value for name, value in c.options.items() if name not in ("exp2", "fuse_bmm", "gluon", "tf32")}
    common, pairs = rng.random() < 0.6, 2 * rng.randint(1, 8)
    heads = pairs if common else rng.randint(1, 16)
    form = {"headdim": 64, "dstate": rng.choice((64, 128)), "D": rng.choice((None, "h")), "z": False} if common else {
        "headdim": 8 * rng.randint(4, 16), "dstate": 8 * rng.randint(4, rng.choice((16, 32)))}
    return replace(
        c, **form, ngroups=rng.choice((1, 1, 2, 3)) if heads <= 8 else 1,
        heads_per_group=heads, chunk_size=rng.choice((64, 128, 256)), dtype=rng.choice(("bf16", "bf16", "fp16")),
        dtypes={name: dtype for name, dtype in c.dtypes.items() if name not in ("B", "C") and (name, dtype) != ("z", "fp64")},
        documents=rng.choice((None, None, "seq_idx", "cu_seqlens")), options=options)


def _draw_dtypes(rng: Random, limits: Limits) -> dict[str, str]:
    """Draw unusual dtypes for some inputs."""
    every = (*limits.dtypes, *limits.dtypes, "fp64")
    if rng.random() < 0.65:
        return {}
    return {name: rng.choice(every[:-1] if name in ("B", "C") else every) for name in DIFFERENTIABLE[1:] if rng.random() < 0.35}


def _draw_options(rng: Random, variant: str, dtype: str) -> dict[str, bool]:
    """Draw one to three of the variant's switches, in half of draws."""
    of = _OPTION_VARIANTS if variant == "auto" else (variant,)
    names = list(dict.fromkeys(name for one in of for name in get_variant(one).options))
    chosen = dict.fromkeys(rng.sample(names, min(len(names), rng.randint(1, 3))), False) if rng.random() < 0.5 else {}
    if dtype == "fp32" and variant != "torch" and rng.random() < 0.2:
        chosen["tf32"] = True
    return chosen


def draw_layouts(rng: Random, c: Config) -> dict[str, str]:
    if rng.random() < 0.35:
        return {"x": "packed"}
    if rng.random() < 0.35:
        return {}
    names = (*DIFFERENTIABLE, "seq_idx")
    return {name: rng.choice(LAYOUTS[1:]) for name in names if rng.random() < 0.4}


def _draw_member(rng: Random, shared: Config, layouts: dict[str, str], even: bool | None, limits: Limits) -> Config:
    """One of a family. Kernels are compiled for strides, alignments and lengths that are multiples of 16 or not, so a family
    has two sets of layouts, and most of its lengths are all such multiples or all not.
    """
    batch, seqlen = draw_tokens(rng, shared, limits, even)
    mode = draw_mode(rng, limits)
    present = tuple(name for name in DIFFERENTIABLE
                    if name not in ("D", "z", "dt_bias", "initial_states") or getattr(shared, name))
    layouts = dict(layouts)
    for name in ("dout", "dfinal_states"):
        if rng.random() < 0.2:
            layouts[name] = rng.choice((*LAYOUTS[1:], *(("scalar",) if mode != "capture" else ())))
    wanted = () if mode in modes.WITHOUT_GRADIENT or (mode == "plain" and rng.random() < 0.1) else draw_subset(rng, present)
    ways = ("out", "final_states") if shared.final_states else ("out",)
    cuts = rng.choice(CUTS) if shared.documents else "random"
    if cuts == "tokens":  # the truth runs each document alone
        batch, seqlen = min(batch, 2), min(seqlen, 12 if shared.documents in ("varlen", "both") else 100)
    seed = rng.randrange(2**24)
    has_rows = shared.documents in (None, "seq_idx")
    asked = has_rows and Random(seed).random() < 0.25
    return replace(
        shared, seed=seed, states_every=shared.chunk_size * (1 + seed % 3) if asked else 0,
        batch=batch if has_rows else 1, seqlen=seqlen, layouts=layouts, cuts=cuts,
        ndocs=rng.randint(1, 8) if shared.documents else 1,
        ids=rng.choice(("rising", "repeating", "offset")) if shared.documents == "seq_idx" else "rising",
        decay=rng.choices(("spread", "wide", "strong", "none"), (55, 25, 15, 5))[0], wanted=wanted, mode=mode,
        gates="wide" if shared.z and Random(seed + 1).random() < 0.25 else "normal",
        ways=ways if rng.random() < 0.7 else (rng.choice(ways),), calls=limits.calls)


def draw_tokens(rng: Random, c: Config, limits: Limits, even: bool | None) -> tuple[int, int]:
    """batch and seqlen that the limits allow: half of the lengths lie at the edge of a chunk or next to it. even: whether they
    are multiples of 16; None: either, and shorter than a chunk as well.
    """
    seqlen = draw_size(rng, limits.seqlen)
    if even is not None and seqlen <= c.chunk_size:
        seqlen += c.chunk_size
    if rng.random() < 0.5 and seqlen > c.chunk_size:
        steps = {None: (-1, 0, 0, 1), True: (0,), False: (-1, 1)}[even]
        seqlen = max(1, min(limits.seqlen, seqlen // c.chunk_size * c.chunk_size + rng.choice(steps)))
    elif even is not None:
        seqlen = seqlen // 16 * 16 + (0 if even else rng.randint(1, 15))
    batch = rng.choice((1, 1, 2, rng.randint(1, limits.batch)))
    token = c.nheads * (c.chunk_size + c.headdim + c.dstate + c.headdim * c.dstate / min(c.chunk_size, 64))
    seqlen = max(1, min(seqlen, int(limits.elements / token)))
    return max(1, min(batch, int(limits.elements / token / seqlen))), seqlen


def _draw_long(rng: Random, variant: str, limits: Limits) -> Config:
    """Draw one sequence that is longer than those of all tests but the tests of offsets."""
    return Config(
        variant=variant, seed=rng.randrange(2**24), seqlen=limits.long + 21, heads_per_group=2, headdim=64, dstate=128,
        chunk_size=256, dtype="bf16", D="h", dt_bias=True, dt_softplus=True, final_states=True, layouts={"x": "packed"},
        wanted=DIFFERENTIABLE[:6], ways=("out", "final_states"), calls=limits.calls)
