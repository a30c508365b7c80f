"""Labels and classes of kernels, from their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_traces import each, load, needs_traces

from instrument.read.facts.kernel_names import (
    CLASSES,
    LONGEST_LABEL,
    kernel_class,
    kernel_label,
    kernel_labels,
)

ATEN = "void at::native::"
VECTORIZED = f"{ATEN}vectorized_elementwise_kernel<4, {{}}, at::detail::Array<char*, 3> >(int, {{}}, at::detail::Array<char*, 3>)"
COPY = (
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() "
    "const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}"
)
MMA = (
    "cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, cutlass::gemm::"
    "collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmma<4, cute::tuple<cute::C<2>, cute::C<1>, "
    "cute::C<1> > >, cute::tuple<cute::C<64>, cute::C<128>, cute::C<128> >, cutlass::float_e4m3_t> >"
)


@pytest.mark.parametrize(
    ("name", "label", "kind"),
    [
        # at::native: the functor, inside any number of wrappers
        (VECTORIZED.replace("{}", "at::native::CUDAFunctor_add<c10::BFloat16>"), "add<bf16>", "elementwise"),
        (
            VECTORIZED.replace(
                "{}",
                "at::native::BinaryFunctor<c10::Half, c10::Half, c10::Half, at::native::binary_internal::MulFunctor<float> >",
            ),
            "mul<f16>",
            "elementwise",
        ),
        (f"{ATEN}elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<{COPY}>(at::TensorIteratorBase&, {COPY} const&)::{{lambda(int)#1}}>(int, x)", "direct_copy<bf16>", "copy"),
        (
            f"{ATEN}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{{lambda(float, float)#1}}>, unsigned int, float, 4> >(x)",
            "reduce sum<f32>",
            "reduction",
        ),
        (
            f"{ATEN}(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<2>, at::native::(anonymous namespace)::BinaryOpListAlphaFunctor<c10::BFloat16, 2, 2, 0>, std::plus<float>, float>(x)",
            "foreach plus<bf16>",
            "elementwise",
        ),
        (f"{ATEN}index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl<at::native::OpaqueType<4> >(x)::{{lambda(char*, char const*, long)#1}}>(x)", "index<4-byte>", "elementwise"),
        (f"{ATEN}(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)", "layer_norm<f32>", "normalisation"),
        (f"{ATEN}(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, c10::BFloat16, x>(x)", "cunn_SoftMaxForward<bf16>", "normalisation"),
        ("at::native::xpu::VectorizedElementwiseKernel<4, at::native::xpu::GeluErfFunctor<float>, x>", "gelu_erf<f32>", "elementwise"),
        # the spelling of Nsight Systems
        (
            "void at::native::elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]::operator ()() const::[lambda(c10::BFloat16) (instance 1)]>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)",
            "direct_copy<bf16>",
            "copy",
        ),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>(T1::Params)", "gemm 128×64 tn bf16 relu", "matrix product"),
        # libraries of matrix products and convolutions
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "gemm 128×128 tn f16", "matrix product"),
        ("volta_sgemm_128x32_nt", "gemm 128×32 nt f32", "matrix product"),
        ("volta_gcgemm_32x32_nt", "gemm 32×32 nt c64", "matrix product"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas", "gemm 128×128 tn bf16", "matrix product"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(x)", "gemm 256×64 nn tf32", "matrix product"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_bias_TNT", "gemm 64×8 tn bf16 splitk bias", "matrix product"),
        ("nvjet_sm103_hsh_64x8_64x16_1x1_h_bz_NNT", "gemm 64×8 nn f16", "matrix product"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN", "gemm 256×192 tn bf16", "matrix product"),
        ("Cijk_Ailk_Bjlk_HHS_BH_MT128x128x16_SN_K1", "gemm 128×128 nt f16", "matrix product"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", "matmul_ogs 128×128 nnt bf16×mxfp4 swiglu", "matrix product"),
        (f"void cutlass::device_kernel<{MMA}>(x)", "gemm 64×128 e4m3", "matrix product"),
        ("void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::GemmKernel>(x)", "dpsk::grouped_gemm::fp8_ptp128c", "matrix product"),
        ("_ZN2ck15kernel_moe_gemmIiEEvPf", "kernel_moe_gemm", "matrix product"),
        ("_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEENS_12float_e4m3_tE", "gemm<e4m3>", "matrix product"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float, 128, 16, 4, 4, false, true, x>(x)", "gemv2T_kernel_val<bf16>", "matrix product"),
        ("volta_scudnn_128x64_relu_interior_nn_v1", "conv 128×64 f32 relu", "convolution"),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4", "conv wgrad 128×128 tf32", "convolution"),
        ("igemm_bwd_gtcx3_nhwc_bf16_bx0_ex1_bt64x128x32_wt32x32x8", "conv bwd 64×128 bf16", "convolution"),
        ("miopenSp3AsmConv_v21_1_3_gfx9_fp32_stride1", None, "convolution"),
        # attention
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t, x>, false>(x)", "flash_fwd hdim64 bf16", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<128>, cute::C<128>, cute::C<192> >, 64, cutlass::half_t> > > >(x)", "flash_attn_fwd_sm90 hdim192 f16", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<x>::Params)", "fmha 64×128 bf16", "attention"),
        ("fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvSlidingOrChunkedCausalP16VarSeqQ128Kv128", "fmha hdim64 e4m3", "attention"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __half>(x)", "FusedAddRMSNorm<f16>", "normalisation"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char, x>(x)", "reshape_and_cache_flash<bf16>", "copy"),
        # communication
        ("ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", "nccl AllReduce sum f16 ring LL", "communication"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "nccl AllReduce sum f32 ring LL", "communication"),
        ("ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)", "nccl AllReduce RSxLD AGxST sum bf16", "communication"),
        ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8>(x)", "ep::internode::combine<bf16>", "communication"),
        # generated kernels and other accelerators
        ("triton_poi_fused_add_mul_3", "triton_poi_fused_add_mul_3", "elementwise"),
        ("triton_red_fused_add_native_layer_norm_backward_sum_view_12", None, "normalisation"),
        ("loop_add_fusion", "loop_add_fusion", "elementwise"),
        ("gemm_fusion_dot_285", "gemm_fusion_dot_285", "matrix product"),
        ("aten::cat.out-dtype_Float-extraKey_3", "cat<f32>", "copy"),
        ("fc-dtype_Float", "fc<f32>", "matrix product"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)", "copy"),
        # no grammar at all
        ("some_kernel_nobody_has_seen", "some_kernel_nobody_has_seen", "other"),
        ("a::b<c<d<e", "a::b", "other"),
        ("<<<unparseable>>>", "<<<unparseable>>>", "other"),
        ("", "(no name)", "other"),
    ],
)  # fmt: skip
def test_a_name_says_what_the_kernel_does(name: str, label: str | None, kind: str) -> None:
    assert label is None or kernel_label(name) == label
    assert kernel_class(name) == kind


PARTS = st.sampled_from(
    ["void ", "at::native::", "_Z", "N4gemm", "<", ">", "(", ")", ", ", "float", "_", "128x64", "{lambda(", "#1}",
     "kernel", "nccl", "Kernel_", "triton_poi_", "operator()", "\u5185\u6838", "\x1b[31m", "tuple<", "C<64>", "9"]
)  # fmt: skip


@given(st.lists(PARTS, max_size=40).map("".join))
def test_any_name_has_a_label_and_a_class(name: str) -> None:
    assert 0 < len(kernel_label(name)) <= LONGEST_LABEL
    assert kernel_class(name) in CLASSES


@given(st.lists(st.lists(PARTS, max_size=12).map("".join), max_size=12))
def test_no_two_names_of_a_table_look_the_same(names: list[str]) -> None:
    labels = kernel_labels(names)
    assert labels.keys() == {*names}
    assert len({*labels.values()}) == len(labels)
    assert all(0 < len(label) <= LONGEST_LABEL for label in labels.values())


def test_the_words_in_which_names_differ_tell_them_apart() -> None:
    plus = "at::native::CUDAFunctor_add<float>"
    first = VECTORIZED.replace("{}", plus)
    second = first.replace("vectorized", "unrolled")
    got = kernel_labels([first, second])
    assert got == {first: "add<f32> vectorized", second: "add<f32> unrolled"}
    alike = [f"void f<float, {k}, true>(x)" for k in ("true", "false")]
    assert [*kernel_labels(alike).values()] == ["f<f32> #1", "f<f32> #2"]


def test_a_long_name_costs_no_more_than_its_beginning() -> None:
    name = "void f<" * 200_000
    assert kernel_label(name) == "f"
    assert kernel_class("nccl" * 100_000) == "communication"


@needs_traces
@pytest.mark.parametrize("trace", each())
def test_the_labels_of_real_kernels_can_be_read(trace: str) -> None:
    capture = load(trace)
    labels = kernel_labels(capture.kernels.column("name"))
    assert len({*labels.values()}) == len(labels)
    assert all(len(label) <= LONGEST_LABEL for label in labels.values())
    assert not any(
        "::operator" in label or "lambda" in label or ">(" in label for label in labels.values()
    )
