"""Workload `mamba2`: Mamba-2 blocks alone, at the sizes of arXiv:2405.21060 and of the 8B model of arXiv:2406.07887."""

from .language_model import MAMBA, LanguageSizes
from .registry import Preset
from .text import make_workload


def _make_published(d_model: int, layers: int, lr: float) -> Preset:
    """Learning rates are five times GPT-3's at that size, as arXiv:2312.00752 trains."""
    sizes = LanguageSizes(d_model, MAMBA * layers, vocab_size=50288, tie_embeddings=True, ngroups=1)
    return Preset(sizes, batch=4, seqlen=4096, lr=lr)


def _wide(layers: int, vocab_size: int) -> Preset:
    """As wide as the 8B model, with its eight groups of B and C, by which up to eight GPUs can share a layer."""
    return Preset(LanguageSizes(4096, MAMBA * layers, vocab_size), batch=4, seqlen=4096, lr=1e-4)


WORKLOAD = make_workload(
    "mamba2",
    presets={
        "tiny": Preset(LanguageSizes(128, MAMBA * 4, vocab_size=512, tie_embeddings=True, d_state=32, headdim=32, ngroups=2,
                                     chunk_size=32), batch=4, seqlen=256, lr=1e-2),
        "130m": _make_published(768, 24, 3e-3),
        "370m": _make_published(1024, 48, 1.5e-3),
        "780m": _make_published(1536, 48, 1.25e-3),
        "1.3b": _make_published(2048, 48, 1e-3),
        "2.7b": _make_published(2560, 64, 8e-4),
        "8b-width": _wide(8, vocab_size=50304),
        "8b": _wide(56, vocab_size=256000),
    },
)
