"""Tables of README and docs in Markdown, each from committed rows: losses beside wins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from ssd.interop import patch_mamba_ssm as mamba_ssm_patch
from ssd.interop import transformers as transformers_patch
from ssd.registry import is_peer

from . import record, table
from .shapes import DIRECTIONS, SHAPES, Shape

MODES = DIRECTIONS | {"fwd_bwd": "forward and backward"}
# options that change nothing of what a mode times
_UNREAD = {"fwd": {"save_states", "fuse_backward"},
           "bwd": {"fuse_states", "low_precision_CB", "causal_blocks", "fuse_bmm", "two_level", "stationary"}}
_ABLATED = itemgetter("gpu", "shape", "mode", "variant")
_SHAPE = itemgetter("shape")
_BLOCK_HEADERS = ("part", "shape", "mode", "us", "graph us", "of copy %", "against", "speed-up", "graph speed-up")
_BLOCK = {header: table.BLOCK[header] for header in _BLOCK_HEADERS}
# {part of a block: (what a reader calls it, the mode whose speed-up is told)}
_LIBRARY_PARTS = {"conv1d": ("convolution", "fwd_bwd"), "gated_norm": ("gated norm", "fwd_bwd"),
                  "state_update": ("decoding of a token", "fwd"), "block": ("a whole `Mamba2`", "fwd_bwd"),
                  "selective_scan": ("Mamba-1's scan", "fwd_bwd")}
_STEPS = {header: column for header, column in table.STEPS.items() if header != "options"}


def tabulate_results(rows: list[dict], figure_path: str) -> str:
    """Markdown of the latest rows, the faster chunk size of each variant: losses beside wins."""
    if not rows:
        return "No rows yet: no GPU has run the bench for this table.\n"
    parts = [f"![Time of each variant and of mamba_ssm at each shape, and the bandwidth bound]({figure_path})\n"]
    for where, group in group_by_gpu(rows):
        copy = sorted(row["copy_gbps"] for row in group)[len(group) // 2]
        commits = dict.fromkeys(str(row["git_sha"])[:7] for row in sorted(group, key=itemgetter("time")))
        parts.append(f"{where}, device copy {copy:.0f} GB/s, rows of {join_words([*commits])}. In a CUDA graph, µs, with the "
                     "speed-up over mamba_ssm:\n")
        for mode, name in MODES.items():
            if of := [row for row in group if row["mode"] == mode]:
                parts += [f"**{name.capitalize()}**\n", _tabulate_by_shape(of)]
        parts += ["**Each measurement**: eager times, chunk sizes, the share of the bandwidth bound, errors\n",
                  _list_every_row(group)]
    shapes = [SHAPES[name] for name in dict.fromkeys(row["shape"] for row in rows)]
    parts += ["**The shapes**\n", _list_sizes(shapes)]
    return "\n".join(parts)


def _list_sizes(shapes: list[Shape]) -> str:
    names = [*shapes[0].sizes]
    lines = [f"| shape | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    lines += [f"| {shape.name} | {' | '.join(map(str, shape.sizes.values()))} |" for shape in shapes]
    return "\n".join(lines) + "\n"


def tabulate_steps(rows: list[dict], figure_path: str) -> str:
    """Markdown of the latest steps of each workload, variants as they come: losses beside wins."""
    if not rows:
        return "No rows yet: no GPU has run the sweep for this table.\n"
    parts = [f"![A training step of each workload with each variant, and the state-space model's part]({figure_path})\n"]
    columns = {header: column for header, column in _STEPS.items() if any(row.get(column[0]) is not None for row in rows)}
    return "\n".join([*parts, *_render_by_gpu(rows, columns)])


def tabulate_memory(rows: list[dict]) -> str:
    """Markdown of what forward and backward hold at most, and what the forward keeps, a line for each way that was timed."""
    kept = {_describe_setting(row): row["saved_mib"] for row in rows if row.get("saved_mib") is not None}
    whole = sorted((row for row in rows if row["mode"] == "fwd_bwd"), key=_SHAPE)
    parts = []
    for shape, where, group in ((shape, *part) for shape, of in groupby(whole, _SHAPE) for part in group_by_gpu(list(of))):
        lines = [f"{shape}, {where}:\n", "| variant | chunk | kept, MiB | at most, MiB | in a CUDA graph, µs |",
                 "|---|---:|---:|---:|---:|"]
        for row in group:
            changed = record.changed_options(record.options(row))
            saved = kept.get(_describe_setting(row))
            cells = (f"{row['variant']}{', ' if changed else ''}{changed}", row["chunk_size"],
                     "" if saved is None else f"{saved:.0f}", f"{row['peak_mib']:.0f}",
                     f"{row['graph_p50_us'] or row['p50_us']:.0f}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) or "No rows yet: no GPU has run forward and backward of these shapes.\n"


def _describe_setting(row: dict) -> tuple:
    """What the rows of two modes share that ran the same."""
    return *(row[key] for key in ("gpu", "shape", "variant", "chunk_size")), record.changed_options(record.options(row))


def tabulate_blocks(rows: list[dict]) -> str:
    """Markdown of the latest rows of each part of a block, ours beside upstream's: losses beside wins."""
    if not rows:
        return "No rows yet: no GPU has run `make block` for this table.\n"
    return "\n".join(_render_by_gpu(rows, _BLOCK))


def tabulate_libraries(rows: list[dict], parts: list[dict]) -> str:
    """Markdown of the libraries that can be patched, and of what is faster there, from the least to the most over the rows."""
    def collect(found: list[dict], mode: str, **where: str) -> str:
        where["mode"] = mode
        return _write_range([row["graph_speedup"] for row in found if row["gpu"] and row.get("graph_speedup")
                             and all(row[key] == value for key, value in where.items())])

    gains = {"SSD": collect(rows, "fwd_bwd", variant="auto")}
    gains |= {name: collect(parts, mode, part=part) for part, (name, mode) in _LIBRARY_PARTS.items()}
    mamba2 = [f"{name} {gain}" for name, gain in gains.items() if gain]
    mamba1 = [text for text in mamba2 if text.startswith("Mamba-1")]
    mamba2 = [text for text in mamba2 if text not in mamba1]
    versions = [f"{'.'.join(map(str, module.FIRST))} to {'.'.join(map(str, module.LAST))}"
                for module in (transformers_patch, mamba_ssm_patch)]
    whole, alone = "; ".join(mamba2) or "no rows yet", "; ".join(mamba2[:1]) or "no rows yet"
    lines = ["| library | versions | one line | what is faster |", "|---|---|---|---|",
             f"| transformers | {versions[0]} | `ssd.patch_transformers()` | {whole} |",
             f"| mamba_ssm | {versions[1]} | `ssd.patch_mamba_ssm()` | {'; '.join((whole, *mamba1))} |",
             f"| Megatron-LM | any beside such a mamba_ssm | `ssd.patch_mamba_ssm()` | {alone}; the rest as above |",
             f"| flash-linear-attention | any beside such a mamba_ssm | `ssd.patch_mamba_ssm()` | {alone} |"]
    return "\n".join(lines) + "\n"


def _write_range(values: list[float]) -> str:
    """1.3x to 2.4x; empty without values."""
    ends = dict.fromkeys(f"{value:.1f}x" for value in (min(values), max(values))) if values else ()
    return " to ".join(ends)


def tabulate_ablation(rows: list[dict]) -> str:
    """Markdown of the latest rows of the ablation, a table for each shape, mode and variant."""
    parts = []
    for (gpu, shape, mode, variant), group in groupby(rows, _ABLATED):
        cells = {(row["step"], row["changed"]): f"{row['graph_p50_us'] or row['p50_us']:.0f} | {row['relative']:.2f}"
                 f"{' †' if row.get('plain') else ''}" for row in group if row["relative"] is not None}
        lines = [f"{gpu}, {shape}, {DIRECTIONS[mode]}, `{variant}`:\n",
                 "| option | without, µs | relative | up to, µs | relative |", "|---|---:|---:|---:|---:|",
                 f"| none | | | {cells.get(('none', None), ' | ')} |"]
        options = [option for step, option in cells if step == "without"]
        without = {option: "not used | " if option in _UNREAD[mode] else cells["without", option] for option in options}
        lines += [f"| {option} | {cell} | {cells.get(('added', option), ' | ')} |" for option, cell in without.items()]
        parts.append("\n".join([*lines, f"| all | {cells.get(('all', None), ' | ')} | | |"]) + "\n")
    return "\n".join(parts) or "No rows yet: no GPU has run `make ablate` for this table.\n"


def tabulate_gains(rows: list[dict]) -> str:
    """Markdown of what the fastest variant gains over upstream in each workload, in the step and in its SSM kernels, of steps
    that were timed side by side: losses beside wins.
    """
    lines = ["| workload | preset | mixer | batch | upstream's step, ms | SSM in it | variant | step, ms | SSM in it | step "
             "faster | SSM faster | SSM in the gain |", "|---|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|"]
    together: dict[tuple, list[dict]] = {}
    for row in rows:
        together.setdefault((row["gpu"], row["sitting"], record.settings(row, "variant")), []).append(row)
    for group in together.values():
        theirs = [row for row in group if row["variant"] == "mamba_ssm"]
        ours = [row for row in group if row["speedup"] and not is_peer(row["variant"])]
        if not (theirs and ours):
            continue
        one, best = theirs[0], min(ours, key=itemgetter("p50_us"))
        if not (one["ssm_us"] and best["ssm_us"]):
            continue
        run = " | ".join(str(one["run"][name]) for name in ("workload", "preset", "mixer", "batch"))
        step, ssm = one["p50_us"] - best["p50_us"], one["ssm_us"] - best["ssm_us"]
        part = f"{100 * ssm / step:.0f} %" if step > 0 and ssm > 0 else ""
        faster = f"{best['speedup']:.2f}", f"{one['ssm_us'] / best['ssm_us']:.2f}"
        lines.append(f"| {' | '.join((run, *_describe_step(one), best['variant'], *_describe_step(best), *faster, part))} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "No rows yet: no GPU has run the sweep beside upstream.\n"


def _describe_step(row: dict) -> tuple[str, str]:
    """A step's milliseconds, and the SSM kernels' share of them."""
    return f"{row['p50_us'] / 1e3:.1f}", f"{100 * row['share']:.1f} %"


def tabulate_several_gpus(rows: list[dict]) -> str:
    """Markdown of the latest training of each kind on several GPUs beside the same on one: its steps, its loss."""
    rows = [row for row in rows if row["gpu"]]
    trained = {(_describe_training(row), row["gpus"], row["way"]): row for row in rows}
    pairs = [(row, trained[alike, 1, None]) for (alike, gpus, _), row in trained.items()
             if gpus > 1 and (alike, 1, None) in trained]
    if not pairs:
        return "No rows yet: no GPUs have run `make train GPUS=2` for this table.\n"
    lines = ["| workload | preset | variant | batch | GPUs | way | link, GB/s | step, ms | on one | faster | efficiency | loss "
             "| on one |", "|---|---|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for row, one in pairs:
        faster = one["p50_us"] / row["p50_us"]
        run = " | ".join(str(row["run"][name]) for name in ("workload", "preset", "variant", "batch"))
        times = f"{row['p50_us'] / 1e3:.1f} | {one['p50_us'] / 1e3:.1f} | {faster:.2f} | {100 * faster / row['gpus']:.0f} %"
        link = f"{row['link_gbps']:.0f}" if row.get("link_gbps") else ""
        how = f"{row['gpus']} {row['gpu']} | {row['way']} | {link}"
        lines.append(f"| {run} | {how} | {times} | {row['loss']:.3f} | {one['loss']:.3f} |")
    return "\n".join(lines) + "\n"


def tabulate_several_seeds(rows: list[dict]) -> str:
    """Markdown of the latest losses of trainings on one GPU that differ in seed and variant alone, where there are several; of
    any commit, since no time is compared.
    """
    found: dict[tuple, dict[int, dict[str, dict]]] = {}
    for row in rows:
        if row["gpu"] and row["gpus"] == 1:
            kind = row["gpu"], record.settings(row, "save_every", "seed", "variant")
            found.setdefault(kind, {}).setdefault(row["run"]["seed"], {})[row["variant"]] = row
    lines = ["| workload | preset | mixer | steps | seed | losses | apart |", "|---|---|---|---:|---:|---|---:|"]
    for seeds in found.values():
        compared = {seed: of for seed, of in sorted(seeds.items()) if len(of) > 1}
        for seed, of in compared.items() if len(compared) > 1 else ():
            losses = {variant: row["loss"] for variant, row in sorted(of.items())}
            run = " | ".join(str(next(iter(of.values()))["run"][name]) for name in ("workload", "preset", "mixer", "steps"))
            apart = 100 * (max(losses.values()) / min(losses.values()) - 1)
            listed = ", ".join(f"{variant} {loss:.3f}" for variant, loss in losses.items())
            lines.append(f"| {run} | {seed} | {listed} | {apart:.2f} % |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "No rows yet: no GPU has trained one model from several seeds.\n"


def _describe_training(row: dict) -> tuple:
    """What trainings share that compare: every setting but how often they are saved, the machine and the code."""
    return *(row[name] for name in ("gpu", "git_sha", "torch", "triton")), record.settings(row, "save_every")


def _render_by_gpu(rows: list[dict], columns: dict) -> list[str]:
    """Markdown of each GPU's rows."""
    return [f"{where}:\n\n{table.render(group, 'markdown', columns)}" for where, group in group_by_gpu(rows)]


def group_by_gpu(rows: list[dict]) -> Iterator[tuple[str, list[dict]]]:
    """Each GPU with the versions that its rows were measured with, and these rows."""
    for gpu, group in groupby(rows, lambda row: row["gpu"]):
        group = list(group)
        versions = sorted({f"torch {row['torch']}, Triton {row['triton']}" for row in group})
        yield f"{gpu}, {'; '.join(versions)}", group


def join_words(texts: list[str]) -> str:
    """a; a and b; a, b and c."""
    *others, last = texts
    return f"{', '.join(others)} and {last}" if others else last


def _list_every_row(rows: list[dict]) -> str:
    lines = [
        "| shape | | variant | chunk | µs | in a CUDA graph, µs | share of bound | error | against | speed-up |",
        "|---|---|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for row in rows:
        graph = "" if row["graph_p50_us"] is None else f"{row['graph_p50_us']:.0f}"
        speedups = "" if not row.get("against") else " / ".join(
            f"{row[key]:.2f}" for key in ("speedup", "graph_speedup") if row[key])
        floor = row["ideal_bytes"] / row["copy_gbps"] / 1e3
        share = f"{100 * floor / (row['graph_p50_us'] or row['p50_us']):.0f} %"
        error = "" if row["err_rms"] is None else f"{row['err_rms']:.1e}"
        cells = (row["shape"], MODES[row["mode"]], row["variant"], row["chunk_size"], f"{row['p50_us']:.0f}", graph,
                 share, error, row.get("against") or "", speedups)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _tabulate_by_shape(rows: list[dict]) -> str:
    """A line for each shape, a column for each variant."""
    variants = [*dict.fromkeys(row["variant"] for row in rows)]
    lines = [f"| shape | {' | '.join(variants)} |", f"|---|{'---:|' * len(variants)}"]
    for shape, group in groupby(rows, itemgetter("shape")):
        cells = {}
        for row in group:
            speedup = f" ({row['graph_speedup']:.2f})" if row.get("graph_speedup") else ""
            cells[row["variant"]] = f"{row['graph_p50_us'] or row['p50_us']:.0f}{speedup}"
        lines.append(f"| {shape} | {' | '.join(cells.get(variant, '') for variant in variants)} |")
    return "\n".join(lines) + "\n"
