"""Which operator a kernel belongs to, for the breakdown of a step (Figure 1 of the paper, see `classes`).

Rules are tried by the kernel's name first, then by the CPU operators that launched it, then by the scopes around them; what
none knows is `other`. Within each list the first rule that matches any of the names decides, so that SSM comes before GEMM
(`bmm_chunk`), convolution before GEMM (`implicit_gemm`), and embedding before the index_select inside it. By its name an
elementwise kernel of an optimizer is elementwise: the phase of a kernel says whose it is.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..kernel_names import list_ours, present_name
from .scopes import PREFIX

CLASSES = ("gemm", "ssm", "conv1d", "conv", "attention", "norm", "elementwise", "reduce", "embedding", "loss", "optimizer",
           "memcpy", "other")

_AROUND = {"conv1d": "conv1d", "gated_norm": "norm"}  # by how a name begins; all others compute the SSM


@dataclass(frozen=True)
class Rule:
    """A class, and a regular expression that is searched for in a name."""

    kind: str
    pattern: str

    @cached_property
    def _compiled(self) -> re.Pattern:
        return re.compile(self.pattern)

    def matches(self, name: str) -> bool:
        return self._compiled.search(name) is not None


def _ours(kind: str) -> Rule:
    """For this repository's kernels of a class, whose names are read from the source tree."""
    found = sorted(name for name in list_ours() if _kind_of_ours(name) == kind)
    return Rule(kind, rf"^({'|'.join(found)})$")


def _kind_of_ours(name: str) -> str:
    return next((kind for start, kind in _AROUND.items() if name.startswith(start)), "ssm")


KERNEL_RULES = (
    Rule("memcpy", r"^Mem(cpy|set) "),
    *map(_ours, ("ssm", "conv1d", "norm")),
    # mamba_ssm's Triton and CUDA kernels, and fla's for simple_gla
    Rule("ssm", r"bmm_chunk|chunk_(cumsum|state|scan)|state_passing|ddAcs|selective_(scan|state)|chunk_(fwd|bwd)_kernel_|"
                r"chunk_local_cumsum"),
    Rule("conv1d", r"causal_conv1d"),
    Rule("attention", r"flash_(fwd|bwd)|fmha|_sdpa_|flash::"),
    Rule("conv", r"implicit_gemm|ImplicitGemmConv|implicit_convolve|(fprop|dgrad|wgrad)_|_(fprop|dgrad|wgrad)|winograd|"
                 r"conv_depthwise|nchwToNhwc|nhwcToNchw"),
    Rule("gemm", r"gemm|nvjet|gemv|splitKreduce|cutlass_\d+_tensorop"),
    Rule("norm", r"(?i)(layer|batch|rms|group)_?norm|bn_(fw|bw)|GammaBeta"),
    Rule("loss", r"nll_loss|LogSoftMax"),
    Rule("embedding", r"embedding_|EmbeddingBag|compute_grad_weight"),
    Rule("optimizer", r"multi_tensor_apply|FusedAdam"),
    Rule("reduce", r"reduce_kernel|Device(Reduce|Scan|RadixSort)|tensor_kernel_scan"),
    Rule("elementwise", r"elementwise_kernel|CatArrayBatchedCopy|distribution_|fused_dropout|_scatter_gather_|triu_tril"),
)

OP_RULES = (
    Rule("embedding", r"aten::embedding|EmbeddingBackward"),
    Rule("loss", r"nll_loss|cross_entropy|log_softmax|LogSoftmax"),
    Rule("attention", r"scaled_dot_product|_(flash|efficient)_attention|ScaledDotProduct|aten::_(safe_)?softmax|Softmax"),
    Rule("conv", r"convolution|aten::_?conv|ConvolutionBackward"),
    Rule("gemm", r"aten::(addmm|mm|bmm|baddbmm|matmul|linear|mv|dot)$|(Addmm|Mm|Bmm|Baddbmm)Backward"),
    Rule("norm", r"(?i)(layer|batch|rms|group)_?norm"),
    Rule("optimizer", r"aten::_(fused|foreach)_"),
    Rule("reduce", r"aten::(sum|mean|var|std|max|min|amax|amin|argmax|argmin|any|all|norm|linalg_vector_norm|cumsum|cumprod|"
                   r"sort|topk|unique\w*|bincount|histc|prod|_?segment_reduce(_backward)?)$"),
    Rule("elementwise", r"aten::(add|sub|mul|div|neg|pow|sqrt|rsqrt|exp|log|sigmoid|silu|gelu|relu|softplus|tanh|clamp|where|"
                        r"fill|zero|copy|cat|stack|_?index\w*|gather|scatter\w*|roll|flip|arange|dropout|bernoulli|uniform|"
                        r"normal|lerp|masked_fill|threshold|native_dropout|eq|ne|lt|le|gt|ge|bitwise_\w+|"
                        r"logical_\w+)(_backward)?_?$"),
)

SCOPE_RULES = (
    Rule("optimizer", rf"^Optimizer\.step|^{PREFIX}optimizer$"),
    *(Rule(kind, rf"^{PREFIX}{kind}$") for kind in ("loss", "embedding", "attention", "norm", "ssm")),
)


def classify(name: str, ops: Iterable[str] = (), scopes: Iterable[str] = (), rules: Iterable[Rule] = KERNEL_RULES) -> str:
    """The class of a kernel.

    Args:
        ops: names of the CPU operators around its launch.
        scopes: names of the scopes around it.
        rules: those for the kernel's name.
    """
    for said, applied in (((present_name(name),), rules), (tuple(ops), OP_RULES), (tuple(scopes), SCOPE_RULES)):
        for rule in applied:
            if any(rule.matches(one) for one in said):
                return rule.kind
    return "other"
