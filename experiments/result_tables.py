"""Tables of what calls take, for README and docs, in Markdown, each from committed rows: losses beside wins."""

import textwrap
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from ssd.interop import patch_mamba_ssm as mamba_ssm_patch
from ssd.interop import patch_vllm as vllm_patch
from ssd.interop import transformers as transformers_patch
from ssd.registry import is_peer

from . import record, table
from .setup_size import describe
from .shapes import DIRECTIONS, MODELS, find_shapes
from .speedup_figure import DEFAULT, FASTEST, HEADLINE
from .table import render_lines, write_head, write_number, write_scientific

MODES = DIRECTIONS | {"fwd_bwd": "forward and backward"}
COSTS = "8b-b4"  # the shape at which the README says what the default costs
_WIDTH = 128  # of a line of prose
_FEW = 6  # shapes, which are named
_STEPS = ("Training steps are wall time, with Mamba-2 mixers, launched kernel by kernel: part of the gain is fewer launches. "
          "Steps in CUDA graphs gain less; `make train` captures them where it can: "
          "[docs/workloads.md](docs/workloads.md#what-the-variants-gain).")
# options that change nothing of what a mode times
_UNREAD = {"fwd": {"save_states", "fuse_backward"},
           "bwd": {"fuse_states", "low_precision_CB", "causal_blocks", "fuse_bmm", "two_level", "stationary"}}
_BLOCK_HEADERS = ("part", "shape", "mode", "us", "graph us", "of copy %", "against", "speed-up", "graph speed-up")
_BLOCK = {header: table.BLOCK[header] for header in _BLOCK_HEADERS}
_DECODE = {header: column for header, column in table.DECODE.items() if header not in ("graph", "same %", "note")}
# {part of a block: (what a reader calls it, the mode whose speed-up is told)}
_LIBRARY_PARTS = {"conv1d": ("convolution", "fwd_bwd"), "gated_norm": ("gated norm", "fwd_bwd"),
                  "state_update": ("`selective_state_update`", "fwd"), "block": ("a whole `Mamba2`", "fwd_bwd"),
                  "selective_scan": ("Mamba-1's scan", "fwd_bwd")}
_MODELS = {shape.name: shape for shape in MODELS}
_whole = write_number(0)
_SHAPE = itemgetter("shape")


_MEMORY_HEAD = write_head("variant | chunk | kept, MiB | at most, MiB | in a CUDA graph, µs", "variant")
_ABLATION_HEAD = write_head("option | without, µs | relative | up to, µs | relative", "option")
_MODELS_HEAD = write_head(
    "model | headdim x dstate | heads / groups | forward: mamba_ssm | `persistent` | `auto` | "
    "forward and backward: mamba_ssm | `persistent` | `auto`", "model", "headdim x dstate", "heads / groups")


def tabulate_speedups(rows: list[dict], steps: list[dict]) -> str:
    """A paragraph for each GPU. First the GPU of the figure, the last by name that has layers of `HEADLINE`, and a table:
    `persistent`'s gain at each of these layers.

    steps: rows of the sweep, for the training step of the model that has this layer.
    """
    compared, of = [row for row in rows if row.get("graph_speedup")], itemgetter("gpu", "against")
    paragraphs, first, lines = [], 0, []
    for (gpu, against), group in groupby(sorted(compared, key=of), of):
        group = list(group)
        paragraphs.append(f"Speed-ups over {against} on one {gpu}, in bf16 and GPU time.{_describe_gains(group)}")
        if layers := _list_layers(gpu, group, steps):
            first, lines = len(paragraphs) - 1, layers
    if lines:
        dash = "; a dash: not measured" if any("-" in cells for cells in lines) else ""
        paragraphs.insert(0, f"{paragraphs.pop(first)} The figure's bars and the table show `{FASTEST}`{dash}. {_STEPS}")
    parts = [textwrap.fill(text, _WIDTH) + "\n" for text in paragraphs]
    head = ("layer, batch x tokens", "for&shy;ward, µs", "back&shy;ward, µs", "training step, ms")  # broken on narrow screens
    if lines:
        parts.insert(1, write_head(" | ".join(head), *head) + render_lines(lines))
    return "\n".join(parts) or "No GPU has run the bench beside mamba_ssm yet.\n"


def _describe_gains(rows: list[dict]) -> str:
    """The least and the most over the shapes, of the fastest variant and of the default; of forwards alone, each."""
    def find_ends(rows: list[dict]) -> str:
        return _write_range([max(row["graph_speedup"] for row in of) for of in record.group_by(rows, _SHAPE).values()])

    both = [row for row in rows if row["mode"] == "fwd_bwd"]
    default = find_ends([row for row in both if row["variant"] == DEFAULT])
    if not both:
        gains = {row["shape"]: row["graph_speedup"] for row in rows if row["mode"] == "fwd" and row["variant"] == FASTEST}
        listed = ", ".join(f"{shape} {gain:.1f}x" for shape, gain in gains.items())
        what = "The forward of" if any(row["mode"] == "bwd" for row in rows) else "Only forwards were compared there. With"
        return f" {what} `{FASTEST}`: {listed}." if gains else ""
    of_default = f", and {default} with the default, `{DEFAULT}`" if default else ""
    shapes = [*dict.fromkeys(row["shape"] for row in both)]
    over = f"{len(shapes)} shapes" if len(shapes) > _FEW else join_words(shapes)
    return (f" Over {over}, forward and backward together are {find_ends(both)} as fast "
            f"with the fastest variant{of_default}.")


def _list_layers(gpu: str, rows: list[dict], steps: list[dict]) -> list[list[str]]:
    found = {(row["shape"], row["mode"]): row for row in rows if row["variant"] == FASTEST}
    lines = []
    for shape, (model, tokens, workload) in HEADLINE.items():
        of_modes = [found.get((shape, mode)) for mode in DIRECTIONS]
        cells = [f"**{row['graph_speedup']:.1f}x** {row['graph_p50_us']:.0f}" if row else "" for row in of_modes]
        if any(cells):
            lines.append([f"{model}, {tokens}", *cells, _compare_step(gpu, workload, steps)])
    return lines


def _compare_step(gpu: str, workload: tuple[str, str, int] | None, steps: list[dict]) -> str:
    """The speed-up and the time of a model's training step, with `persistent` inside, timed beside the rival; or a dash."""
    for row in steps:
        if (row["gpu"] == gpu and (row["workload"], row["preset"], row["run"]["batch"]) == workload and row["mixer"] == "ssd"
                and row["variant"] == FASTEST and row["speedup"]):
            return f"**{row['speedup']:.1f}x** {row['p50_us'] / 1e3:.0f}"
    return "-"


def describe_setup(rows: list[dict]) -> str:
    """What `make setup` and `make test` took where there is no GPU, by the last row of each."""
    latest = {row["bench"]: row for row in rows}
    sentences = []
    if setup := latest.get("setup"):
        sentences.append(f"Measured on {setup['cores']} cores without a GPU: {describe(setup)}, with torch {setup['torch']}.")
    if tests := latest.get("tests"):
        sentences.append(f"`make test` took {tests['seconds'] / 60:.1f} minutes on {tests['cores']} cores without a GPU: "
                         f"{tests['passed']} passed, {tests['skipped']} skipped, which is normal there.")
    return textwrap.fill(" ".join(sentences), _WIDTH) + "\n" if sentences else "No GPU-less machine has measured this yet.\n"


def tabulate_costs(rows: list[dict]) -> str:
    """What the default and the fastest setting take at one shape: time and peak on each GPU, what is kept between layers, and
    the chunk size of others' kernels, by which their peak differs.
    """
    known = _collect_kept(rows)
    shown = [row for row in rows if (row["shape"], row["dtype"], row["mode"]) == (COSTS, "bf16", "fwd_bwd")
             and row["graph_p50_us"] and (row["variant"] in (DEFAULT, FASTEST) or is_peer(row["variant"]))]
    settings: dict[str, dict[str, dict]] = {}  # the fastest row of each GPU
    for row in sorted(shown, key=itemgetter("graph_p50_us")):
        *_, changed = _describe_call(row)
        setting = f"`{row['variant']}`" + (f" with `{changed}`" if changed else "")
        settings.setdefault(setting, {}).setdefault(row["gpu"], row)
    if not {f"`{DEFAULT}`", f"`{FASTEST}`"} <= set(settings):
        return f"No rows yet: no GPU has run forward and backward of {COSTS}.\n"
    gpus, lines, keepers = sorted({gpu for of in settings.values() for gpu in of}), [], set()
    for setting, of in reversed(settings.items()):
        times = [_whole(of.get(gpu, {}).get(key)) + (f", chunk {of[gpu]['chunk_size']}" if chunk and gpu in of else "")
                 for gpu in gpus for key, chunk in (("graph_p50_us", False), ("peak_mib", is_peer(setting.strip("`"))))]
        kept = {row["gpu"]: known[call] for row in of.values() if (call := _describe_call(row)) in known}
        keepers |= set(kept)
        lines.append([setting, *times, _whole(max(kept.values(), default=None))])
    short = {gpu: gpu.removeprefix("NVIDIA ").split()[0] for gpu in gpus}
    columns = [f"{short[gpu]}: {what}" for gpu in gpus for what in ("µs", "peak, MiB")]
    columns.append(", ".join(map(short.get, sorted(keepers))) + ": kept, MiB" if keepers else "kept, MiB")
    head = write_head(" | ".join(["`variant=`", *columns]), "`variant=`")
    said = f"Forward and backward at shape `{COSTS}` of [shapes.txt](experiments/shapes.txt); empty: not measured:"
    return f"{said}\n\n{head}{render_lines(lines)}"


def tabulate_results(rows: list[dict], figure_path: str) -> str:
    """Markdown of the latest rows, the faster chunk size of each variant: losses beside wins. Models have a table of their own.
    """
    if not rows:
        return "No rows yet: no GPU has run the bench for this table.\n"
    parts = [f"![Time in a CUDA graph of each variant and mamba_ssm at each shape, and the bandwidth bound]({figure_path})\n"]
    for where, group in group_by_gpu(rows):
        copy = sorted(row["copy_gbps"] for row in group)[len(group) // 2]
        commits = dict.fromkeys(str(row["git_sha"])[:7] for row in sorted(group, key=itemgetter("time")))
        parts.append(f"{where}, device copy {copy:.0f} GB/s, rows of {join_words([*commits])}. In a CUDA graph, µs, with the "
                     "speed-up over mamba_ssm:\n")
        shown = [row for row in group if row["shape"] not in _MODELS]
        for mode, name in MODES.items():
            if of := [row for row in shown if row["mode"] == mode]:
                parts += [f"**{name.capitalize()}**\n", _tabulate_by_shape(of)]
        if of := [row for row in shown if row["mode"] == "fwd_bwd"]:
            parts += ["**Forward and backward, eager**\n", _tabulate_by_shape(of, "p50_us", "speedup")]
        errors = [f"{write_scientific(max(row['err_rms'] for row in of))} in a {name}" for mode, name in DIRECTIONS.items()
                  if (of := [row for row in group if row["mode"] == mode and not is_peer(row["variant"])])]
        parts.append(f"Errors of ours, models among them, are at most {join_words(errors)}.\n" if errors else "")
    if sizes := {row["shape"]: find_shapes(row["shape"])[0].sizes for row in rows if row["shape"] not in _MODELS}:
        head = write_head(" | ".join(("shape", *record.SIZES)), "shape")
        parts += ["**The shapes**\n", head + render_lines((name, *of.values()) for name, of in sizes.items())]
    return "\n".join(parts)


def tabulate_models(rows: list[dict]) -> str:
    """A line for each published model's layer: what the fastest variant and the default gain there, losses beside wins."""
    parts = []
    for where, group in group_by_gpu([row for row in rows if row["shape"] in _MODELS]):
        found = {(row["shape"], row["mode"], row["variant"]): row for row in group}
        for (batch, seqlen), shapes in record.group_by(_MODELS.values(), lambda shape: (shape.batch, shape.seqlen)).items():
            lines = []
            for shape in shapes:
                cells = [_write_gain(found.get((shape.name, mode, variant)))
                         for mode in ("fwd", "fwd_bwd") for variant in ("mamba_ssm", FASTEST, DEFAULT)]
                if any(cells):
                    sizes = f"{shape.headdim} x {shape.dstate}", f"{shape.nheads} / {shape.ngroups}"
                    lines.append([shape.name.removesuffix("-32k"), *sizes, *cells])
            if lines:
                parts.append(f"{where}, batch {batch} of {seqlen} tokens:\n\n{_MODELS_HEAD}{render_lines(lines)}")
    return "\n".join(parts) or "No rows yet: no GPU has run `make bench SHAPE=models`.\n"


def _write_gain(row: dict | None, time: str = "graph_p50_us", speedup: str = "graph_speedup") -> str:
    """The time, in a CUDA graph unless another is asked for or there is none, with the speed-up where there is one."""
    if row is None:
        return ""
    return _whole(row[time] or record.get_us(row)) + (f" ({row[speedup]:.2f})" if row.get(speedup) else "")


def _tabulate_by_shape(rows: list[dict], *columns: str) -> str:
    """A line for each shape, a column for each variant. columns: as `_write_gain` takes them."""
    variants, lines = [*dict.fromkeys(row["variant"] for row in rows)], []
    for shape, group in groupby(rows, _SHAPE):
        cells = {row["variant"]: _write_gain(row, *columns) for row in group}
        lines.append([shape, *(cells.get(variant, "") for variant in variants)])
    return write_head(" | ".join(("shape", *variants)), "shape") + render_lines(lines)


def tabulate_memory(rows: list[dict]) -> str:
    """Markdown of what forward and backward hold at most and what the forward keeps: each way, the slowest first."""
    kept, parts = _collect_kept(rows), []
    whole = sorted((row for row in rows if row["mode"] == "fwd_bwd"), key=_SHAPE)
    for shape, where, group in ((shape, *part) for shape, of in groupby(whole, _SHAPE) for part in group_by_gpu(list(of))):
        ways: dict[str, list] = {}  # at the fastest chunk size
        for row in sorted(group, key=record.get_us):
            *_, changed = call = _describe_call(row)
            name = ", ".join(filter(None, (row["variant"], changed)))
            ways.setdefault(name, [name, row["chunk_size"], _whole(kept.get(call)), _whole(row["peak_mib"]),
                                   _whole(record.get_us(row))])
        lines = reversed(ways.values())
        parts.append(f"{shape}, {where}:\n\n{_MEMORY_HEAD}{render_lines(lines)}")
    return "\n".join(parts) or "No rows yet: no GPU has run forward and backward of these shapes.\n"


def _collect_kept(rows: list[dict]) -> dict[tuple, float]:
    """MiB that a forward keeps, by call."""
    return {_describe_call(row): row["saved_mib"] for row in rows if row.get("saved_mib") is not None}


def _describe_call(row: dict) -> tuple:
    """What rows of the same call share, whatever their mode; last, the changed options."""
    return *(row[key] for key in ("gpu", "shape", "variant", "chunk_size")), record.describe_options(record.options(row))


def tabulate_blocks(rows: list[dict]) -> str:
    """Markdown of the latest rows of each part of a block, ours beside upstream's: losses beside wins."""
    return "\n".join(render_by_gpu(rows, _BLOCK)) or "No rows yet: no GPU has run `make block` for this table.\n"


def tabulate_decoding(rows: list[dict]) -> str:
    """Markdown of the latest generation of each model in a CUDA graph, beside another library's: losses beside wins."""
    return "\n".join(render_by_gpu(rows, _DECODE)) or "No rows yet: no GPU has run `make decode` for this table.\n"


def tabulate_libraries(rows: list[dict], parts: list[dict]) -> str:
    """Markdown of the libraries that can be patched, and of what is faster there, from the least to the most over the rows."""
    def collect(found: list[dict], mode: str, **where: str) -> str:
        where["mode"] = mode
        return _write_range([row["graph_speedup"] for row in found if row["gpu"] and row.get("graph_speedup")
                             and all(row[key] == value for key, value in where.items())])

    gains = {"SSD": collect(rows, "fwd_bwd", variant=DEFAULT)}
    gains |= {name: collect(parts, mode, part=part) for part, (name, mode) in _LIBRARY_PARTS.items()}
    gains = [f"{name} {gain}" for name, gain in gains.items() if gain]
    mamba1 = [text for text in gains if text.startswith("Mamba-1")]
    mamba2 = [text for text in gains if text not in mamba1]
    versions = [f"{'.'.join(map(str, module.FIRST))} to {'.'.join(map(str, module.LAST))}"
                for module in (transformers_patch, mamba_ssm_patch, vllm_patch)]
    whole, alone = "; ".join(mamba2) or "no rows yet", "; ".join(mamba2[:1]) or "no rows yet"
    head = ("library", "versions", "one line", "what is faster")
    return write_head(" | ".join(head), *head) + render_lines((
        ("transformers", versions[0], "`ssd.patch_transformers()`", whole),
        ("mamba_ssm", versions[1], "`ssd.patch_mamba_ssm()`", "; ".join((whole, *mamba1))),
        ("Megatron-LM", "any beside such a mamba_ssm", "`ssd.patch_mamba_ssm()`", f"{alone}; the rest as above"),
        ("flash-linear-attention", "any beside such a mamba_ssm", "`ssd.patch_mamba_ssm()`", alone),
        ("vLLM", versions[2], "`ssd.patch_vllm()`", "the scan of prompts; not measured inside vLLM")))


def _write_range(values: list[float]) -> str:
    """1.3x to 2.4x; empty without values."""
    ends = dict.fromkeys(f"{value:.1f}x" for value in (min(values), max(values))) if values else ()
    return " to ".join(ends)


def tabulate_ablation(rows: list[dict]) -> str:
    """Markdown of the latest rows of the ablation, a table for each shape, mode and variant."""
    parts = []
    for (gpu, shape, mode, variant), group in groupby(rows, itemgetter("gpu", "shape", "mode", "variant")):
        cells = {(row["step"], row["changed"]): (_whole(record.get_us(row)),
                                                 f"{row['relative']:.2f}{' †' if row.get('plain') else ''}")
                 for row in group if row["relative"] is not None}
        nothing = ("", "")
        without = {option: ("not used", "") if option in _UNREAD[mode] else of
                   for (step, option), of in cells.items() if step == "without"}
        lines = [("none", *nothing, *cells.get(("none", None), nothing)),
                 *((option, *of, *cells.get(("added", option), nothing)) for option, of in without.items()),
                 ("all", *cells.get(("all", None), nothing), *nothing)]
        parts.append(f"{gpu}, {shape}, {DIRECTIONS[mode]}, `{variant}`:\n\n{_ABLATION_HEAD}{render_lines(lines)}")
    return "\n".join(parts) or "No rows yet: no GPU has run `make ablate` for this table.\n"


def render_by_gpu(rows: list[dict], columns: dict) -> list[str]:
    """Markdown of each GPU's rows, without columns that are empty there."""
    parts = []
    for where, group in group_by_gpu(rows):
        filled = {header: column for header, column in columns.items() if any(row.get(column[0]) is not None for row in group)}
        parts.append(f"{where}:\n\n{table.render(group, 'markdown', filled)}")
    return parts


def group_by_gpu(rows: list[dict]) -> Iterator[tuple[str, list[dict]]]:
    """Each GPU with the versions that its rows were measured with, and these rows; the last by name first, as in the README."""
    for gpu, group in reversed(record.group_by(sorted(rows, key=itemgetter("gpu")), itemgetter("gpu")).items()):
        versions = sorted({f"torch {row['torch']}, Triton {row['triton']}" for row in group})
        yield f"{gpu}, {'; '.join(versions)}", group


def join_words(texts: list[str]) -> str:
    """a; a and b; a, b and c."""
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last
