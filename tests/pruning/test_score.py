"""Scores are their formulas, find what does nothing, and a bridge makes up for what can be made up for."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from ssd.modules import Mamba2
from ssd.pruning import KINDS, Activity, Bridge, find_blocks, prune, score_magnitude, score_random
from tests.in_torch import in_torch  # noqa: F401  a fixture
from tests.modules.test_language_model import LAYER, make_model, tokens
from tests.pruning.test_structure import SIZES, OfRows, rows, shake


def measure_scores(model, kind, *batches):
    with Activity(model, kind) as activity, torch.no_grad():
        for u in batches:
            model(u)
    return activity


def convolve(module, rows):
    """Token by token, with zeros before the first."""
    weight, width = module.conv1d.weight[:, 0], module.conv1d.weight.shape[-1]
    padded = F.pad(rows, (0, 0, width - 1, 0))
    taps = [padded[:, k : k + rows.shape[1]] * weight[:, k] for k in range(width)]
    return F.silu(sum(taps) + module.conv1d.bias)


@torch.no_grad()
def test_scores_of_mamba2():
    block, u = shake(Mamba2(**SIZES, ngroups=2)), rows()
    _, xBC, dt = block.in_proj(u).split([64, 64 + 4 * 32, 8], -1)
    x, B, C = convolve(block, xBC).split([64, 64, 64], -1)
    dt = F.softplus(dt + block.dt_bias)
    A = -block.A_log.exp()
    heads = torch.stack([(1 - (dt[..., h] * A[h]).exp()).mean() for h in range(8)])
    states, pairs = torch.empty(2, 32), torch.empty(8, 32)
    for g in range(2):
        strength = [dt[..., h] * x[..., 8 * h : 8 * h + 8].norm(dim=-1) for h in range(8)]
        for n in range(32):
            column = 32 * g + n
            read = (C[..., column] ** 2).mean()
            states[g, n] = (sum(strength[4 * g : 4 * g + 4]) ** 2 * B[..., column] ** 2).mean() * read
            for h in range(4 * g, 4 * g + 4):
                written = (strength[h] ** 2 * B[..., column] ** 2).mean()
                pairs[h, n] = written * read / (1 - (2 * dt[..., h] * A[h]).exp()).mean()
    skipped = torch.stack([((block.D[h] * x[..., 8 * h : 8 * h + 8]) ** 2).sum(-1).mean() for h in range(8)])
    # two batches of which one is half of the other weigh by their tokens
    for kind, expected, energy in (("heads", heads, pairs.sum(1) + skipped),
                                   ("states", states, torch.stack([pairs[:4].sum(0), pairs[4:].sum(0)]))):
        activity = measure_scores(block, kind, u[:1], u[1:])
        assert_close(activity.scores()[""].float(), expected, rtol=1e-4, atol=1e-12)
        assert_close(activity.scores("energy")[""].float(), energy, rtol=1e-4, atol=1e-12)


@torch.no_grad()
def test_scores_of_mamba1():
    model, u = shake(OfRows()), rows()[:1]
    block, activity = model.mixer, measure_scores(model, "states", u)
    x = convolve(block, block.in_proj(u).chunk(2, -1)[0])
    dt, B, C = block.x_proj(x).split(block.splits, -1)
    dt, A = F.softplus(block.dt_proj(dt)), -block.A_log.exp()
    pairs = torch.empty(A.shape)
    for c in range(A.shape[0]):
        for n in range(A.shape[1]):
            written = ((dt[..., c] * x[..., c] * B[..., n]) ** 2).mean()
            pairs[c, n] = written * (C[..., n] ** 2).mean() / (1 - (2 * dt[..., c] * A[c, n]).exp()).mean()
    assert_close(activity.score_pairs("mixer").float(), pairs, rtol=1e-4, atol=1e-12)
    assert_close(activity.scores()["mixer"].float(), pairs.sum(0, keepdim=True), rtol=1e-4, atol=1e-12)
    of_heads = measure_scores(model, "heads", u)
    assert_close(of_heads.scores()["mixer"].float(), pairs.sum(1), rtol=1e-4, atol=1e-12)
    energy = pairs.sum(1) + ((block.D * x) ** 2).mean((0, 1))
    assert_close(of_heads.scores("energy")["mixer"].float(), energy, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: Mamba2(**SIZES, ngroups=2), OfRows], ids=["Mamba-2", "Mamba-1"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_score_of_a_block(make, kind):
    """Random ones are the same again; of the others, what is planted as small is least."""
    model = shake(make())
    ((name, block),), random = find_blocks(model, kind).items(), score_random(model, kind, 3)
    projection = "in_proj.weight" if block.ssd or kind == "heads" else "x_proj.weight"
    block.split(block.parameter(projection).data, projection, dim=0)["B" if kind == "states" else "x"][:4] *= 1e-6
    model.get_submodule(name).conv1d.bias.data.zero_()
    activity = measure_scores(model, kind, rows())
    scores = [score_magnitude(model, kind), activity.scores("energy")]
    scores += [activity.scores()] if kind == "states" or not block.ssd else []  # (R1) looks at steps alone
    for (score,) in (s.values() for s in scores):
        least = score.flatten().argsort()[:1].item()
        assert least < 4 and score.shape == next(iter(random.values())).shape
    assert all(torch.equal(score, random[name]) for name, score in score_random(model, kind, 3).items())


def test_a_model_that_was_not_run_has_no_scores():
    with pytest.raises(ValueError, match=r"model: .* was not run"):
        Activity(Mamba2(**SIZES)).scores()
    with pytest.raises(ValueError, match="score: got 'noise', expected one of activity, energy"):
        Activity(Mamba2(**SIZES)).scores("noise")


@torch.no_grad()
def test_a_bridge_fits_what_is_linear_in_what_is_left():
    """Heads in pairs that compute the same: without one of each the other can do its work."""
    torch.manual_seed(0)
    whole, u = shake(Mamba2(**SIZES, rmsnorm=False)), torch.randn(4, 64, 32)
    block = find_blocks(whole)[""]
    for label in ("z", "x", "dt"):
        part = block.split(whole.in_proj.weight, "in_proj.weight", dim=0)[label]
        part[len(part) // 2 :] = part[: len(part) // 2]
    for parameter in (whole.conv1d.weight, whole.conv1d.bias):
        x = block.split(parameter, "conv1d.weight", dim=0)["x"]
        x[32:] = x[:32]
    for parameter in (whole.A_log, whole.dt_bias, whole.D):
        parameter[4:] = parameter[:4]
    pruned = copy.deepcopy(whole)
    prune(pruned, {"": torch.arange(8.0)}, "heads", 0.5)
    before = (pruned(u) - whole(u)).norm()
    with Bridge(whole, pruned) as bridge:
        whole(u)
    ((error, left),) = bridge.apply().values()
    assert left < 1e-3 * error and (pruned(u) - whole(u)).norm() < 0.05 * before
    assert not whole._forward_hooks and pruned.out_proj.bias is None


@torch.no_grad()
def test_a_bridge_that_does_not_help_changes_nothing():
    """Fewer tokens than features: what fits those does not fit others."""
    whole, u = shake(Mamba2(**SIZES)), torch.randn(1, 8, 32)
    pruned = copy.deepcopy(whole)
    prune(pruned, score_random(whole, "heads"), "heads", 0.25)
    before = pruned.out_proj.weight.clone()
    with Bridge(whole, pruned) as bridge:
        whole(u)
    ((error, left),) = bridge.apply().values()
    assert error == left > 0 and torch.equal(pruned.out_proj.weight, before)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_in_fp32_under_autocast(kind):
    """Else every matrix product of calibration would round to bf16."""
    whole, u = shake(Mamba2(**SIZES)), rows()
    pruned = copy.deepcopy(whole)
    prune(pruned, score_random(whole, "heads"), "heads", 0.5)
    exact = measure_scores(whole, kind, u).scores("energy")[""]
    with torch.autocast("cpu", torch.bfloat16), Activity(whole, kind) as activity, Bridge(whole, pruned) as bridge:
        whole(u)
    assert_close(activity.scores("energy")[""], exact, rtol=0.1, atol=0.0)
    assert {t.dtype for t in bridge._sums[""]} == {torch.float32} and all(left <= e for e, left in bridge.apply().values())


def test_a_bridge_without_batches_is_refused():
    whole = Mamba2(**SIZES)
    with Bridge(whole, copy.deepcopy(whole)) as bridge:
        pass
    with pytest.raises(ValueError, match="was not run, expected at least one batch within the bridge"):
        bridge.apply()


def test_a_bridge_between_the_same_blocks_is_refused():
    whole = shake(Mamba2(**SIZES))
    for make in (lambda: whole, lambda: nn.Sequential(whole)):
        with pytest.raises(ValueError, match="pruned: got blocks that whole has too, expected a pruned copy of whole, with"):
            Bridge(make(), make())


@torch.no_grad()
def test_a_bridge_leaves_a_dead_block_and_is_applied_once():
    """The fit of a block whose features are all 0 is singular."""
    torch.manual_seed(0)
    whole = nn.Sequential(shake(Mamba2(**SIZES)), shake(Mamba2(**SIZES)))
    pruned = copy.deepcopy(whole)
    prune(pruned, score_random(whole, "heads"), "heads", 0.5)
    pruned[1].norm.weight.zero_()
    before = copy.deepcopy(pruned)
    with Bridge(whole, pruned) as bridge:
        whole(torch.randn(4, 256, 32))
    (error, left), dead = bridge.apply().values()
    assert left < error and dead[0] == dead[1] and torch.equal(pruned[1].out_proj.weight, before[1].out_proj.weight)
    applied = pruned[0].out_proj.weight.clone()
    assert not torch.equal(applied, before[0].out_proj.weight)
    with pytest.raises(ValueError, match=r"whole: 0, 1 was not run, .* again after each apply"):
        bridge.apply()
    assert torch.equal(pruned[0].out_proj.weight, applied)


def test_falcon_h1_scales_what_it_projects():
    """A smaller multiplier of a block's input is the same as smaller weights that project it."""
    pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
    from tests.interop.families import available, tiny, tokens

    if not available("falcon_h1"):
        pytest.skip("this transformers has no falcon_h1")
    scaled, ids = tiny("falcon_h1").eval(), tokens(2, 19)
    same = copy.deepcopy(scaled)
    for model in (scaled, same):
        for block in find_blocks(model).values():
            block.module.ssm_in_multiplier = 0.25 if model is scaled else 1.0
            if model is same:
                block.module.in_proj.weight.data *= 0.25
    found, expected = (measure_scores(model, "states", ids).scores() for model in (scaled, same))
    for name, scores in expected.items():
        assert_close(found[name], scores, rtol=1e-4, atol=0)


@torch.no_grad()
def test_tokens_count_alike_with_a_cache_and_without():
    """In a prompt, in pieces of one, and in steps; padding would count, too, and is refused."""
    model, ids = make_model(), tokens("cpu")
    with Activity(model) as whole:
        model(ids)
    with Activity(model) as parts:
        cache = model.new_cache(2)
        model(ids[:, :9], cache=cache), model.read(ids[:, 9:15], cache=cache)
        for token in ids[:, 15:].unbind(1):
            model.step(token, cache)
    for name, expected in whole.scores("energy").items():
        assert_close(parts.scores("energy")[name], expected, rtol=1e-4, atol=0)
    with Activity(model), pytest.raises(ValueError, match="model: got a padded prompt"):
        model.generate(ids, 2, attention_mask=torch.tensor([[0] + 22 * [1], 23 * [1]]))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_bridge_of_a_language_model(kind):
    """Whose blocks are given their rates, of which a pruned one has its own."""
    whole = make_model(ssm_cfg=LAYER | {"d_state": 32})
    pruned = copy.deepcopy(whole)
    prune(pruned, score_magnitude(pruned, kind), kind, 0.5)
    given = []
    for layer in pruned.backbone.layers:
        layer.mixer.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
    with Bridge(whole, pruned) as bridge:
        whole(tokens("cpu", 64))
    assert len(given) == 2 and not any("A" in kwargs for kwargs in given)
    assert all(after <= before for before, after in bridge.apply().values())
