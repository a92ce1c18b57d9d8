"""Generation by Mamba-2 models of random weights: ours beside that of mamba_ssm and of transformers.

Every side generates the likeliest tokens with the same weights, by the function that its users call. Mode `prefill` is the time
of a prompt and one token after it, mode `token` what each further token adds to that.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

import ssd
from ssd.modules import Mamba2LM, Mamba2LMConfig

from . import record
from .autotuned_configs import compile_together
from .block import choose_device
from .inputs import DTYPES
from .packages import import_package
from .shapes import DECODE_RIVALS
from .terminal import first_line, track
from .timing import wait_for_gpu
from .workloads import get_workload
from .workloads.language_model import LanguageSizes

Generate = Callable[[Tensor, int], Tensor]  # a prompt, and how many tokens are to follow


@dataclass(frozen=True)
class Side:
    """Attributes:
        variant: ours of the SSD, or another library.
        graph: whether it replays a CUDA graph for each token.
        states: dtype of the states that it keeps, which are most of what a token of many sequences moves; None if unknown.
        generate: gives the prompt and the tokens after it.
        note: what else a reader of its time should know.
    """

    variant: str
    graph: bool
    states: str | None
    generate: Generate
    note: str | None = None

    def __str__(self) -> str:
        return f"{self.variant} {'with' if self.graph else 'without'} a graph, states {self.states}"


@compile_together()
def run(presets: Sequence[str], batches: Sequence[int], prompt: int, tokens: int, variant: str, rivals: Sequence[str],
        dtype: str, out: Path, console: Console, repeats: int = 5) -> list[dict]:
    """Measures models and returns the rows, each appended to its file as soon as it is known.

    presets: of the workload mamba2. prompt, tokens: how many there are of each, tokens after the first; too few of them are not
    captured.
    """
    rows, said = [], set()

    def leave_out(side: object, reason: Exception) -> None:
        line = f"{side} is left out: {first_line(reason)}"
        if line not in said:  # what is not installed is said once
            console.print(f"{preset} batch {batch}: {line}", style="yellow", markup=False)
        said.add(line)

    for preset, batch in track([(p, b) for p in presets for b in batches], console, lambda one: f"{one[0]}, batch {one[1]}"):
        sizes = get_workload("mamba2").presets[preset].sizes
        call = {"bench": "decode", "workload": "mamba2", "preset": preset, "batch": batch, "seqlen": prompt, "tokens": tokens,
                "dtype": dtype, "unit": "tokens"}
        ids = torch.randint(sizes.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0)).to(choose_device())
        sides = make_sides(sizes, batch, variant, rivals, dtype, leave_out)
        for row in list_rows(measure(sides, ids, tokens, repeats, leave_out), rivals):
            rows.append(call | row | record.environment())
            record.append(rows[-1], out)
        del sides  # or two models' weights, states and graphs are held at once
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def read_latest(out: Path | list[dict] = record.RESULTS) -> list[dict]:
    """The last row of each model, batch, prompt, mode, side and dtype."""
    key = itemgetter("gpu", "preset", "batch", "seqlen", "mode", "variant", "graph", "states", "dtype")
    return record.latest(record.read(out, bench="decode"), key)


def read_comparisons(out: Path | list[dict] = record.RESULTS) -> list[dict]:
    """Of `read_latest`, ours with a graph beside a rival's, whose name is followed by what its time is to be read with."""
    rows, key = read_latest(out), itemgetter("gpu", "preset", "batch", "seqlen", "mode", "dtype", "git_sha")
    notes = {(*key(row), row["variant"]): row["note"] for row in rows if row["note"] and not row.get("against")}

    def describe_rival(row: dict) -> str:
        note = notes.get((*key(row), row["against"]))
        return f"{row['against']}, {note}" if note else row["against"]

    return [row | {"against": describe_rival(row)} for row in rows if row.get("against") and row["graph"]]


def make_sides(sizes: LanguageSizes, batch: int, variant: str, rivals: Sequence[str], dtype: str,
               leave_out: Callable[[object, Exception], None]) -> list[Side]:
    """Ours with a graph, with states in fp32 and in the weights' dtype, and without one; then rivals, but for those that cannot
    be had. On a CPU there are no graphs.
    """
    model = Mamba2LM(make_config(sizes), choose_device(), DTYPES[dtype], variant).eval()

    def make_ours(graph: bool, states: str) -> Side:
        cache = model.new_cache(batch, state_dtype=DTYPES[states])

        def generate(ids: Tensor, new: int) -> Tensor:
            cache.reset()  # the step stays captured
            return model.generate(ids, new, cache, graph=None if graph else False)

        return Side(variant, graph, states, generate)

    sides = [make_ours(True, states) for states in dict.fromkeys(("fp32", dtype))] if choose_device() == "cuda" else []
    sides.append(make_ours(False, "fp32"))
    for rival in rivals:
        try:
            sides.append(RIVALS[rival](model))
        except Exception as reason:  # the other sides are measured all the same
            leave_out(rival, reason)
    return sides


def make_config(sizes: LanguageSizes) -> Mamba2LMConfig:
    """The config of a workload's model, all of whose layers are Mamba-2."""
    layer = {"layer": "Mamba2", **{name: getattr(sizes, name) for name in ("d_state", "headdim", "ngroups", "chunk_size")}}
    return Mamba2LMConfig(sizes.d_model, len(sizes.pattern), sizes.vocab_size, layer, tie_embeddings=sizes.tie_embeddings,
                          pad_vocab_size_multiple=16)


def load_mamba_ssm(ours: Mamba2LM) -> Side:
    """Its `MambaLMHeadModel` of the same weights.

    Raises:
        ImportError: it is not installed, or cannot be imported.
    """
    with ssd.patch_mamba_ssm():  # without which it is not imported where it was not built with CUDA
        from mamba_ssm import MambaLMHeadModel
        from mamba_ssm.models.config_mamba import MambaConfig
    c = ours.config
    config = MambaConfig(d_model=c.d_model, n_layer=c.n_layer, vocab_size=c.vocab_size, ssm_cfg=c.ssm_cfg,
                         tie_embeddings=c.tie_embeddings, pad_vocab_size_multiple=c.pad_vocab_size_multiple)
    model = MambaLMHeadModel(config, device=ours.lm_head.weight.device, dtype=ours.lm_head.weight.dtype).eval()
    model.load_state_dict(ours.state_dict(), assign=True)
    absent = None if find_spec("causal_conv1d") else "without causal_conv1d, its convolution is torch's"
    states = next(name for name, dtype in DTYPES.items() if dtype == ours.lm_head.weight.dtype)
    return Side("mamba_ssm", True, states, lambda ids, new: model.generate(ids, ids.shape[1] + new, cg=True), absent)


def load_transformers(ours: Mamba2LM) -> Side:
    """Its `Mamba2ForCausalLM` of the same weights, which knows no graphs.

    Raises:
        ImportError: it is not installed.
        ValueError: it computes another model of several groups, as older versions do.
    """
    transformers = import_package("transformers", "generates beside ours", "pip install transformers")
    c, mixer = ours.config, ours.backbone.layers[0].mixer
    config = transformers.Mamba2Config(
        hidden_size=c.d_model, num_hidden_layers=c.n_layer, vocab_size=c.padded_vocab_size, num_heads=mixer.nheads,
        head_dim=mixer.headdim, state_size=mixer.d_state, n_groups=mixer.ngroups, chunk_size=mixer.chunk_size,
        tie_word_embeddings=c.tie_embeddings, residual_in_fp32=c.residual_in_fp32, bos_token_id=None, eos_token_id=None,
        pad_token_id=0)
    with torch.device(ours.lm_head.weight.device):
        model = transformers.Mamba2ForCausalLM(config).eval()
    if mixer.ngroups > 1 and not hasattr(model.backbone.layers[0].mixer.norm, "group_size"):
        raise ValueError(f"transformers {transformers.__version__} normalises all groups together; expected 1 group, or a "
                         "newer transformers")
    weights = {name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in ours.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    return Side("transformers", False, None, lambda ids, new: model.generate(ids, max_new_tokens=new, do_sample=False))


RIVALS: dict[str, Callable[[Mamba2LM], Side]] = dict(zip(DECODE_RIVALS, (load_mamba_ssm, load_transformers), strict=True))


def measure(sides: Sequence[Side], ids: Tensor, tokens: int, repeats: int,
            leave_out: Callable[[object, Exception], None]) -> dict[Side, dict]:
    """The measured keys of a row for each side that can run and each mode. Sides take turns.

    same_tokens: the share of a side's tokens that are those of the first.
    """
    generated, times = {}, {}
    for side in sides:
        try:
            side.generate(ids, 1)
            generated[side] = side.generate(ids, 1 + tokens)[:, ids.shape[1] :]  # compiled and captured by now
            times[side] = {"prefill": [], "token": []}
        except Exception as reason:  # the other sides are measured all the same
            leave_out(side, reason)
    for _ in range(repeats):
        for side, its in times.items():
            prompt, whole = (_time(side.generate, ids, new) for new in (1, 1 + tokens))
            its["prefill"].append(prompt)
            its["token"].append((whole - prompt) / tokens)
    slow = record.find_slow_clock()
    first = next(iter(generated.values()), None)
    made = {"prefill": ids.numel(), "token": len(ids)}
    rows = {}
    for side, its in times.items():
        same = float((generated[side] == first).float().mean())
        for mode, seconds in its.items():
            p20, p50, p80 = (np.quantile(seconds, (0.2, 0.5, 0.8)) * 1e6).tolist()
            rows[side, mode] = {"p20_us": p20, "p50_us": p50, "p80_us": p80, "units_per_s": made[mode] / p50 * 1e6,
                                "same_tokens": same, **slow}
    return rows


def list_rows(measured: dict[tuple[Side, str], dict], rivals: Sequence[str]) -> list[dict]:
    """The keys of a row for each side and mode; ours are compared with the first of the rivals that ran."""
    found = [name for name in rivals if any(side.variant == name for side, _ in measured)]
    rows = []
    for (side, mode), values in measured.items():
        row = {"mode": mode, "variant": side.variant, "graph": side.graph, "states": side.states, "note": side.note, **values}
        if found and side.variant not in rivals:
            [us] = [its["p50_us"] for (other, of), its in measured.items() if (other.variant, of) == (found[0], mode)]
            row |= {"against": found[0], "against_p50_us": us, "speedup": us / values["p50_us"]}
        rows.append(row)
    return rows


def _time(generate: Generate, ids: Tensor, new: int) -> float:
    """Seconds."""
    wait_for_gpu()
    began = time.perf_counter()
    generate(ids, new)
    wait_for_gpu()
    return time.perf_counter() - began
