"""A language model of Mamba-2 blocks: embedding, blocks before which the residual stream is normed, norm, head.

Parameters have the names and shapes of mamba_ssm's `MambaLMHeadModel`, so that checkpoints of state-spaces load by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import repeat
from os import PathLike

import torch
from torch import Tensor, nn

from ..api import check_flags
from ..block.arguments import check_floating, check_size
from ..block.kernels.residual_norm import Unscaled
from ..runtime import value_checks
from ..types import Options
from . import captured, checkpoint, decoding
from .captured import Mamba2LMCache
from .deferred_norm import find_scan, mix_deferring_norm
from .language_config import Mamba2LMConfig
from .mamba2 import Mamba2, Mamba2Cache
from .sampling import Sampling
from .token_step import add_and_norm, can_finish, compute_rates, has_hooks, is_seen, step_layers

_EMBEDDING, _HEAD = "backbone.embedding.weight", "lm_head.weight"


class Mamba2LM(nn.Module):
    """Token ids to the logits of the next.

    Args:
        config: sizes and switches.
        device, dtype: of the weights, but for each block's D, which is fp32, as in `Mamba2`.
        variant, options: see `ssd.ssd_chunk_scan`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """

    def __init__(self, config: Mamba2LMConfig, device=None, dtype: torch.dtype | None = None, variant: str = "auto",
                 options: Options | None = None):
        super().__init__()
        if not isinstance(config, Mamba2LMConfig):
            raise TypeError(f"config: got {type(config).__name__}, expected Mamba2LMConfig, as its from_dict makes")
        if dtype is not None:
            check_floating("dtype", dtype)
        made = {"device": device, "dtype": dtype}
        self.config = config
        self.backbone = _Backbone(config, variant=variant, options=options, **made)
        self.lm_head = nn.Linear(config.d_model, config.padded_vocab_size, bias=False, **made)
        if config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def forward(self, input_ids: Tensor, seq_idx: Tensor | None = None, cache: Sequence[Mamba2Cache] | None = None) -> Tensor:
        """Args:
            input_ids: (batch, seqlen) int32 or int64, seqlen >= 1.
            seq_idx: (batch, seqlen), the document of each token; not with a cache.
            cache: the tokens before, of `new_cache`; those of input_ids are added to it. Not for training.

        Returns:
            (batch, seqlen, config.padded_vocab_size), in the dtype of the weights.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is accepted, before a cache is touched. What does not
                fit a block's weights, such as a device or dtype, is found when its turn comes.
        """
        return self.lm_head(self.backbone(input_ids, seq_idx, cache))

    def step(self, input_ids: Tensor, cache: Sequence[Mamba2Cache]) -> Tensor:
        """The next token of each sequence, (batch,), to (batch, config.padded_vocab_size); for inference. Raises as `forward`.
        """
        return self.lm_head(self.backbone.step(input_ids, cache))

    def read(self, input_ids: Tensor, mask: Tensor | None = None, cache: Sequence[Mamba2Cache] | None = None) -> Tensor:
        """A prompt, (batch, seqlen), to the logits after its last token, (batch, config.padded_vocab_size); for inference.

        mask: of `Mamba2.prefill`, with a cache that has had no token. Otherwise as `forward`, and raises as it.
        """
        return self.lm_head(self.backbone.read(input_ids, mask, cache))

    def read_part(self, part: range, given: tuple[Tensor, ...], cache: Sequence[Mamba2Cache]) -> tuple[Tensor, ...] | Tensor:
        """Some layers of `read`, by their numbers: what it gives where the last is among them, and else what the next part is
        given: the stream, what is added to it, which may be `Unscaled`, and the mask. given: input_ids and the mask, if there
        is one, or what the part before gave.
        """
        after = self.backbone.read_part(part, given, cache, is_seen(self.backbone))
        return self.lm_head(after) if isinstance(after, Tensor) else after

    def list_parts(self) -> list[range]:
        """Layers for `read_part`, in order; all in one part where somebody's own `read` is in place."""
        count = len(self.backbone.layers)
        replaced = type(self).read is not Mamba2LM.read or "read" in {*vars(self), *vars(self.backbone)}
        return [range(count)] if replaced else captured.split_layers(count)

    def generate(self, input_ids: Tensor, max_new_tokens: int, cache: Sequence[Mamba2Cache] | None = None,
                 eos_token_id: int | Sequence[int] | None = None, attention_mask: Tensor | None = None,
                 temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
                 generator: torch.Generator | None = None, graph: bool | None = None) -> Tensor:
        """The tokens of `stream`, which has these arguments too, all at once.

        Returns:
            (batch, seqlen + new), input_ids and what follows, new <= max_new_tokens, of ids below config.vocab_size.
        """
        return torch.cat([input_ids, *(token[:, None] for token in self.stream(
            input_ids, max_new_tokens, cache, eos_token_id, attention_mask, temperature, top_k, top_p, generator, graph))], 1)

    def stream(self, input_ids: Tensor, max_new_tokens: int, cache: Sequence[Mamba2Cache] | None = None,
               eos_token_id: int | Sequence[int] | None = None, attention_mask: Tensor | None = None,
               temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None,
               generator: torch.Generator | None = None, graph: bool | None = None) -> Iterator[Tensor]:
        """One token after another of each sequence, the likeliest or drawn: the prompt through the SSD's kernels, then step
        by step. Nothing waits for the GPU, but what captures, reads attention_mask, or looks for eos_token_id at each token.

        Args:
            input_ids: (batch, seqlen) int32 or int64, seqlen >= 1.
            max_new_tokens: at least 1.
            cache: the tokens before input_ids, so that a prompt may come in pieces, of which only the last is given here.
                Afterwards it has all tokens but the last. One of `new_cache` also keeps graphs for the next call. It serves one
                stream at a time.
            eos_token_id: ends a sequence, and fills it up until all have ended. Several: each ends it, the first fills it up.
            attention_mask: (batch, seqlen), 1 or True at tokens, 0 or False at padding, which is to the left or the right of a
                row's tokens and holds any ids. A row goes on as it would alone. Not with a cache that has had tokens.
            temperature, top_k, top_p, generator: see `Sampling`; the likeliest token unless there is a temperature.
            graph: whether steps are replayed as a CUDA graph. Unless given, on a GPU where they can be, for more than a few
                tokens. With a cache of `new_cache` that is given here again, so are prompts, unless they are long: the first of
                a shape is launched, the second captured. False: each launch by itself. The tokens are the same, but for
                rounding where prompts are padded. Weights, modules and their settings must stay as they are until the stream
                has ended.

        Yields:
            (batch,) ids below config.vocab_size, at most max_new_tokens times. If changed in place, the next step takes that.

        Raises:
            TypeError, ValueError: at once, naming the argument, what came and what is accepted; or why there is no graph.
            RuntimeError: something cannot be captured for a reason that only shows in capturing it.
        """
        check_size("max_new_tokens", max_new_tokens)
        _check_ids(input_ids, "(batch, seqlen)")
        sampling = Sampling(temperature, top_k, top_p, generator)
        sampling.check_device(input_ids.device)
        stops = decoding.list_stops(eos_token_id, self.config.vocab_size)
        decoding.check_graph(self, input_ids.device, graph)
        reads = decoding.captures_prompt(self, input_ids, cache, graph)
        if cache is None:
            cache = self.new_cache(len(input_ids))
        self.backbone.check_cache(cache, len(input_ids))
        width = input_ids.shape[1]
        few = reads and attention_mask is not None and not decoding.explain_model(self, input_ids.device)
        input_ids, mask = decoding.align_right(input_ids, attention_mask, few)
        self.backbone.check_vocabulary(input_ids)
        if (mask is not None or input_ids.shape[1] < width) and cache[0].conv_state.any():
            raise ValueError("attention_mask: got padding with a cache that has had tokens, expected a new cache, or one after "
                             "reset()")
        return decoding.decode(self, input_ids, mask, max_new_tokens, cache, stops, sampling, graph, reads)

    def new_cache(self, batch: int, dtype: torch.dtype | None = None, state_dtype: torch.dtype = torch.float32,
                  pad_prompts: bool = False) -> Mamba2LMCache:
        """Of sequences that have had no token, for each block; dtypes and errors as in `Mamba2.new_cache`.

        pad_prompts: `generate` pads short prompts to powers of two, so that a few graphs serve prompts of all lengths: for
            servers, whose prompts seldom have the length of one before. The tokens are the same, but for rounding. After
            a write to states through `.data` or numpy call the cache's `mark_used`, or they count as zeros.
        """
        check_flags({"pad_prompts": pad_prompts})
        cache = Mamba2LMCache([layer.mixer.new_cache(batch, dtype, state_dtype) for layer in self.backbone.layers])
        cache.pad_prompts = pad_prompts
        cache.mark_new()
        return cache

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str], dtype: torch.dtype | None = None, device=None,
                        variant: str = "auto") -> Mamba2LM:
        """The model of a local folder, whole or not at all; no code of the folder's is run.

        Args:
            folder: with config.json and model.safetensors, or its shards and their index, or pytorch_model.bin. Where the
                embedding is tied, lm_head.weight may be left out.
            dtype: as in `Mamba2LM`; unless given, each weight keeps that of its file.
            device: of the weights; the CPU unless given.
            variant: see `ssd.ssd_chunk_scan`.

        Raises:
            FileNotFoundError: the folder, its config.json or its weights are missing.
            TypeError, ValueError: an argument, a field of the config, a weight or a file that is not as it should be, by name.
            ImportError: safetensors is needed and not installed.
        """
        if dtype is not None:
            check_floating("dtype", dtype)
        folder, device = checkpoint.take_folder(folder), "cpu" if device is None else device
        _check_device(device)
        config = Mamba2LMConfig.from_dict(checkpoint.read_config(folder))
        model = cls(config, device="meta", dtype=dtype, variant=variant)
        weights = checkpoint.read_weights(folder)
        parameters = dict(model.named_parameters())  # a tied head is not among them
        if config.tie_embeddings and _HEAD in weights:
            _check_tied(weights.pop(_HEAD), weights.get(_EMBEDDING))
        _check_weights(weights, parameters)
        for name, made in parameters.items():
            weight = weights.pop(name)
            parameters[name] = nn.Parameter(weight.to(device, made.dtype if dtype else weight.dtype))
            vars(parameters[name]).update(vars(made))  # marks such as `_no_weight_decay`
        model.load_state_dict({_HEAD: parameters[_EMBEDDING], **parameters}, assign=True)
        return model

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Writes config.json and model.safetensors, which `from_pretrained` reads; a tied head is left out.

        Both files are replaced when both new ones are whole; after an error they are as they were.

        Raises:
            TypeError, FileExistsError, IsADirectoryError: folder is no path, or that of a file; one of the files is a folder.
            ValueError: folder is empty; a weight has no numbers; or the weights are not those of the config, or not of its
                sizes, as of a pruned model, which `ssd.pruning.save` writes.
        """
        folder = checkpoint.take_folder(folder)
        weights = {name: parameter.detach().contiguous() for name, parameter in self.named_parameters()}
        expected = dict(Mamba2LM(self.config, device="meta").named_parameters())
        if differing := weights.keys() ^ expected.keys():  # as where a head was tied, or a module added, by hand
            raise ValueError(f"model: disagrees with its config about {checkpoint.list_few({*differing})}")
        for name, weight in weights.items():
            if weight.shape != expected[name].shape:
                raise ValueError(f"{name}: got {tuple(weight.shape)}, expected {tuple(expected[name].shape)} by the model's "
                                 "config; ssd.pruning.save writes a pruned model")
        checkpoint.write(folder, asdict(self.config), weights)


class _Backbone(nn.Module):
    """Token ids (batch, seqlen) to normalised channels (batch, seqlen, d_model)."""

    def __init__(self, config: Mamba2LMConfig, device, dtype, **how):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.residual_in_fp32 = config.residual_in_fp32
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model, **made)
        self.layers = nn.ModuleList(_Layer(config, index, **made, **how) for index in range(config.n_layer))
        self.norm_f = _norm(config, **made)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, seq_idx: Tensor | None = None, cache: Sequence[Mamba2Cache] | None = None,
                mask: Tensor | None = None) -> Tensor:
        """mask: of `Mamba2.prefill`, with a cache that has had no token."""
        seen, residual = is_seen(self), self._begin_stream(input_ids, cache)
        residual, added = self._run(self.layers, residual, None, seq_idx, cache, mask, compute_rates(self.layers), seen)
        return add_and_norm(self.norm_f, residual, added, seen)[1]

    def read(self, input_ids: Tensor, mask: Tensor | None, cache: Sequence[Mamba2Cache] | None) -> Tensor:
        """As `forward`, of the last token, (batch, d_model); for inference."""
        if cache is None or is_seen(self):
            return self(input_ids, cache=cache, mask=mask)[:, -1]
        given = (input_ids,) if mask is None else (input_ids, mask)
        return self.read_part(range(len(self.layers)), given, cache, seen=False)

    def read_part(self, part: range, given: tuple[Tensor, ...], cache: Sequence[Mamba2Cache],
                  seen: bool) -> tuple[Tensor, ...] | Tensor:
        """`Mamba2LM.read_part` without the head. Without a mask only the last token's output of the last layer is computed.
        seen: of `is_seen`.
        """
        layers = [*self.layers][part.start : part.stop]
        if part.start:
            residual, added, *rest = given
        else:
            input_ids, *rest = given
            residual, added = self._begin_stream(input_ids, cache), None
        mask, rates, caches = rest[0] if rest else None, compute_rates(layers), [*cache][part.start : part.stop]
        ends = part.stop == len(cache)
        finishes = ends and mask is None and not seen and can_finish(layers[-1].mixer)
        residual, added = self._run(layers[:-1] if finishes else layers, residual, added, None, caches, mask, rates, seen)
        if not ends:
            return residual, added, *rest
        if finishes:
            residual, normed = add_and_norm(layers[-1].norm, residual, added, seen)
            residual, added = residual[:, -1].contiguous(), layers[-1].mixer.finish(normed, caches[-1], rates[-1])
        normed = add_and_norm(self.norm_f, residual, added, seen)[1]
        return normed if finishes else normed[:, -1]

    def _begin_stream(self, input_ids: Tensor, cache: Sequence[Mamba2Cache] | None) -> Tensor:
        """The residual stream before the first layer, of tokens and a cache that are checked."""
        _check_ids(input_ids, "(batch, seqlen)")
        if cache is not None:
            self.check_cache(cache, len(input_ids))
        return self._embed(input_ids)

    def _run(self, layers: Iterable[_Layer], residual: Tensor, added: Tensor | Unscaled | None, seq_idx: Tensor | None,
             cache: Sequence[Mamba2Cache] | None, mask: Tensor | None, rates: Sequence[Tensor | None],
             seen: bool) -> tuple[Tensor, Tensor | Unscaled | None]:
        """The residual stream after these layers, and what the last of them adds to it. residual, added: the same before them,
        None for nothing to add; rates, seen: of `compute_rates` and `is_seen`.
        """
        caches = repeat(None) if cache is None else cache
        may_defer = cache is not None and seq_idx is None and mask is None and not seen
        for layer, its_cache, A in zip(layers, caches, rates, strict=False):
            residual, normed = add_and_norm(layer.norm, residual, added, seen)
            given = {name: t for name, t in (("A", A), ("mask", mask)) if t is not None}
            if may_defer and (scan := find_scan(layer, residual, its_cache)):
                added = mix_deferring_norm(layer.mixer, scan, normed, its_cache, A)
            else:
                added = layer.mixer(normed, seq_idx, its_cache, **given)
        return residual, added

    def step(self, input_ids: Tensor, cache: Sequence[Mamba2Cache]) -> Tensor:
        """One token of each sequence, (batch,) to (batch, d_model)."""
        _check_ids(input_ids, "(batch,)")
        if has_hooks(self):
            return self(input_ids[:, None], cache=cache)[:, 0]
        self.check_cache(cache, len(input_ids))
        return step_layers(self.layers, self.norm_f, self._embed(input_ids), cache, is_seen(self))

    def check_vocabulary(self, input_ids: Tensor) -> None:
        """Raises:
            ValueError: a token beyond the vocabulary. Not looked for on a GPU, since reading its tokens waits for it.
        """
        if (input_ids.device.type == "cpu" or value_checks.ENABLED) and not torch.compiler.is_compiling():
            low, high = (int(end) for end in input_ids.aminmax())
            size = getattr(self.embedding, "num_embeddings", None) or len(self.embedding.weight)  # that of an adapter
            if low < 0 or high >= size:
                raise ValueError(f"input_ids: got {low if low < 0 else high}, expected tokens from 0 to {size - 1}")

    def _embed(self, input_ids: Tensor) -> Tensor:
        self.check_vocabulary(input_ids)
        embedded = self.embedding(input_ids)
        return embedded.float() if self.residual_in_fp32 else embedded

    def check_cache(self, cache: Sequence[Mamba2Cache], batch: int) -> None:
        """Raises:
            TypeError, ValueError: it is none, or that of other layers or another number of sequences. Devices are looked at
                in each block, since blocks may be on several.
        """
        if not isinstance(cache, Sequence):
            raise TypeError(f"cache: got {type(cache).__name__}, expected a Mamba2Cache for each of {len(self.layers)} layers, "
                            "in a sequence, as model.new_cache makes it")
        if len(cache) != len(self.layers):
            raise ValueError(f"cache: got that of {len(cache)} layers, expected one for each of {len(self.layers)}")
        for layer, its_cache in zip(self.layers, cache, strict=True):
            layer.mixer.check_cache(its_cache, batch, "that of input_ids")
        if len({id(its_cache.ssm_state) for its_cache in cache}) < len(cache):
            raise ValueError("cache: got one Mamba2Cache for several layers, expected one for each")


class _Layer(nn.Module):
    """A block and the norm before it, under the names that checkpoints have."""

    def __init__(self, config: Mamba2LMConfig, index: int, device, dtype, **how):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.norm = _norm(config, **made)
        self.mixer = Mamba2(config.d_model, layer_idx=index, **config.mixer_settings, **made, **how)
        with torch.no_grad():
            self.mixer.out_proj.weight /= config.n_layer**0.5  # the sum of all blocks starts as large as one of them
            for projection in (self.mixer.in_proj, self.mixer.out_proj):
                if projection.bias is not None:
                    projection.bias.zero_()


def _norm(config: Mamba2LMConfig, device, dtype) -> nn.RMSNorm | nn.LayerNorm:
    return (nn.RMSNorm if config.rms_norm else nn.LayerNorm)(config.d_model, eps=1e-5, device=device, dtype=dtype)


def _check_ids(input_ids: Tensor, shape: str) -> None:
    """shape: "(batch, seqlen)" or "(batch,)"."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids: got {type(input_ids).__name__}, expected a tensor {shape}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids: got {input_ids.dtype}, expected torch.int32 or torch.int64")
    if input_ids.dim() != (2 if "seqlen" in shape else 1) or 0 in input_ids.shape:
        raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}, expected {shape}, each at least 1")


def _check_device(device: object) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch has one for each way to have no such device
        reason = str(error).partition("\n")[0]
        raise (TypeError if isinstance(error, TypeError) else ValueError)(
            f"device: got {device!r}, expected one that torch has here: {reason}") from error


def _check_tied(head: Tensor, embedding: Tensor | None) -> None:
    if embedding is not None and (head.dtype != embedding.dtype or not torch.equal(head, embedding)):
        raise ValueError(f"{_HEAD}: got other numbers than {_EMBEDDING} has, expected the same with tie_embeddings")


def _check_weights(weights: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> None:
    """Refuses weights of other names, shapes or dtypes than a model's."""
    if missing := parameters.keys() - weights.keys():
        raise ValueError(f"weights: got none for {checkpoint.list_few(missing)}, expected all of the model's {len(parameters)}")
    if unexpected := weights.keys() - parameters.keys():
        raise ValueError(f"weights: got {checkpoint.list_few(unexpected)}, expected only those of the model")
    for name, parameter in parameters.items():
        weight = weights[name]
        if weight.shape != parameter.shape:
            raise ValueError(f"{name}: got shape {tuple(weight.shape)}, expected {tuple(parameter.shape)} by the config")
    checkpoint.check_dtypes(weights)
