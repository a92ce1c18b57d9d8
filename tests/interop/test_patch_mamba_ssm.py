"""patch_mamba_ssm, on a package of mamba_ssm's layout that does nothing, and on the real one where that is installed."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import ssd
from ssd.interop import patch_mamba_ssm as patch
from ssd.modules import Mamba2LM, Mamba2LMConfig
from tests.interop.installed import require_mamba_ssm, set_aside

ROOTS = ("mamba_ssm", "megatron", "fla", "vision", "causal_conv1d", "selective_scan_cuda")
LAYOUT = dict(re.findall(r"^-- (\S+) --\n(.*?)(?=^-- |\Z)", Path(__file__).with_name("mamba_ssm.txt").read_text(), re.M | re.S))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The package, where it is found first; whatever was loaded of the real ones is put aside."""
    for path, source in LAYOUT.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    with set_aside(lambda name: name.split(".")[0] in ROOTS or name == "ssd.interop.mamba_ssm"):
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(patch, "find_spec", lambda name: None)  # a CUDA extension that is installed is not this package's
        monkeypatch.setattr(patch, "_aside", {})
        yield tmp_path


def get_names(module: str) -> dict:
    return vars(importlib.import_module(module))


OURS = patch._FUNCTIONS
SCANS = ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")
MAMBA_1 = ("selective_scan_fn", "mamba_inner_fn")
CONVS = ("causal_conv1d_fn", "causal_conv1d_update")


UPDATE_HOME = "mamba_ssm.ops.triton.selective_state_update"
HOMES = {**dict.fromkeys(SCANS, "mamba_ssm.ops.triton.ssd_combined"), "selective_state_update": UPDATE_HOME,
         **dict.fromkeys(MAMBA_1, "mamba_ssm.ops.selective_scan_interface")}
HOLDERS = {
    "mamba_ssm": MAMBA_1, "mamba_ssm.ops.selective_scan_interface": MAMBA_1, "fla.layers.mamba": MAMBA_1,
    "mamba_ssm.modules.mamba_simple": (*MAMBA_1, *CONVS, "selective_state_update"),
    "mamba_ssm.modules.mamba2": (*SCANS, *CONVS, "selective_state_update"), "mamba_ssm.modules.mamba2_simple": SCANS,
    "mamba_ssm.ops.triton.ssd_combined": SCANS, UPDATE_HOME: ("selective_state_update",),
}


def test_functions_are_replaced_wherever_they_are(files):
    """And put back; the convolutions are None without causal_conv1d. A later patch finds the same modules."""
    with ssd.patch_mamba_ssm():
        found = {holder: get_names(holder) for holder in HOLDERS}
        assert all(found[holder][name] is OURS[name] for holder, names in HOLDERS.items() for name in names)
        assert ssd.patched() == {"mamba_ssm": "auto"}
    for holder, names in HOLDERS.items():
        homes = {name: getattr(found[holder][name], "__module__", None) for name in names if found[holder][name]}
        assert homes == {name: HOMES[name] for name in names if name in HOMES}, holder
    with ssd.patch_mamba_ssm():
        assert all(get_names(holder) is found[holder] for holder in HOLDERS if holder.startswith("mamba_ssm.modules"))
        assert all(found[holder][name] is OURS[name] for holder, names in HOLDERS.items() for name in names
                   if holder.startswith("mamba_ssm.modules"))


def test_modules_that_are_not_looked_through(files):
    """As MambaVision's: what one took before the patch is upstream's, what it took under it remains ours."""
    sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    upstream = {name: get_names("vision.mixer")[name] for name in MAMBA_1}
    with ssd.patch_mamba_ssm():
        assert all(get_names("vision.mixer")[name] is upstream[name] for name in MAMBA_1)
        del sys.modules["vision.mixer"]
        mixer = get_names("vision.mixer")
    assert all(mixer[name] is OURS[name] for name in MAMBA_1)


def test_megatron_before_and_after(files):
    """Imported first it has upstream's functions, imported later ours; both end with the patch."""
    sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    upstream = {name: get_names("mamba_ssm.ops.triton.ssd_combined")[name] for name in SCANS}
    for first in (get_names("megatron.core.mixer"), None):
        with ssd.patch_mamba_ssm():
            mixer = get_names("megatron.core.mixer")
            assert first in (None, mixer) and all(mixer[name] is OURS[name] for name in SCANS)
        assert all(mixer[name] is upstream[name] for name in SCANS)
        del sys.modules["megatron.core.mixer"]


def test_the_cuda_extension_may_be_absent(files):
    with pytest.raises(ImportError, match="selective_scan_cuda"):
        importlib.import_module("mamba_ssm")
    with ssd.patch_mamba_ssm():
        assert importlib.import_module("mamba_ssm").Mamba2
        stand_in = sys.modules["selective_scan_cuda"]
        assert find_spec("selective_scan_cuda") is stand_in.__spec__
        with pytest.raises(AttributeError, match=r"selective_scan_cuda\.fwd: .* is not installed.* Mamba-1 runs without it"):
            stand_in.fwd  # noqa: B018
    assert not {"selective_scan_cuda", "mamba_ssm", "mamba_ssm.modules.mamba2"} & sys.modules.keys()
    with pytest.raises(ImportError, match="selective_scan_cuda"):
        importlib.import_module("mamba_ssm")


def test_installed_extensions_are_used(files):
    """No stand-in for Mamba-1's; the convolutions are replaced in their own package too, and put back."""
    holders = ("causal_conv1d", "mamba_ssm.modules.mamba2", "mamba_ssm.modules.mamba_simple")
    for name, source in (("selective_scan_cuda", ""), ("causal_conv1d", "".join(f"def {name}(): pass\n" for name in CONVS))):
        (files / f"{name}.py").write_text(source)
    for name in ("selective_scan_cuda", "causal_conv1d"):
        importlib.import_module(name)
    theirs = {name: get_names("causal_conv1d")[name] for name in CONVS}
    with ssd.patch_mamba_ssm():
        for module in holders:
            assert all(get_names(module)[name] is OURS[name] for name in CONVS)
        assert sys.modules["selective_scan_cuda"].__file__
    for module in holders:
        assert all(get_names(module)[name] is theirs[name] for name in CONVS)
    assert "selective_scan_cuda" in sys.modules


def test_the_peer_keeps_upstreams_function(files):
    with ssd.patch_mamba_ssm():
        assert get_names("ssd.interop.mamba_ssm")["mamba_chunk_scan_combined"].__module__ == "mamba_ssm.ops.triton.ssd_combined"


def test_no_half_patch(files):
    """A package that cannot be imported: the error says why, and nothing of it stays loaded."""
    (files / "mamba_ssm/modules/mamba2.py").write_text("from transformers import what_is_gone\n")
    before = set(sys.modules)
    with pytest.raises(ImportError, match="mamba_ssm cannot be imported: "):
        ssd.patch_mamba_ssm()
    assert not {name for name in sys.modules.keys() - before if name.split(".")[0] in ROOTS} and ssd.patched() == {}


def test_other_versions_are_refused(files):
    (files / "mamba_ssm-2.3.0.dist-info/METADATA").write_text("Name: mamba-ssm\nVersion: 1.2.2\n")
    with pytest.raises(ImportError, match=r"mamba_ssm: got version 1\.2\.2.*expected 2\.2 to 2\.3"):
        ssd.patch_mamba_ssm()
    assert "mamba_ssm" not in sys.modules and ssd.patched() == {}


@pytest.fixture
def real():
    """The patch on mamba_ssm as installed."""
    require_mamba_ssm()
    with ssd.patch_mamba_ssm() as patched:
        yield patched


@contextmanager
def definitions(monkeypatch) -> Iterator[None]:
    """Mamba-1's blocks run mamba_ssm's own definitions in torch, around a convolution of this file's."""
    interface = get_names("mamba_ssm.ops.selective_scan_interface")
    with monkeypatch.context() as patched:
        patched.setitem(interface, "causal_conv1d_fn", convolution)
        patched.setitem(interface, "selective_scan_fn", interface["selective_scan_ref"])
        patched.setitem(get_names("mamba_ssm.modules.mamba_simple"), "mamba_inner_fn", interface["mamba_inner_ref"])
        yield


def convolution(x, weight, bias, activation):
    taps = F.pad(x, (weight.shape[1] - 1, 0)).unfold(2, weight.shape[1], 1)
    return F.silu((taps * weight[:, None]).sum(-1) + bias[:, None])


def gradients(module: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.gpu
def test_mamba2_with_the_patch_and_without():
    """Loss and gradients in bf16: of one function of ours, and of upstream's own scan and norm around torch's convolution."""
    require_mamba_ssm()
    u = torch.randn(2, 1000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> dict[str, torch.Tensor]:
        loss = block(u).float().square().mean()
        return {"loss": loss.detach(), "u": torch.autograd.grad(loss, u, retain_graph=True)[0], **gradients(block, loss)}

    with ssd.patch_mamba_ssm():
        from mamba_ssm import Mamba2

        block = Mamba2(512, d_state=128, headdim=64, device="cuda", dtype=torch.bfloat16)
        ours = step()
    block.use_mem_eff_path = False  # that one needs causal_conv1d
    for name, expected in step().items():
        assert (ours[name] - expected).norm() <= 2e-2 * expected.norm(), name


def test_mamba_of_the_installed_mamba_ssm(real, device, monkeypatch):
    from mamba_ssm import Mamba

    block = Mamba(4, d_state=4, dt_rank=2, bias=True, device=device)
    u = torch.randn(2, 11, 4, device=device, requires_grad=True)
    out = block(u)
    with definitions(monkeypatch):
        expected = block(u)
    assert_close(out, expected, rtol=1e-4, atol=1e-6)
    way = torch.randn_like(out)
    assert_close(torch.autograd.grad(out, u, way, retain_graph=True), torch.autograd.grad(expected, u, way, retain_graph=True),
                 rtol=1e-4, atol=1e-6)
    assert_close(gradients(block, (out * way).sum()), gradients(block, (expected * way).sum()), rtol=1e-4, atol=1e-5)
    block.use_fast_path = False
    assert_close(block(u), expected, rtol=1e-4, atol=1e-6)


def test_generation_of_the_installed_mamba_ssm(real, device, monkeypatch):
    """Its own loop gives the tokens of our model with its weights; its norms, and its clock, which nobody reads, need a GPU."""
    from mamba_ssm import MambaLMHeadModel
    from mamba_ssm.models.config_mamba import MambaConfig

    gpu = device == "cuda"
    if not gpu:
        monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: None)
    layer = {"layer": "Mamba2", "d_state": 16, "headdim": 8, "chunk_size": 16, "ngroups": 2, "rmsnorm": gpu}
    fields = {"d_model": 32, "n_layer": 2, "vocab_size": 61, "ssm_cfg": layer, "rms_norm": gpu, "fused_add_norm": gpu}
    theirs = MambaLMHeadModel(MambaConfig(**fields), device=device)
    for parameter in theirs.parameters():  # large enough for the likeliest token to stand out
        parameter.data += 0.1 * torch.randn_like(parameter)
    ours = Mamba2LM(Mamba2LMConfig(**fields), device=device)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(61, (2, 19), device=device)
    expected = theirs.generate(ids, max_length=25, vocab_size=61)
    assert torch.equal(ours.generate(ids, 6), expected)
    cache = ours.new_cache(2)
    with torch.no_grad():
        ours(ids[:, :7], cache=cache)
    assert torch.equal(ours.generate(ids[:, 7:], 6, cache=cache), expected[:, 7:])
