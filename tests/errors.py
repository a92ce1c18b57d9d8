"""How far a result may be from the truth.

For a result, its fp64 truth and the mirror (variant `torch`: the same roundings, in torch), both as RMS and as maximum,

    error(result) <= 2 error(mirror) + one rounding,   and   RMS <= 1e-2,

where an error is relative to the truth as a whole: |v - truth| / |truth| with the Euclidean norm for RMS and the
largest magnitude for the maximum. One rounding to a dtype of spacing eps moves a value by eps / 4 of itself in RMS and
at most by eps / 2. fp32 counts as _FP32_ROUNDINGS of them: an fp32 kernel may differ from torch in the order of its
sums, in exp2 and softplus by a few ulps each, and multiplies in three TF32 products, whose remainder is about 2 ulps.

Every decay factor is the exponential of a difference of fp32 cumulative sums, which is known to one rounding of the larger;
so where decay is strong, fp32 results may be off by one rounding of the largest cumulative sum more.

dA, dD and ddt_bias are a few sums over all tokens. The mirror's error there is a single draw, which luck can leave near
zero; so the one rounding is at least that of x, which every summand has, and in fp32 sqrt(tokens) times as much.

One wrong head hides among many right ones, so every head and group h is also judged by itself, by the rule of the fuzz
(experiments/fuzz/judge.py), with |.| the Euclidean norm of the result's error e, the mirror's m and the truth t:

    |e_h| <= 3 |m_h| + 4 one |t_h| + 1.5 / sqrt(heads) (|m| + one |t|).
"""

from itertools import pairwise

import torch
from torch import Tensor

from experiments.accuracy import Error
from experiments.fuzz.operator import largest_exponent
from ssd import reference
from ssd.reference_stages import Precision
from ssd.registry import Variant, adapt_to_documents, get_variant
from ssd.types import Options, SSDGrads, SSDInputs, SSDSaved
from tests.inputs import generator, split

_CAP = 1e-2
_FP32_ROUNDINGS = 16
_SUMS = ("dA", "dD", "ddt_bias")
_HEADS = {"final_states": 1, "varlen_states": 1, "dinitial_states": 1} | dict.fromkeys(
    ("out", "dx", "dz", "ddt", "dB", "dC"), 2)  # the axis of heads or groups
_NOTHING = 1e-30  # a truth below this is zero to every dtype here, as decay makes it, and an error counts as absolute


error = Error.of  # of a value, by its truth


def rounding(dtype: torch.dtype, tokens: int = 1) -> Error:
    """What one more rounding to dtype may add, to a value or to a sum over tokens."""
    eps = torch.finfo(dtype).eps * (_FP32_ROUNDINGS * tokens**0.5 if dtype == torch.float32 else 1)
    return Error(eps / 4, eps / 2)


def assert_accurate(name: str, value: Tensor, truth: Tensor, mirror: Tensor, inputs: SSDInputs) -> None:
    """The rule above. A value that is not finite fails."""
    assert value.shape == truth.shape, f"{name}: shape {tuple(value.shape)}, expected {tuple(truth.shape)}"
    bad = value.numel() - int(value.isfinite().sum())
    assert not bad, f"{name}: {bad} of {value.numel()} elements are not finite"
    got, allowed = error(value, truth), error(mirror, truth)
    one, decay = rounding(value.dtype), largest_exponent(inputs) * torch.finfo(torch.float32).eps
    if name in _SUMS:
        one = max(one, rounding(inputs.x.dtype, inputs.batch * inputs.seqlen))
    for kind, share in (("rms", 4), ("max", 2)):
        off, bound = getattr(got, kind), 2 * getattr(allowed, kind) + getattr(one, kind) + decay / share
        assert off <= bound, f"{name}: {kind} error {off:.3g}, bound {bound:.3g}, mirror {allowed}"
    assert got.rms <= _CAP, f"{name}: RMS error {got.rms:.3g}, bound {_CAP}"
    if name in _HEADS:
        operand = rounding(inputs.x.dtype).rms * (1 + 8 * value.numel() ** -0.5)  # of few elements luck decides
        _assert_each_head_accurate(name, value, truth, mirror, max(one.rms, operand) + decay / 4)


def _assert_each_head_accurate(name: str, value: Tensor, truth: Tensor, mirror: Tensor, one: float) -> None:
    off, allowed, size = (torch.linalg.vector_norm(t.movedim(_HEADS[name], 0).flatten(1), dim=1)
                          for t in (value.double() - truth, mirror.double() - truth, truth.double()))
    spread = 1.5 * len(off) ** -0.5 * (allowed.norm() + one * size.norm())
    bound = (3 * allowed + 4 * one * size + spread).clamp(min=_NOTHING)
    h = int((off / bound).argmax())
    assert off[h] <= bound[h], f"{name}, head {h}: error {off[h]:.3g}, bound {bound[h]:.3g}, truth {size[h]:.3g}"


def assert_near(name: str, value: Tensor, truth: Tensor, mirror: Tensor, tokens: int = 1) -> None:
    """The rule for a result that no decay enters, which also has the mirror's dtype. tokens: see `rounding`."""
    assert value.shape == truth.shape and value.dtype == mirror.dtype and value.isfinite().all(), name
    off, allowed, one = error(value, truth), error(mirror, truth), rounding(value.dtype, tokens)
    bound = Error(min(2 * allowed.rms + one.rms, _CAP), 2 * allowed.max + one.max)
    assert off.rms <= bound.rms and off.max <= bound.max, f"{name}: {off}, {bound=}"


def results(variant: Variant | str, inputs: SSDInputs, dout: Tensor, dfinal_states: Tensor | None,
            options: Options | None = None) -> dict[str, Tensor]:
    """Every output and every gradient of a variant, by name."""
    variant = get_variant(variant) if isinstance(variant, str) else variant
    outputs, saved = _forward(variant, inputs, options or Options(), True)
    variant = adapt_to_documents(variant, inputs)
    return outputs | _present(vars(variant.backward(saved, dout, dfinal_states, SSDGrads())))


def truths(inputs: SSDInputs, dout: Tensor, dfinal_states: Tensor | None) -> dict[str, Tensor]:
    """The same in fp64."""
    return _forward_truths(inputs) | _present(vars(reference.compute_grads_in_fp64(inputs, dout, dfinal_states)))


def truths_apart(inputs: SSDInputs, ends: list[int], dout: Tensor, dfinal_states: Tensor) -> dict[str, Tensor]:
    """The same of a row whose documents lie between these tokens, 0 and seqlen among them. Each is run by itself, so that the
    truth knows no documents.
    """
    apart = []
    for start, end in pairwise(ends):
        dfinal = dfinal_states if end == inputs.seqlen else torch.zeros_like(dfinal_states)
        apart.append(truths(split(inputs, start, end), dout[:, start:end], dfinal))
    truth = {}
    for result in apart[0]:
        parts = [part[result] for part in apart]
        by_token = parts[0].dim() > 2 and result != "final_states"
        truth[result] = torch.cat(parts, 1) if by_token else sum(parts)
    truth["final_states"] = apart[-1]["final_states"]
    if inputs.cu_seqlens is not None:
        truth["varlen_states"] = torch.cat([part["final_states"] for part in apart])
    return truth


def cotangents(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """dout and dfinal_states: noise, plus what a loss that pulls both to zero would send.

    Without the second part the sums over all tokens (dA, ddt_bias) nearly cancel, and their relative error says little.
    """
    rng = generator(str(inputs.x.device), "cotangents", tuple(inputs.x.shape))

    def of(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=rng, device=t.device)
        return noise + t / t.square().mean().sqrt().clamp(min=_NOTHING)

    out, final_states = reference.compute_in_fp64(inputs)
    return of(out).to(inputs.x.dtype), of(final_states).float()


def one_cotangent(inputs: SSDInputs, name: str) -> tuple[Tensor, Tensor | None]:
    """The one of that name alone: no gradient came for the other output."""
    dout, dfinal_states = cotangents(inputs)
    return (dout, None) if name == "dout" else (torch.zeros_like(dout), dfinal_states)


def assert_all_accurate(got: dict[str, Tensor], truth: dict[str, Tensor], inputs: SSDInputs, *ways: Tensor | None) -> None:
    """Every one of the truths has a result near it, and nothing else has come. `ways`: dout, dfinal_states."""
    _assert_each_accurate(got, truth, results("torch", inputs, *ways), inputs)


def assert_right(variant: Variant | str, inputs: SSDInputs, *ways: Tensor | None, options: Options | None = None) -> None:
    """Outputs and gradients of a variant are near enough to the truth. `ways`: as above, if not `cotangents`."""
    ways = ways or cotangents(inputs)
    assert_all_accurate(results(variant, inputs, *ways, options), truths(inputs, *ways), inputs, *ways)


def assert_apart(variant: Variant | str, inputs: SSDInputs, ends: list[int], options: Options | None = None) -> None:
    """Documents of a row that lie between these tokens, 0 and seqlen among them, are as right as if run by themselves."""
    ways = cotangents(inputs)
    assert_all_accurate(results(variant, inputs, *ways, options), truths_apart(inputs, ends, *ways), inputs, *ways)


def assert_forward_right(variant: Variant, inputs: SSDInputs, options: Options) -> dict[str, Tensor]:
    """Outputs of a variant with some optimisations switched off are near enough to the truth. Returns them by name."""
    (got, _), (mirror, _) = (_forward(v, inputs, o, False) for v, o in ((variant, options), (get_variant("torch"), Options())))
    _assert_each_accurate(got, _forward_truths(inputs), mirror, inputs)
    return got


def assert_lands(variant: Variant, inputs: SSDInputs, places: dict[str, Tensor], options: Options | None = None) -> None:
    """The backward writes these gradients where it is asked to: the same bits as into fresh memory."""
    ways = cotangents(inputs)
    alone = results(variant, inputs, *ways, options)
    saved = _forward(variant, inputs, options or Options(), True)[1]
    grads = variant.backward(saved, *ways, SSDGrads(**places))
    for name, place in places.items():
        assert torch.equal(place, alone[name]) and torch.equal(getattr(grads, name), place), name


def _assert_each_accurate(got: dict[str, Tensor], truth: dict[str, Tensor], mirror: dict[str, Tensor],
                          inputs: SSDInputs) -> None:
    assert got.keys() == truth.keys() == mirror.keys()
    for name, value in got.items():
        assert_accurate(name, value, truth[name], mirror[name], inputs)


def _forward(variant: Variant, inputs: SSDInputs, options: Options, save: bool) -> tuple[dict[str, Tensor], SSDSaved]:
    out, final_states, saved = adapt_to_documents(variant, inputs).forward(inputs, options, save)
    return _present({"out": out, "final_states": final_states, "varlen_states": saved.varlen_states}), saved


def _forward_truths(inputs: SSDInputs) -> dict[str, Tensor]:
    out, final_states = reference.compute_in_fp64(inputs)
    ends = None
    if inputs.cu_seqlens is not None and not inputs.has_document_states:
        ends = reference.varlen_states(inputs, Precision(torch.float64))
    return _present({"out": out, "final_states": final_states, "varlen_states": ends})


def _present(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if t is not None}
