"""Times every config of every kernel on the current GPU and freezes the fastest in ssd/configs/<gpu>.json.

Kernels do not influence each other's times, so one forward and backward times one config of each: as many rounds as the longest
space has entries, not as many as there are configs.
"""

import json
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from ssd.registry import config_spaces, get_variant
from ssd.runtime import tuning
from ssd.types import Options, SSDGrads, SSDInputs

from . import record
from .files import replace_file
from .inputs import DTYPES, make_inputs
from .shapes import Shape
from .terminal import make_empty_table, track
from .timing import list_launches

# What together launches every kernel, forward and backward.
_CALLS = (("baseline", Options()), ("fused", Options(gluon=False)), ("fused", Options(gluon=False, two_level=False)),
          ("persistent", Options(gluon=False)))


def run(shapes: list[Shape], dtype: str, chunk_sizes: tuple[int, ...], repeats: int, console: Console) -> None:
    """Tunes for each shape and chunk size; where two shapes share a line of the file, the later one is kept."""
    device = tuning.current_device(torch.cuda.current_device())
    path = tuning.CONFIGS / f"{device.name}.json"
    frozen = json.loads(path.read_text()) if path.exists() else {}
    for shape in shapes:
        for chunk_size in chunk_sizes:
            sizes = (DTYPES[dtype], shape.headdim, shape.dstate, chunk_size)
            times = _measure(shape, dtype, chunk_size, sizes, device, repeats, console)
            best = {kernel: min(of, key=of.get) for kernel, of in times.items()}
            frozen |= {tuning.size_key(kernel, *sizes): tuning.to_entry(config) for kernel, config in best.items()}
            console.print(_table(f"{shape.name}, chunk size {chunk_size}", times, best))
            path.parent.mkdir(exist_ok=True)
            lines = ",\n".join(f'  "{key}": {json.dumps(entry)}' for key, entry in sorted(frozen.items()))
            with replace_file(path) as part:
                part.write_text(f"{{\n{lines}\n}}\n")


def _measure(shape, dtype, chunk_size, sizes, device, repeats, console) -> dict[str, dict[tuning.Config, float]]:
    """{kernel: {config: median microseconds}}."""
    inputs = SSDInputs(**make_inputs(shape, DTYPES[dtype], "cuda"), chunk_size=chunk_size)
    inputs = SSDInputs(**{**vars(inputs), "z": torch.randn_like(inputs.x)})  # so that chunk_scan_dz runs too
    dout = torch.randn_like(inputs.x)
    spaces = {kernel: space.configs(*sizes, device) for kernel, space in config_spaces().items()}
    times: dict[str, dict[tuning.Config, float]] = defaultdict(dict)
    turns = range(max(map(len, spaces.values())))
    for turn in track(turns, console, lambda turn: f"{shape.name}, chunk {chunk_size}: config {turn + 1}"):
        trial = {kernel: space[turn] for kernel, space in spaces.items() if turn < len(space)}
        with ExitStack() as stack:
            for kernel, config in trial.items():
                stack.enter_context(tuning.force_config(kernel, config))

            launch_all(inputs, dout)
            spent = measure_kernels(partial(launch_all, inputs, dout), repeats)
        for kernel, config in trial.items():
            times[kernel][config] = spent[f"{kernel}_kernel"]
    return times


def launch_all(inputs: SSDInputs, dout: torch.Tensor) -> None:
    """One launch at least of every kernel in `config_spaces()`, while configs are forced."""
    for name, options in _CALLS:
        variant = get_variant(name)
        saved = variant.forward(inputs, options, True)[2]
        variant.backward(saved, dout, None, SSDGrads())


def measure_kernels(call, repeats: int) -> dict[str, float]:
    """{kernel: median microseconds of its launches}, by the profiler."""
    launches = record.group_by(list_launches(call, repeats), itemgetter(0))
    return {name: median(us for _, us in of) for name, of in launches.items()}


def _table(title: str, times, best) -> Table:
    table = make_empty_table("kernel", "us", "default us", "config", title=title)
    for kernel, of in times.items():
        blocks = " ".join(f"{name.removeprefix('BLOCK_')}={size}" for name, size in best[kernel].blocks)
        config = f"{blocks} warps={best[kernel].num_warps} stages={best[kernel].num_stages}"
        table.add_row(kernel, f"{of[best[kernel]]:.1f}", f"{next(iter(of.values())):.1f}", config)
    return table
