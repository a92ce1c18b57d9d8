"""Two layers of transformers' models, of random weights, under `patch_transformers` and with mamba_ssm's kernels.

Each side is a modelling file's globals, set before its calls. So all run the same modules, with the same weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from ssd.interop.functions import functions
from ssd.interop.patching import check_version
from ssd.interop.transformers import FIRST, LAST, choose_functions, list_globals, patch_transformers

from . import record, timing
from .autotuned_configs import compile_together
from .bench import Candidate, add_speedups, compare_with
from .block import choose_device
from .inputs import DTYPES
from .result_tables import MODES
from .shapes import PATCHED_MODELS, SHAPES, Shape
from .table import render_lines, write_head, write_number
from .terminal import leave_out, track

RIVAL = "mamba_ssm"
LAYERS = 2
_CHUNK_SIZES = (128, 256)  # the scan's; ours do not depend on it
# From published configs: the beginning of the classes' names, what `shapes` does not have, and what is called otherwise there.
MODELS = dict(zip(PATCHED_MODELS, (
    ("FalconH1", {
        "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_d_ssm": 3072, "num_hidden_layers": LAYERS},
        {"nheads": "mamba_n_heads", "headdim": "mamba_d_head", "dstate": "mamba_d_state", "ngroups": "mamba_n_groups"}),
    ("NemotronH", {
        "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "layers_block_type": ["mamba"] * LAYERS, "num_hidden_layers": LAYERS},
        {"nheads": "mamba_num_heads", "headdim": "mamba_head_dim", "dstate": "ssm_state_size", "ngroups": "n_groups"}),
), strict=True))


def make_model(name: str, shape: Shape, dtype: torch.dtype, **changes: object) -> nn.Module:
    """The layers of the model of that name, without a head. changes: of its config."""
    import transformers

    kind, sizes, names = MODELS[name]
    mamba = {theirs: getattr(shape, ours) for ours, theirs in names.items()}
    config = getattr(transformers, f"{kind}Config")(vocab_size=8, pad_token_id=0, **sizes | mamba | changes)
    with patch_transformers():  # before 5.15 mixers look for their kernels when they are built
        return getattr(transformers, f"{kind}Model")(config).to(choose_device(), dtype).train()


def list_sides(variants: Sequence[str], console: Console) -> dict[str, dict[str, Callable]]:
    """{variant: functions by upstream's names}; the rival's where it can be imported."""
    sides = {variant: choose_functions(functions(lambda variant=variant: {"variant": variant})) for variant in variants}
    with leave_out(console, RIVAL, ImportError):
        import causal_conv1d

        from ssd.interop.mamba_ssm import skip_its_init

        with skip_its_init():
            from mamba_ssm.ops.triton import selective_state_update, ssd_combined
        sides[RIVAL] = choose_functions(vars(causal_conv1d) | vars(ssd_combined) | vars(selective_state_update))
    return sides


def make_input(model: nn.Module, shape: Shape) -> Tensor:
    """Embeddings of random tokens."""
    return torch.randn(shape.batch, shape.seqlen, model.config.hidden_size, device=choose_device(), dtype=model.dtype,
                       requires_grad=True)


def make_call(model: nn.Module, side: dict[str, Callable], chunk_size: int, mode: str, u: Tensor) -> timing.Call:
    """A forward of the model, or a forward and a backward for gradients of u and all weights, on a side's functions."""
    version = check_version("transformers", FIRST, LAST, "pip install transformers")
    found, changed = vars(sys.modules[type(model).__module__]), list_globals(side, version)
    mixers = [module for module in model.modules() if hasattr(module, "chunk_size")]

    def run() -> Tensor:
        found.update(changed)
        for mixer in mixers:
            mixer.chunk_size = chunk_size
        return model(inputs_embeds=u, use_cache=False).last_hidden_state

    leaves = [u, *(p for name, p in model.named_parameters() if "embed" not in name)]
    return timing.make_call(run, mode, leaves, None if mode == "fwd" else torch.ones_like(u))


@compile_together()
def run(names: Sequence[str], variants: Sequence[str], modes: Sequence[str], dtype: str, out: Path, console: Console,
        repeats: int = 20, warmup: int = 5) -> list[dict]:
    """Measures models on each side and returns the rows, each appended to its file as soon as it is known."""
    rows = []
    with timing.side_stream():
        for name, mode in track([(name, mode) for name in names for mode in modes], console, " ".join):
            shape, calls = SHAPES[name], {}
            model = make_model(name, shape, DTYPES[dtype])
            u = make_input(model, shape)
            for variant, side in list_sides(variants, console).items():
                for chunk_size in _CHUNK_SIZES:
                    with leave_out(console, f"{name} {mode}: {variant} at chunk size {chunk_size}"):
                        call = make_call(model, side, chunk_size, mode, u)
                        call()  # compiles and tunes
                        calls[Candidate(variant, chunk_size)] = call
            measured = timing.measure(calls, repeats, warmup)
            rival = compare_with(RIVAL, measured)
            for candidate, values in measured.items():
                compared = rival if candidate.variant != RIVAL else {}
                rows += record.add([add_speedups({
                    "bench": "patches", "shape": name, "layers": LAYERS, **shape.sizes, "dtype": dtype, "mode": mode,
                    **candidate.identity(), **values, **compared})], out)
    return rows


_US = write_number(0)


def tabulate(rows: list[dict]) -> str:
    """Markdown of the last rows of each side, at the faster chunk size: losses beside wins."""
    latest = record.latest(rows, lambda row: tuple(row[key] for key in ("gpu", "shape", "mode", "variant", "chunk_size")))
    best: dict[tuple, dict] = {}
    for row in sorted(latest, key=lambda row: row["p50_us"]):
        best.setdefault(tuple(row[key] for key in ("gpu", "shape", "mode", "variant")), row)
    head = write_head("model, two layers | GPU | what | variant | µs | in a CUDA graph, µs | speed-up | in a CUDA graph",
                      "model, two layers", "GPU", "what", "variant")
    lines = [(shape, gpu.removeprefix("NVIDIA "), MODES[mode], f"`{variant}`", _US(row["p50_us"]), _US(row["graph_p50_us"]),
              *(f"{row[key]:.2f}" if row.get(key) else "" for key in ("speedup", "graph_speedup")))
             for (gpu, shape, mode, variant), row in sorted(best.items())]
    return head + render_lines(lines) if lines else "No rows yet: no GPU has run `make patches`.\n"
