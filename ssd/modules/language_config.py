"""What a language model of Mamba-2 layers is made of, by the names of mamba_ssm's `MambaConfig`, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from inspect import signature
from typing import Any

from ..block.arguments import check_size
from ..options import suggest
from .mamba2 import Mamba2

_SIZES = ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple")
_SWITCHES = ("rms_norm", "residual_in_fp32", "fused_add_norm", "tie_embeddings")
_DICTS = ("ssm_cfg", "attn_cfg")
_MIXER = signature(Mamba2).parameters.keys() - {"d_model", "layer_idx", "device", "dtype", "variant", "options"}
_WITHOUT_EFFECT = {"use_mem_eff_path", "sequence_parallel"}  # which of upstream's functions run, and how over several GPUs


@dataclass(frozen=True)
class Mamba2LMConfig:
    """Fields and defaults are those of mamba_ssm's `MambaConfig`, but for the first four.

    Attributes:
        d_model: channels of the residual stream.
        n_layer: Mamba-2 blocks.
        vocab_size: tokens; embedding and head have as many rows as `padded_vocab_size`.
        ssm_cfg: arguments of `Mamba2` by name, and "layer", which says "Mamba2". As mamba_ssm's block takes them, also
            "use_mem_eff_path" and "sequence_parallel", which have no effect, and "process_group", which is None.
        rms_norm: RMSNorm, else LayerNorm, before each block and before the head.
        residual_in_fp32: whatever the dtype of the weights.
        pad_vocab_size_multiple: the rows of the embedding are a multiple of it.
        tie_embeddings: the head's weight is the embedding's.
        fused_add_norm: how upstream computes; has no effect.
        d_intermediate: 0, channels of an MLP after each block.
        attn_layer_idx: empty, the layers that are attention; attn_cfg is theirs.

    Raises:
        TypeError, ValueError: naming the field, what came and what is accepted.
    """

    d_model: int
    n_layer: int
    vocab_size: int
    ssm_cfg: dict[str, Any] = field(default_factory=lambda: {"layer": "Mamba2"})
    rms_norm: bool = True
    residual_in_fp32: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True
    fused_add_norm: bool = True
    d_intermediate: int = 0
    attn_layer_idx: list[int] = field(default_factory=list)
    attn_cfg: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        for name in _SIZES:
            check_size(name, getattr(self, name))
        for names, kind in ((_SWITCHES, bool), (_DICTS, dict)):
            for name in names:
                if not isinstance(getattr(self, name), kind):
                    raise TypeError(f"{name}: got {getattr(self, name)!r}, expected a {kind.__name__}")
        if self.d_intermediate != 0:
            raise ValueError(f"d_intermediate: got {self.d_intermediate!r}, expected 0: no MLPs follow the blocks here")
        if self.attn_layer_idx:
            raise ValueError(f"attn_layer_idx: got {self.attn_layer_idx!r}, expected none: every layer here is Mamba-2")
        wrong = []
        if (layer := self.ssm_cfg.get("layer")) != "Mamba2":
            came = repr(layer) if "layer" in self.ssm_cfg else "none, which mamba_ssm takes for 'Mamba1'"
            wrong.append(f"ssm_cfg['layer']: got {came}, expected 'Mamba2'")
        if unknown := sorted(map(str, self.ssm_cfg.keys() - _MIXER - _WITHOUT_EFFECT - {"layer", "process_group"})):
            wrong.append(f"ssm_cfg: got {', '.join(unknown)}, expected some of {', '.join(sorted(_MIXER))}"
                         + suggest(unknown[0], _MIXER))
        if wrong:
            raise ValueError("; ".join(wrong))
        if self.ssm_cfg.get("process_group") is not None:
            raise ValueError(f"ssm_cfg['process_group']: got {self.ssm_cfg['process_group']!r}, expected None: "
                             "there is no tensor parallelism here")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Mamba2LMConfig:
        """From what a config.json holds, where a missing ssm_cfg is upstream's default, which is Mamba-1."""
        if "pruning" in values:
            raise ValueError("config: got pruning, that of a pruned checkpoint, expected a whole model's; "
                             "ssd.pruning.load_language_model reads it")
        if "run" in values:
            raise ValueError("config: got run, that of a folder of `make prune`, expected one that `save_pretrained` or "
                             "`MambaLMHeadModel` wrote; `make train ARGS='--start FOLDER'` reads such folders")
        known = {f.name: f for f in fields(cls)}
        if unknown := values.keys() - known.keys():
            raise ValueError(f"config: got {', '.join(sorted(unknown))}, expected some of {', '.join(known)}")
        required = [name for name, f in known.items() if f.default is f.default_factory is MISSING]
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"config: got no {', '.join(missing)}, expected all of {', '.join(required)}")
        return cls(**{"ssm_cfg": {}, **values})

    @property
    def padded_vocab_size(self) -> int:
        multiple = self.pad_vocab_size_multiple
        return -(-self.vocab_size // multiple) * multiple

    @property
    def mixer_settings(self) -> dict[str, Any]:
        """Arguments of `Mamba2` besides d_model."""
        return {name: value for name, value in self.ssm_cfg.items() if name in _MIXER}
