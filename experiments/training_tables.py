"""Tables of training steps and of trainings, for docs, in Markdown, each from committed rows: losses beside wins."""

from operator import itemgetter

from ssd.registry import is_peer

from . import record, table
from .result_tables import render_by_gpu
from .sweep import describe_way
from .table import render_lines, write_head, write_number

# Of steps in two tables: what was run and how fast; where the time goes. `_describe_run` stands in the first column.
_SETTINGS = ("workload", "batch", "dtype", "variant")
_SPEED = ("tokens", "step ms", "speed-up", "a second", "unit", "MiB", "loss")
_LEFT_OUT = {*_SPEED, "options", "preset", "mixer", "graph", "compile"}
_STEPS = {header: table.STEPS[header] for header in (*_SETTINGS, *_SPEED)}
_STEP_PARTS = {header: table.STEPS[header] for header in (*_SETTINGS, *table.STEPS) if header not in _LEFT_OUT}
_whole, _tenths = write_number(0), write_number(1)
_GAINS_HEAD = write_head(
    "workload | batch | mamba_ssm's step, ms | SSM in it, % | variant | step, ms | SSM in it, % | step faster | SSM faster | "
    "SSM in the gain, %", "workload", "variant")
_GPUS_HEAD = write_head(
    "workload | preset | variant | batch | steps | GPUs | way | link, GB/s | step, ms | on one | faster | efficiency | loss | "
    "on one",
    "workload", "preset", "variant", "GPUs", "way")
_SEEDS_HEAD = write_head("workload | preset | mixer | steps | seed | losses | apart", "workload", "preset", "mixer", "losses")


def tabulate_steps(rows: list[dict], figure_path: str) -> str:
    """Markdown of the latest steps of each workload, variants as they come: losses beside wins."""
    if not rows:
        return "No rows yet: no GPU has run the sweep for this table.\n"
    figure = f"![A training step of each workload with each variant, and the state-space model's part]({figure_path})\n"
    named = sorted((row | {"workload": _describe_run(row)} for row in rows), key=itemgetter("workload", "batch", "dtype"))
    return "\n".join([figure, *render_by_gpu(named, _STEPS), "Where the time of these steps goes:\n",
                      *render_by_gpu(named, _STEP_PARTS)])


def tabulate_gains(rows: list[dict]) -> str:
    """Markdown of what the fastest variant gains over upstream in each workload, in the step and in its SSM kernels, of steps
    that were timed side by side: losses beside wins, a table for each GPU.
    """
    lines: dict[str, list[list]] = {}
    for group in record.group_by(rows, lambda row: (row["gpu"], row["sitting"], record.settings(row, "variant"))).values():
        theirs = [row for row in group if row["variant"] == "mamba_ssm"]
        ours = [row for row in group if row["speedup"] and not is_peer(row["variant"])]
        if not (theirs and ours):
            continue
        one, best = theirs[0], min(ours, key=itemgetter("p50_us"))
        if one["ssm_us"] and best["ssm_us"]:
            step, ssm = one["p50_us"] - best["p50_us"], one["ssm_us"] - best["ssm_us"]
            lines.setdefault(one["gpu"], []).append(
                [_describe_run(one), one["run"]["batch"], *_describe_step(one), best["variant"], *_describe_step(best),
                 f"{best['speedup']:.2f}", f"{one['ssm_us'] / best['ssm_us']:.2f}",
                 f"{100 * ssm / step:.0f}" if step > 0 and ssm > 0 else ""])
    parts = [f"On one {gpu}:\n\n{_GAINS_HEAD}{render_lines(of)}" for gpu, of in lines.items()]
    return "\n".join(parts) or "No rows yet: no GPU has run the sweep beside upstream.\n"


def _describe_run(row: dict) -> str:
    """mamba2 1.3b (ssd), captured, with the settings by which rows differ that would otherwise look alike."""
    workload, preset, mixer = _list_settings(row, "workload", "preset", "mixer")
    filled = ", filled up" if row["run"].get("buckets") else ""
    joined = ", one document a row" if row["run"].get("documents") is False else ""
    return f"{workload} {preset} ({mixer}){describe_way(row)}{filled}{joined}"


def _list_settings(row: dict, *names: str) -> list[str]:
    """The settings of a row's run."""
    return [str(row["run"][name]) for name in names]


def _describe_step(row: dict) -> tuple[str, str]:
    """A step's milliseconds, and the SSM kernels' share of them."""
    return _tenths(row["p50_us"] / 1e3), f"{100 * row['share']:.1f}"


def tabulate_several_gpus(rows: list[dict]) -> str:
    """Markdown of the latest training of each kind on several GPUs beside the same on one, captured alike if there is such a
    run, else the other: its steps, its loss.
    """
    trained = {(_describe_training(row), row["gpus"], row["way"], bool(row.get("graph"))): row for row in rows if row["gpu"]}
    lines = {}  # of the last commit
    for (alike, gpus, way, graph), row in trained.items():
        one = trained.get((alike, 1, None, graph)) or trained.get((alike, 1, None, not graph))
        if gpus > 1 and one:
            faster = one["p50_us"] / row["p50_us"]
            lines[row["gpu"], record.settings(row, "save_every"), gpus, way, graph] = [
                *_list_settings(row, "workload", "preset", "variant", "batch", "steps"), f"{gpus} {row['gpu']}", way,
                _whole(row.get("link_gbps")), *map(_describe_trained_step, (row, one)),
                f"{faster:.2f}", f"{100 * faster / gpus:.0f} %", f"{row['loss']:.3f}", f"{one['loss']:.3f}"]
    if not lines:
        return "No rows yet: no GPUs have run `make train GPUS=2` for this table.\n"
    return _GPUS_HEAD + render_lines(lines.values())


def _describe_trained_step(row: dict) -> str:
    return _tenths(row["p50_us"] / 1e3) + describe_way(row)


def tabulate_several_seeds(rows: list[dict]) -> str:
    """Markdown of the latest losses of trainings on one GPU that differ in seed and variant alone, where there are several; of
    any commit, since no time is compared.
    """
    alone, lines = [row for row in rows if row["gpu"] and row["gpus"] == 1], []
    kinds = record.group_by(alone, lambda row: (row["gpu"], record.settings(row, "save_every", "seed", "variant")))
    for group in kinds.values():
        seeds = {seed: {row["variant"]: row["loss"] for row in sorted(of, key=itemgetter("variant"))}
                 for seed, of in sorted(record.group_by(group, lambda row: row["run"]["seed"]).items())}
        compared = {seed: losses for seed, losses in seeds.items() if len(losses) > 1}
        for seed, losses in compared.items() if len(compared) > 1 else ():
            lines.append([*_list_settings(group[0], "workload", "preset", "mixer", "steps"), seed,
                          ", ".join(f"{variant} {loss:.3f}" for variant, loss in losses.items()),
                          f"{100 * (max(losses.values()) / min(losses.values()) - 1):.2f} %"])
    return _SEEDS_HEAD + render_lines(lines) if lines else "No rows yet: no GPU has trained one model from several seeds.\n"


def _describe_training(row: dict) -> tuple:
    """What trainings share that compare: every setting but how often they are saved, the machine and the code."""
    return *(row[name] for name in ("gpu", "git_sha", "torch", "triton")), record.settings(row, "save_every")
