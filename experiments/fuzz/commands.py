"""The command `fuzz`, which `__main__` adds to the command line."""

import sys
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from .. import flags
from ..arguments import has_gpu, split_names
from ..flags import VARIANTS, check_name
from ..record import RESULTS
from ..terminal import make_console, refuse_errors

_PARTS = ("operator", "block", "serving")
_PEERS = ("mamba_ssm", "fla")  # which the fuzz does not judge
_VARIANTS = tuple(name for name in VARIANTS if name not in _PEERS)
_WORKERS_ON_GPU, _TIMEOUT = 14, 240.0
_SECONDS, _CONFIGS = 60, 100_000  # unless told otherwise


def fuzz(
    seconds: Annotated[float | None, typer.Option(
        min=1, help="When to break off; 60, or with --configs not before all have run.")] = None,
    configs: Annotated[int | None, typer.Option(min=1, help="How many to draw. Slow ones are waited for.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn: the same seed draws the same.")] = 0,
    variant: Annotated[str, typer.Option(
        help=f"Variants, a share each, of {', '.join(_VARIANTS)}.")] = "auto,baseline,fused,persistent",
    part: Annotated[str, typer.Option(help=f"One of {', '.join(_PARTS)}.")] = "operator",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; 14 with a GPU, 1 without.")] = None,
    family: Annotated[int, typer.Option(min=1, help="Configurations drawn for each set of kernels.")] = 6,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a configuration counts as hung.")] = _TIMEOUT,
    shrink: Annotated[float, typer.Option(min=0, help="Seconds for making the first failures small, after the rest.")] = 90,
    config: Annotated[str | None, typer.Option(
        help="Run this configuration, as a run printed it, and nothing else; @FILE or - for stdin, one a line.")] = None,
    out: flags.Out = RESULTS,
) -> None:
    """Draw configurations at random and judge every output and gradient against fp64; exit 1 if any fails.

    Each failure is one line of JSON that --config runs again. Without a GPU the kernels are interpreted, at small sizes.
    """
    variants = tuple(split_names("--variant", variant, _VARIANTS))
    check_name("--part", part, _PARTS)
    on_gpu = has_gpu()  # if not, kernels are interpreted from here on
    workers = workers or (_WORKERS_ON_GPU if on_gpu else 1)
    seconds = seconds or (_SECONDS if configs is None else inf)
    from . import campaign
    from .parts import from_json, to_json

    plan = campaign.Plan(part, variants, seed, seconds, configs or _CONFIGS, workers, family, timeout, shrink, out)
    console = make_console()
    if config is None:
        raise typer.Exit(1 if campaign.run(plan, console).failures else 0)
    with refuse_errors("--config: "):
        lines = [to_json(from_json(line)) for line in _lines(config)]
    raise typer.Exit(0 if campaign.rerun(lines, plan, console) else 1)


def _lines(text: str) -> list[str]:
    """The configurations that --config names; at least one.

    Raises:
        ValueError, OSError: there is none, or no such file.
    """
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        text = Path(text[1:]).read_text()
    if not (lines := [line for line in text.splitlines() if line.strip()]):
        raise ValueError("got no line, expected a configuration as a JSON object")
    return lines
