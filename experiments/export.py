"""A trained Mamba-2 language model as a folder that `ssd.modules.Mamba2LM` reads: its weights, by mamba_ssm's names."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ssd.modules import Mamba2LM, Mamba2LMConfig
from ssd.modules.checkpoint import list_few, write

from . import checkpoints
from .training_run import Run
from .workloads.language_model import MAMBA, LanguageSizes

_HEAD, _OF_OPTIMIZER = "lm_head.", "/"  # in a tensor's name


def export(run_folder: Path, to: Path, console: Console) -> int:
    """Writes config.json and model.safetensors from the last good checkpoint of a run, in fp32; returns its step. Later ones,
    which are damaged, are named on the console.

    Raises:
        FileNotFoundError: there is no checkpoint in the run's folder.
        FileExistsError: something is in `to`.
        ValueError: the model is not of Mamba-2 blocks alone, was pruned, or has other sizes than its preset has now.
        Damaged: the checkpoint cannot be read.
    """
    checkpoint, damaged = checkpoints.latest_good(run_folder / "checkpoints")
    if checkpoint is None:
        found = damaged[0].what if damaged else "none"
        raise FileNotFoundError(f"--from: got {run_folder}, expected the folder of a run with a checkpoint; found: {found}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"--to: got {to}, where there is something, expected another folder: nothing is overwritten")
    for one in damaged:
        console.print(one.what, style="yellow", markup=False)
    state = checkpoints.read_state(checkpoint)
    sizes = _read_sizes(state["run"])
    mixer = {"layer": "Mamba2", "d_state": sizes.d_state, "headdim": sizes.headdim, "ngroups": sizes.ngroups,
             "chunk_size": sizes.chunk_size}
    config = Mamba2LMConfig(sizes.d_model, len(sizes.pattern), sizes.vocab_size, mixer, tie_embeddings=sizes.tie_embeddings,
                            pad_vocab_size_multiple=1)
    weights = {name if name.startswith(_HEAD) else f"backbone.{name}": t
               for name, t in checkpoints.read_tensors(checkpoint).items() if _OF_OPTIMIZER not in name}
    expected = {name: t.shape for name, t in Mamba2LM(config, device="meta").named_parameters()}
    if differing := {*expected.items()} ^ {(name, t.shape) for name, t in weights.items()}:
        raise ValueError(f"--from: got a run whose {list_few({name for name, _ in differing})} are not those of its preset now")
    write(to, asdict(config), weights)
    return state["step"]


def _read_sizes(settings: dict[str, Any]) -> LanguageSizes:
    try:
        run = Run(**settings)
    except TypeError as reason:
        raise ValueError(f"--from: got a run of another version of this program: {reason}") from reason
    if not isinstance(run.sizes, LanguageSizes) or set(run.sizes.pattern) != {MAMBA}:
        raise ValueError(f"--from: got a run of {run.workload} {run.preset}, expected one of mamba2, which Mamba2LM has the "
                         "layers of")
    if run.start is not None:
        raise ValueError(f"--from: got a run that began with {run.start}, a pruned model, expected one of whole sizes")
    return run.sizes
