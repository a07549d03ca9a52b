"""Work by dtype, and what only texts for GPUs have: library calls, kernels, memory spaces."""

import re

import pytest

from jaxdist import hlo
from tests.hlo.record import Text, recorded
from tests.tables import sampled

TEXTS = list(recorded())
GPU = [t for t in TEXTS if t.platform == "gpu"]


@pytest.mark.parametrize("text", sampled(TEXTS, 12))
def test_flops_by_dtype_add_up_to_flops(text: Text) -> None:
    found = hlo.work(text.text)
    assert sum(dict(found.flops_by_dtype).values()) == found.flops
    assert sorted(dict(found.flops_by_dtype)) == [dtype for dtype, _ in found.flops_by_dtype]


DTYPES = {
    "data_parallel": "f32",
    "data_parallel_gemm": "f32",
    "conv_net": "f32",
    "transformer": "bf16",
    "transformer_gemm": "bf16",
    "ragged": "bf16",
    "fp8": "f8e4m3fn",
    "fp8_gemm": "f8e4m3fn",
    # A fusion converts them, so the device multiplies in bf16.
    "fp8_scaled": "bf16",
}


@pytest.mark.parametrize("text", sampled([t for t in GPU if t.program in DTYPES], 18))
def test_products_count_in_the_dtype_in_which_the_device_multiplies(text: Text) -> None:
    assert set(dict(hlo.work(text.text).flops_by_dtype)) == {DTYPES[text.program]}


LOOP = """
%product (a: f8e5m2[4,8], b: f8e4m3fn[8,2]) -> f32[4,2] {
  %a = f8e5m2[4,8]{1,0} parameter(0)
  %b = f8e4m3fn[8,2]{1,0} parameter(1)
  ROOT %d = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%widened (a: f8e5m2[4,8], b: f8e4m3fn[8,2]) -> f32[4,2] {
  %a = f8e5m2[4,8]{1,0} parameter(0)
  %b = f8e4m3fn[8,2]{1,0} parameter(1)
  %w = f16[4,8]{1,0} convert(%a)
  ROOT %d = f32[4,2]{1,0} dot(%w, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%none (a: f8e5m2[4,8], b: f8e4m3fn[8,2]) -> f32[4,2] {
  ROOT %z = f32[4,2]{1,0} constant({...})
}

%body (t: (f8e5m2[4,8], f8e4m3fn[8,2])) -> (f8e5m2[4,8], f8e4m3fn[8,2]) {
  %t = (f8e5m2[4,8]{1,0}, f8e4m3fn[8,2]{1,0}) parameter(0)
  %a = f8e5m2[4,8]{1,0} get-tuple-element(%t), index=0
  %b = f8e4m3fn[8,2]{1,0} get-tuple-element(%t), index=1
  %f = f32[4,2]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
  %s = ((f8e5m2[4,8], f8e4m3fn[8,2]), f32[4,2], u32[]) fusion-start(%a, %b), calls=%widened
  %e = f32[4,2]{1,0} fusion-done(%s)
  %c = f32[4,2]{1,0} conditional(%p, %a, %b), branch_computations={%none, %product}
  ROOT %r = (f8e5m2[4,8]{1,0}, f8e4m3fn[8,2]{1,0}) tuple(%a, %b)
}

%condition (t: (f8e5m2[4,8], f8e4m3fn[8,2])) -> pred[] {
  ROOT %no = pred[] constant(false)
}

ENTRY %main (t: (f8e5m2[4,8], f8e4m3fn[8,2])) -> (f8e5m2[4,8], f8e4m3fn[8,2]) {
  %t = (f8e5m2[4,8]{1,0}, f8e4m3fn[8,2]{1,0}) parameter(0)
  ROOT %w = (f8e5m2[4,8]{1,0}, f8e4m3fn[8,2]{1,0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"TURNS"}}
}
"""


def test_dtypes_are_kept_in_loops_fusions_starts_and_branches() -> None:
    found = hlo.work(LOOP.replace("TURNS", "5"))
    assert found.unknown == ()
    # The product runs in the fusion and in the branch. Of two dtypes of 8 bits, the first counts.
    assert found.flops_by_dtype == (("f16", 5 * 128), ("f8e5m2", 5 * 2 * 128))
    assert hash(found) == hash(hlo.work(LOOP.replace("TURNS", "5")))


def test_a_loop_that_never_runs_has_no_dtypes() -> None:
    assert hlo.work(LOOP.replace("TURNS", "0")).flops_by_dtype == ()


KERNEL = (
    "%n = s32[2]{0} parameter(0)\n%q = bf16[128,64]{1,0} parameter(1)\n"
    '%k = f32[128,64]{1,0} custom-call(%n, %q), custom_call_target="TARGET", '
    r'backend_config={ESTIMATE kernel_hash = "f\B0\F9", module = "ML\EFR\01{}"}'
)
ESTIMATE = (
    r'cost_estimate_json = "{\22flops\22: 4096, \22transcendentals\22: 0, '
    r'\22bytes_accessed\22: 3072, \22remote_bytes_transferred\22: SENT}",'
)


def test_a_kernel_of_pallas_counts_as_its_author_estimates() -> None:
    text = KERNEL.replace("TARGET", "mosaic_gpu_v2").replace("ESTIMATE", ESTIMATE)
    found = hlo.work(text)
    assert (found.flops, found.flops_by_dtype) == (4096, (("bf16", 4096),))
    assert found.unknown == ()
    assert hlo.unknown(text.replace("SENT", "0")) == ()
    assert hlo.unknown(text.replace("SENT", "64")) == ("custom-call to mosaic_gpu_v2",)


@pytest.mark.parametrize(
    ("target", "may_communicate"), [("mosaic_gpu_v2", True), ("__gpu$xla.gpu.triton", False)]
)
def test_a_kernel_without_an_estimate_is_named(target: str, may_communicate: bool) -> None:
    text = KERNEL.replace("TARGET", target).replace("ESTIMATE", "")
    assert hlo.work(text).unknown == (f"custom-call to {target}",)
    assert bool(hlo.unknown(text)) == may_communicate


# As JAX 0.10.2 wrote `jax.nn.scaled_matmul` for a B200, and `lax.ragged_dot` with its gradient
# before XLA rewrote them.
PRODUCTS = """
%a = f8e4m3fn[2,256,512]{2,1,0} parameter(0)
%b = f8e4m3fn[2,128,512]{2,1,0} parameter(1)
%s = f8e8m0fnu[2,256,16]{2,1,0} parameter(2)
%c = (f32[2,256,128]{2,1,0}, u8[0]{0}) custom-call(%a, %b, %s, %s), \
custom_call_target="__cudnn$blockScaledDot"
%x = bf16[512,256] parameter(3)
%w = bf16[4,256,128] parameter(4)
%g = s32[4] parameter(5)
%y = bf16[512,128] parameter(6)
%r = bf16[512,128] ragged-dot(%x, %w, %g), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
lhs_ragged_dims={0}, rhs_group_dims={0}
%d = f32[4,256,128]{2,1,0} ragged-dot(%x, %y, %g), lhs_contracting_dims={0}, \
rhs_contracting_dims={0}, lhs_ragged_dims={0}
"""


def test_products_with_scales_or_of_groups_of_rows_are_counted() -> None:
    found = hlo.work(PRODUCTS)
    assert dict(found.flops_by_dtype) == {
        "f8e4m3fn": 2 * 2 * 256 * 128 * 512,
        "bf16": 2 * (2 * 512 * 256 * 128),
    }
    assert found.unknown == hlo.unknown(PRODUCTS) == ()


def test_solvers_are_named_and_the_calls_around_them_are_not() -> None:
    texts = [t for t in GPU if t.program == "solvers"]
    for text in texts:
        assert hlo.unknown(text.text) == ()
        named = hlo.work(text.text).unknown
        assert all(
            name.startswith(("custom-call to cusolver_", "custom-call to __cublas$tri"))
            for name in named
        ), named
        for solver in ("geqrf", "orgqr", "potrf", "getrf", "syevd"):
            assert [name for name in named if solver in name]
    assert len(texts) == 4


def _find_like(text: Text, program: str) -> str:
    """Return the text of another program by the same compiler for the same devices."""
    place = (program, text.version, text.topology)
    [found] = [t.text for t in GPU if (t.program, t.version, t.topology) == place]
    return found


def test_workspace_of_a_call_in_a_fusion_is_no_traffic() -> None:
    """JAX 0.12 writes a loop's slice and the cuBLAS call that reads it as one fusion."""
    fusions = 0
    for text in GPU:
        if text.program == "transformer_gemm":
            fusions += len(re.findall(r"s8\[\d+\]\{0\}\) fusion", text.text))
            triton, gemm = hlo.work(_find_like(text, "transformer")), hlo.work(text.text)
            assert gemm.flops == triton.flops
            assert gemm.memory_bytes < 1.2 * triton.memory_bytes
    assert fusions > 10


@pytest.mark.parametrize(
    ("layout", "counts"),
    [("{0}", 1), ("{0:S(1)}", 1), ("{0:S(7)}", 1), ("{0:S(5)}", 0), ("{0:T(1024)S(1)}", 0)],
    ids=["HBM", "NCCL", "NVSHMEM", "host", "VMEM of a TPU"],
)
def test_buffers_of_nccl_are_main_memory_and_other_spaces_are_not(layout: str, counts: int) -> None:
    text = f"%x = f32[4096]{layout} parameter(0)\n%y = f32[4096]{layout} negate(%x)"
    assert hlo.work(text).memory_bytes == counts * 2 * 4096 * 4


def test_buffers_that_nccl_registers_change_no_work() -> None:
    spaces = 0
    for text in GPU:
        if text.program == "data_parallel_buffers":
            spaces += text.text.count("S(1)")
            assert hlo.work(text.text) == hlo.work(_find_like(text, "data_parallel"))
    assert spaces
