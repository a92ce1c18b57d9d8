"""The README's figure: how many times as fast as mamba_ssm a layer of each model is, from rows."""

from pathlib import Path

from . import figure, palette

# {shape: (a layer of what, tokens, the workload that trains the model)}
HEADLINE = {
    "8b-b4": ("Mamba-2 8B", "4 x 4096", ("mamba2", "8b-width", 4)),
    "2.7b-b4": ("Mamba-2 2.7B", "4 x 4096", None),
    "2.7b-64k": ("Mamba-2 2.7B", "1 x 65536", None),
    "130m-b8": ("Mamba-2 130M", "8 x 2048", None),
    "vision-196": ("MambaVision-T", "128 x 196", ("mambavision", "T", 128)),
    "graphs": ("GraphMamba", "128 graphs", ("graphmamba", "peptides-func", 128)),
}
_SHOWN = {"fwd": "forward", "bwd": "backward"}
FASTEST, DEFAULT = "persistent", "auto"


def points(rows: list[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """{mode: {layer: {variant: speed-up over mamba_ssm in GPU time}}}; of one GPU, the last by name. Empty if there is none."""
    compared = [row for row in rows if row.get("graph_speedup") and row["shape"] in HEADLINE]
    if not compared:
        return {}
    gpu = max(row["gpu"] for row in compared)
    found = {(row["mode"], row["shape"], row["variant"]): row["graph_speedup"] for row in compared if row["gpu"] == gpu}
    return {mode: {f"{model}\n{tokens}": {variant: found[mode, shape, variant] for variant in (FASTEST, DEFAULT)
                                          if (mode, shape, variant) in found}
                   for shape, (model, tokens, _) in HEADLINE.items()} for mode in _SHOWN}


def draw(rows: list[dict], path: Path) -> None:
    """Write the SVG: for each layer a bar forward and a paler one backward, and a mark where `auto` is."""
    plt = figure.pyplot()
    of_fastest, of_default = palette.VARIANTS[FASTEST], palette.VARIANTS[DEFAULT]
    shown = points(rows)
    labels = list(shown["fwd"])
    drawn, ax = plt.subplots(figsize=(figure.WIDTH, 0.9 + 0.62 * len(labels)), layout="constrained")
    for n, (mode, layers) in enumerate(shown.items()):
        for y, times in enumerate(reversed(layers.values())):
            at = y + (0.2, -0.2)[n]
            if fastest := times.get(FASTEST):
                ax.barh(at, fastest, 0.38, color=of_fastest, alpha=(1, 0.5)[n], label=f"{FASTEST}, {_SHOWN[mode]}")
                ax.annotate(f"{fastest:.1f}x", (max(times.values()), at), (8, 0), textcoords="offset points", va="center")
            if default := times.get(DEFAULT):
                ax.plot(default, at, "D", color=of_default, markersize=5, label=f"{DEFAULT}, the default")
    ax.axvline(1, color=palette.VARIANTS["mamba_ssm"], linewidth=2, label="mamba_ssm")
    ax.set(yticks=range(len(labels)), yticklabels=labels[::-1], xlabel="times as fast as mamba_ssm", xlim=(0, None))
    ax.margins(x=0.12)
    figure.hide_frame(ax)
    figure.save(drawn, path, shown, legend_columns=2)
