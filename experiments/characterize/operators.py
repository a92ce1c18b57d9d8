"""Which operator a kernel belongs to, for the breakdown of a step (Figure 1 of the paper, see `classes`).

Rules are tried by the kernel's name first, then by the CPU operators that launched it, then by the scopes around them; what
none knows is `other`. Within each list the first rule that matches any of the names decides, so that SSM comes before GEMM
(`bmm_chunk`), convolution before GEMM (`implicit_gemm`), and embedding before the index_select inside it. By its name an
elementwise kernel of an optimizer is elementwise: `Trace.by_scope` has what each phase takes in all.
"""

from __future__ import annotations

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
    """A class, a regular expression that is searched for in a name, and names that it is for, some shortened at `...`."""

    kind: str
    pattern: str
    examples: tuple[str, ...]

    @cached_property
    def _compiled(self) -> re.Pattern:
        return re.compile(self.pattern)

    def matches(self, name: str) -> bool:
        return self._compiled.search(name) is not None


def _ours(kind: str) -> Rule:
    """For this repository's kernels of a class, whose names are read from the source tree."""
    found = sorted(name for name in list_ours() if _kind_of_ours(name) == kind)
    return Rule(kind, rf"^({'|'.join(found)})$", tuple(found))


def _kind_of_ours(name: str) -> str:
    return next((kind for start, kind in _AROUND.items() if name.startswith(start)), "ssm")


KERNEL_RULES = (
    Rule("memcpy", r"^Mem(cpy|set) ", ("Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)")),
    *map(_ours, ("ssm", "conv1d", "norm")),
    # mamba_ssm's Triton and CUDA kernels, and fla's for simple_gla
    Rule("ssm", r"bmm_chunk|chunk_(cumsum|state|scan)|state_passing|ddAcs|selective_(scan|state)|chunk_(fwd|bwd)_kernel_|"
                r"chunk_local_cumsum",
         ("_bmm_chunk_fwd_kernel", "_bmm_chunk_bwd_kernel", "_chunk_cumsum_fwd_kernel", "_chunk_state_fwd_kernel",
          "_state_passing_fwd_kernel", "_chunk_scan_fwd_kernel", "_chunk_scan_chunk_state_bwd_dx_kernel",
          "_chunk_scan_bwd_ddAcs_stable_kernel", "_selective_scan_update_kernel",
          "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16, 1, ...> >(SSMParamsBase)",
          "chunk_fwd_kernel_h", "chunk_fwd_kernel_o", "chunk_local_cumsum_scalar_kernel")),
    Rule("conv1d", r"causal_conv1d",
         ("void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4, true, ...> >(ConvParamsBase)",
          "void causal_conv1d_channellast_bwd_kernel<...>(ConvParamsBwd)", "_causal_conv1d_varlen_states")),
    Rule("attention", r"flash_(fwd|bwd)|fmha|_sdpa_|flash::",
         ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, ...> >(...)",
          "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>(pytorch_flash::Flash_bwd_params)",
          "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
          "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0")),
    Rule("conv", r"implicit_gemm|ImplicitGemmConv|implicit_convolve|(fprop|dgrad|wgrad)_|_(fprop|dgrad|wgrad)|winograd|"
                 r"conv_depthwise|nchwToNhwc|nhwcToNchw",
         ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_stage3_warpsize2x2x1_g1_...",
          "sm90_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_...",
          "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_128x128_64x3_nhwc_align8>(...)",
          "_ZN17cutlass__5x_cudnn6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22...",
          "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3, 1, c10::BFloat16, int>(...)",
          "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true, ...>(...)")),
    Rule("gemm", r"gemm|nvjet|gemv|splitKreduce|cutlass_\d+_tensorop",
         ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
          "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_..._kernel__5x_cublas",
          "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(...)",
          "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, ...>(...)",
          "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, ...>(...)")),
    Rule("norm", r"(?i)(layer|batch|rms|group)_?norm|bn_(fw|bw)|GammaBeta",
         ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(...)",
          "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel<float, float>(...)",
          "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64, 1, ...>(...)",
          "void at::native::batch_norm_collect_statistics_kernel<at::native::InvStd, float, float, float, int>(...)",
          "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(...)", "_layer_norm_fwd_1pass_kernel")),
    Rule("loss", r"nll_loss|LogSoftMax",
         ("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(...)",
          "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
          "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>(...)")),
    Rule("embedding", r"embedding_|EmbeddingBag|compute_grad_weight",
         ("void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(...)",)),
    Rule("optimizer", r"multi_tensor_apply|FusedAdam",
         ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..., "
          "at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, ...> >(...)",)),
    Rule("reduce", r"reduce_kernel|Device(Reduce|Scan|RadixSort)|tensor_kernel_scan",
         ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<...>, ...> >(...)",
          "void at_cuda_detail::cub::DeviceRadixSortSingleTileKernel<...>(...)")),
    Rule("elementwise", r"elementwise_kernel|CatArrayBatchedCopy|distribution_|fused_dropout|_scatter_gather_|triu_tril",
         ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(...)",
          "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)::...>(...)",
          "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<...> >(...)",
          "void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>(...)",
          "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, ...>(...)")),
)

OP_RULES = (
    Rule("embedding", r"aten::embedding|EmbeddingBackward",
         ("aten::embedding", "aten::embedding_dense_backward", "EmbeddingBackward0")),
    Rule("loss", r"nll_loss|cross_entropy|log_softmax|LogSoftmax",
         ("aten::cross_entropy_loss", "aten::_log_softmax", "aten::nll_loss_forward", "LogSoftmaxBackward0")),
    Rule("attention", r"scaled_dot_product|_(flash|efficient)_attention|ScaledDotProduct|aten::_(safe_)?softmax|Softmax",
         ("aten::scaled_dot_product_attention", "aten::_flash_attention_backward", "aten::_softmax", "SoftmaxBackward0")),
    Rule("conv", r"convolution|aten::_?conv|ConvolutionBackward",
         ("aten::cudnn_convolution", "aten::_conv_depthwise2d", "aten::convolution_backward", "ConvolutionBackward0")),
    Rule("gemm", r"aten::(addmm|mm|bmm|baddbmm|matmul|linear|mv|dot)$|(Addmm|Mm|Bmm|Baddbmm)Backward",
         ("aten::addmm", "aten::mm", "aten::bmm", "autograd::engine::evaluate_function: AddmmBackward0")),
    Rule("norm", r"(?i)(layer|batch|rms|group)_?norm",
         ("aten::native_layer_norm", "NativeBatchNormBackward0", "aten::_fused_rms_norm")),
    Rule("optimizer", r"aten::_(fused|foreach)_", ("aten::_fused_adamw_", "aten::_foreach_norm")),
    Rule("reduce", r"aten::(sum|mean|var|std|max|min|amax|amin|argmax|argmin|any|all|norm|linalg_vector_norm|cumsum|cumprod|"
                   r"sort|topk|unique\w*|bincount|histc|prod|_?segment_reduce(_backward)?)$",
         ("aten::sum", "aten::cumsum", "aten::linalg_vector_norm", "aten::_segment_reduce_backward")),
    Rule("elementwise", r"aten::(add|sub|mul|div|neg|pow|sqrt|rsqrt|exp|log|sigmoid|silu|gelu|relu|softplus|tanh|clamp|where|"
                        r"fill|zero|copy|cat|stack|_?index\w*|gather|scatter\w*|roll|flip|arange|dropout|bernoulli|uniform|"
                        r"normal|lerp|masked_fill|threshold|native_dropout|eq|ne|lt|le|gt|ge|bitwise_\w+|"
                        r"logical_\w+)(_backward)?_?$",
         ("aten::add_", "aten::copy_", "aten::silu_backward", "aten::index_select", "aten::_index_put_impl_",
          "aten::masked_fill_")),
)

SCOPE_RULES = (
    Rule("optimizer", rf"^Optimizer\.step|^{PREFIX}optimizer$", ("Optimizer.step#AdamW.step", f"{PREFIX}optimizer")),
    *(Rule(kind, rf"^{PREFIX}{kind}$", (f"{PREFIX}{kind}",)) for kind in ("loss", "embedding", "attention", "norm", "ssm")),
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
