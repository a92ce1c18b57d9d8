"""Workload `hybrid`: Mamba-2, attention and MLP layers in the proportions of arXiv:2406.07887's 8B model."""

from fractions import Fraction

from .language_model import ATTENTION, MAMBA, MLP_LAYER, LanguageSizes
from .registry import Preset
from .text import make_workload

ATTENTION_SHARE, MLP_SHARE = Fraction(4, 56), Fraction(28, 56)


def allocate(layers: int, attention_share: Fraction = ATTENTION_SHARE, mlp_share: Fraction = MLP_SHARE) -> str:
    """The pattern of that many layers: attention spread over all, then MLPs over what attention leaves.

    Attention parts the others into sections of equal length, one more than there are attention layers. MLPs take turns with
    Mamba-2 in their proportion, which Mamba-2 begins.

    Args:
        layers: at least 1.
        attention_share, mlp_share: of all layers; the numbers of either are rounded, and Mamba-2 has the rest.

    Raises:
        ValueError: more than all layers.
    """
    attention, mlp = round(layers * attention_share), round(layers * mlp_share)
    mamba = layers - attention - mlp
    if layers < 1 or min(attention, mlp, mamba) < 0:
        raise ValueError(f"layers: got {layers} with shares of {attention_share} attention and {mlp_share} MLP, expected at "
                         "least 1 and shares from 0 to 1 in all")
    pattern = _place_kind([None] * layers, ATTENTION, attention, Fraction(layers - attention, attention + 1))
    pattern = _place_kind(pattern, MLP_LAYER, mlp, Fraction(mamba, max(mlp, 1)))
    return "".join(kind or MAMBA for kind in pattern)


def _place_kind(pattern: list[str | None], kind: str, count: int, apart: Fraction) -> list[str | None]:
    """The pattern with `count` of its free places taken by `kind`, `apart` free ones between them on average."""
    placed, owed = list(pattern), apart
    for place, taken in enumerate(pattern):
        if taken is not None or not count:
            continue
        if owed < Fraction(1, 2):
            placed[place] = kind
            owed += apart
            count -= 1
        else:
            owed -= 1
    return placed


def _preset(d_model: int, layers: int, vocab_size: int, lr: float) -> Preset:
    sizes = LanguageSizes(d_model, allocate(layers), vocab_size, heads=d_model // 128, kv_heads=8)
    return Preset(sizes, batch=4, seqlen=4096, lr=lr)


WORKLOAD = make_workload(
    "hybrid",
    presets={
        "tiny": Preset(LanguageSizes(128, allocate(14), vocab_size=512, d_state=32, headdim=32, ngroups=2, chunk_size=32,
                                     heads=4, kv_heads=2, attention_headdim=32), batch=4, seqlen=256, lr=5e-3),
        "1b": _preset(2048, 28, vocab_size=50304, lr=2e-4),
        "2b": _preset(4096, 14, vocab_size=50304, lr=1e-4),
        "8b": _preset(4096, 56, vocab_size=256000, lr=1e-4),
    },
)
