"""What the schedule of a program overlaps, and the work of kernels, from texts by hand."""

import jax
import jax.numpy as jnp
import pytest

from jaxdist import hlo

# Products take a second for 2 x 8 x 8 x 8 operations, and a collective 3 seconds.
_SECOND = 2 * 8**3
_DOT = "dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
_GROUPS = "replica_groups={{0,1}}, to_apply=%add"


def _program(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in ("%a = f32[8,8] parameter(0)", *lines))
    return (
        f"HloModule m, is_scheduled=true, num_partitions=2\n{before}\nENTRY %main {{\n{body}\n}}\n"
    )


def _schedule(text: str) -> hlo.Schedule:
    def time_collective(c: hlo.CompiledCollective) -> tuple[str, float]:
        return ("DCN" if c.between_slices else "ICI"), 3.0

    return hlo.schedule(text, time_collective, lambda work: work.flops / _SECOND)


def test_a_collective_that_is_not_asynchronous_stops_the_work() -> None:
    made = _schedule(_program(f"%b = f32[8,8] {_DOT}", f"%c = f32[8,8] all-reduce(%b), {_GROUPS}"))
    assert (made.work, made.waits, made.seconds) == (1.0, {"ICI": 3.0}, 4.0)


@pytest.mark.parametrize(("products", "waits"), [(0, 3.0), (1, 2.0), (3, 0.0), (4, 0.0)])
def test_an_asynchronous_collective_runs_beside_the_work_up_to_its_done(
    products: int, waits: float
) -> None:
    made = _schedule(
        _program(
            f"%s = (f32[8,8], f32[8,8]) all-reduce-start(%a), {_GROUPS}",
            *(f"%b{n} = f32[8,8] {_DOT}" for n in range(products)),
            "%d = f32[8,8] all-reduce-done(%s)",
        )
    )
    assert (made.work, made.waits.get("ICI", 0.0)) == (products, waits)
    assert made.busy["ICI"] == 3.0


def test_one_link_carries_one_collective_at_a_time_and_two_links_two() -> None:
    start = f"(f32[8,8], f32[8,8]) all-reduce-start(%a), {_GROUPS}"
    ends = ("%d1 = f32[8,8] all-reduce-done(%s1)", "%d2 = f32[8,8] all-reduce-done(%s2)")
    two = _schedule(_program(f"%s1 = {start}", f"%s2 = {start}", *ends))
    assert two.waits == {"ICI": 6.0}
    between = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="r",'
        '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    links = _schedule(
        _program(
            f"%s1 = {start}",
            f"%s2 = (f32[8,8], u32[], token[]) send(%a, %t), channel_id=1, {between}",
            f"%r2 = (f32[8,8], u32[], token[]) recv(%t), channel_id=2, {between}",
            "%d2 = (f32[8,8], token[]) recv-done(%r2), channel_id=2",
            "%e2 = token[] send-done(%s2), channel_id=1",
            ends[0],
        )
    )
    assert links.seconds == 3.0
    assert links.busy == {"ICI": 3.0, "DCN": 3.0}


def test_fusions_that_start_and_end_a_collective_are_its_start_and_its_done() -> None:
    def fused(name: str, target: str) -> str:
        return (
            f"%{name} {{\n  %p = f32[8,8] parameter(0)\n"
            f"  %g = f32[8,8] all-reduce(%p), channel_id=7, {_GROUPS}, "
            "async_collective_fusion_config\n"
            f'  ROOT %x = f32[8,8] custom-call(%g), custom_call_target="{target}"\n}}\n'
        )

    before = fused("begin", "AsyncCollectiveStart") + fused("end", "AsyncCollectiveDone")
    made = _schedule(
        _program(
            "%s = f32[8,8] fusion(%a), kind=kCustom, calls=%begin",
            f"%b = f32[8,8] {_DOT}",
            "%d = f32[8,8] fusion(%s), kind=kCustom, calls=%end",
            before=before,
        )
    )
    assert (made.work, made.waits) == (1.0, {"ICI": 2.0})


def test_the_body_of_a_loop_counts_as_often_as_it_runs() -> None:
    def total(w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda i, h: h @ w * i, w)

    text = jax.jit(total).lower(jnp.ones((64, 64))).compile().as_text() or ""
    made = hlo.schedule(text, lambda c: ("ICI", 1.0), lambda work: float(work.flops))
    assert made.work == 5 * 2 * 64**3
    assert made.seconds == made.work


_KERNEL = (
    "%q = bf16[2,4,256,128] parameter(0)\n  %k = bf16[2,4,512,128] parameter(1)\n"
    '  %NAME.1 = bf16[2,4,256,128] custom-call(%q, %k), custom_call_target="tpu_custom_call"'
)
_SCORES = 2 * 2 * 4 * 256 * 512 * 128


@pytest.mark.parametrize(
    ("name", "config", "flops", "unknown"),
    [
        ("flash_mha_bwd_dkv_block_q_512", "", 4 * _SCORES, ()),
        ("flash_mha_bwd_dq_block_q_512", "", 3 * _SCORES, ()),
        ("splash_mqa_fwd_residuals", "", 2 * _SCORES, ()),
        ("splash_mha_dkv_no_residuals", "", 4 * _SCORES, ()),
        ("splash_mha_dq_segmented_no_residuals", "", 3 * _SCORES, ()),
        ("flash", ', backend_config={"cost_estimate":{"flops":"77","x":"1"}}', 77, ()),
        ("mine", "", 0, ("custom-call to tpu_custom_call",)),
    ],
)
def test_a_kernel_counts_by_its_estimate_or_its_name_or_is_named_as_not_counted(
    name: str, config: str, flops: int, unknown: tuple[str, ...]
) -> None:
    text = _program(_KERNEL.replace("NAME", name) + config)
    found = hlo.work(text)
    assert (found.flops, found.unknown) == (flops, unknown)


def test_splash_attention_with_positions_last_and_with_all_gradients_in_one_kernel() -> None:
    mask = "%m = s8[1,8,8] parameter(2)\n  "
    made = "(bf16[2,2,4,256,128], bf16[2,4,512,128], bf16[2,4,512,128]) custom-call(%m, "
    text = mask + _KERNEL.replace("bf16[2,4,256,128] custom-call(", made)
    text = text.replace("NAME", "splash_mha_dkv_no_residuals")
    assert hlo.work(_program(text)).flops == 5 * _SCORES
    layout = ', frontend_attributes={kernel_metadata={\n"xprof":"{\\"k_layout\\": 2}"\n}}'
    turned = text.replace("%k = bf16[2,4,512,128]", "%k = bf16[2,4,128,512]") + layout
    assert hlo.work(_program(turned)).flops == 5 * _SCORES


def test_an_instruction_on_several_lines_is_read_and_a_damaged_one_takes_no_other_with_it() -> None:
    attributes = ', frontend_attributes={kernel_metadata={\n"text":"} {{"\n}}, metadata={}'
    whole = hlo.work(_program(f"%x = f32[8,8] add(%a, %a){attributes}", f"%b = f32[8,8] {_DOT}"))
    assert (whole.flops, whole.unknown) == (2 * 8**3, ())
    damaged = _program(f"%x = f32[8,8] add(%a, %a){attributes[:-16]}", f"%b = f32[8,8] {_DOT}")
    found = hlo.work(damaged)
    assert found.flops == 2 * 8**3
    assert found.unknown, damaged


def test_a_gather_on_the_sparse_core_is_known_and_runs_beside_other_work() -> None:
    """As libtpu 0.0.52 writes it for v5p: the update has the operands, the target is a mark."""
    thread = '}, execution_thread="sparsecore"\n'
    before = (
        "%gathered {\n  %t = bf16[32000,512] parameter(0)\n  %n = s32[64] parameter(1)\n"
        "  ROOT %g = bf16[64,512] gather(%t, %n), slice_sizes={1,512}\n"
        f"{thread}%inner {{\n  %t = bf16[32000,512] parameter(0)\n  %n = s32[64] parameter(1)\n"
        "  ROOT %f = bf16[64,512] fusion(%t, %n), kind=kCustom, calls=%gathered\n"
        f"{thread}%called {{\n  %t = bf16[32000,512] parameter(0)\n  %n = s32[64] parameter(1)\n"
        "  %s = ((bf16[32000,512], s32[64]), bf16[64,512], u32[]) call-start(%t, %n), "
        'async_execution_thread="sparsecore", to_apply=%inner\n'
        f"  ROOT %d = bf16[64,512] call-done(%s)\n{thread}"
    )
    found = "((bf16[32000,512], s32[64]), bf16[64,512], (s32[8])) "
    text = _program(
        "%t = bf16[32000,512] parameter(1)",
        "%n = s32[64] parameter(2)",
        '%s = ((), (), (s32[8])) custom-call-start(), async_execution_thread="sparsecore", '
        'custom_call_target="TODO(b/522284627)", called_computations={%called}',
        f"%b = f32[8,8] {_DOT}",
        f"%u = {found}custom-call-update(%s, %t, %n)",
        "%e = bf16[64,512] custom-call-done(%u)",
        before=before,
    )
    assert hlo.unknown(text) == ()
    work = hlo.work(text)
    assert (work.flops, work.unknown) == (2 * 8**3, ())
    rows = 64 * 512 * 2
    assert 2 * rows <= work.memory_bytes - 3 * 8 * 8 * 4 < 2.1 * rows
    made = hlo.schedule(
        text, lambda c: ("ICI", 1.0), lambda w: w.flops / _SECOND + 2.0 * (w.memory_bytes > rows)
    )
    # The gather takes 2 s, beside the product of 1 s.
    assert (made.work, made.seconds) == (1.0, 2.0)


def test_a_kernel_that_sends_nothing_is_no_unknown_communication() -> None:
    estimate = ', backend_config={"cost_estimate":{"flops":"1","remote_bytes_transferred":"SENT"}}'
    for sent, unknown in (("0", ()), ("8", ("custom-call to tpu_custom_call",))):
        text = _program(_KERNEL.replace("NAME", "mine") + estimate.replace("SENT", sent))
        assert hlo.unknown(text) == unknown
    assert hlo.unknown(_program(_KERNEL.replace("NAME", "flash_mha_bwd_dq"))) == ()


@pytest.mark.parametrize(("opcode", "how"), [("fusion", "calls"), ("call", "to_apply")])
def test_what_a_gpu_starts_on_a_second_stream_is_work_and_hides_nothing(
    opcode: str, how: str
) -> None:
    """JAX 0.12 writes `fusion-start`, and for annotated streams `call-start`."""
    inside = f"%f {{\n  %a = f32[8,8] parameter(0)\n  ROOT %q = f32[8,8] {_DOT}\n}}\n"
    made = _schedule(
        _program(
            f"%s = ((f32[8,8]), f32[8,8], u32[]) {opcode}-start(%a), {how}=%f",
            f"%b = f32[8,8] {_DOT}",
            f"%d = f32[8,8] {opcode}-done(%s)",
            before=inside,
        )
    )
    assert (made.work, made.waits) == (2.0, {})
