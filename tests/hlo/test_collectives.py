"""Reading collectives out of optimized HLO text."""

import pytest

from jaxdist import hlo

TEXT = """
HloModule jit_step, entry_computation_layout={(f32[4]{0})->f32[4]{0}}
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %all-reduce-like = f32[] add(%x, %y)
}
ENTRY %main {
  %p = f32[4]{0} parameter(0)
  %one = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %two = (f32[4]{0}, bf16[2,3]{1,0}) all-reduce(%p, %q), channel_id=2, replica_groups=[2,4]<=[8], \
use_global_device_ids=true, to_apply=%add
  %g = f32[32]{0} all-gather(%p), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
  %s = s8[2]{0} reduce-scatter(%r), replica_groups={}, dimensions={0}, to_apply=%add
  %a = pred[8]{0} all-to-all(%b), replica_groups={{0,1,2,3,4,5,6,7}}
  %c = u32[]{:T(128)} collective-permute(%d), source_target_pairs={{0,1}}
  %start = f32[4]{0} all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add
  %done = f32[4]{0} all-reduce-done(%start)
  ROOT %t = f32[4]{0} add(%one, %done), metadata={op_name="all-reduce(x)"}
}
"""


def test_every_kind_is_found_once_in_program_order() -> None:
    assert [c.kind for c in hlo.collectives(TEXT)] == [
        "all-reduce",
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "all-reduce",
    ]


def test_operands_and_bytes_of_tuples_and_of_small_dtypes_are_counted() -> None:
    found = hlo.collectives(TEXT)
    assert [c.operands for c in found] == [1, 2, 1, 1, 1, 1, 1]
    assert [c.bytes_per_device for c in found] == [16, 16 + 12, 128, 2, 8, 4, 16]


def test_replica_groups_are_kept_as_they_are_written() -> None:
    found = hlo.collectives(TEXT)
    assert [c.replica_groups for c in found] == [
        "{{0,1},{2,3}}",
        "[2,4]<=[8]",
        "[1,8]<=[8]",
        "{}",
        "{{0,1,2,3,4,5,6,7}}",
        "{}",
        "{{0,1}}",
    ]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("pred", 1),
        ("s4", 1),
        ("u8", 1),
        ("f8e4m3fn", 1),
        ("bf16", 2),
        ("f16", 2),
        ("f64", 8),
        ("c64", 8),
        ("c128", 16),
    ],
)
def test_the_bytes_of_a_dtype(dtype: str, size: int) -> None:
    (one,) = hlo.collectives(f"%x = {dtype}[1]{{0}} all-reduce(%y), replica_groups={{}}")
    assert one.bytes_per_device == size


def test_text_without_collectives_has_none() -> None:
    assert hlo.collectives("") == ()
    assert hlo.collectives('%x = f32[4]{0} add(%a, %b), metadata={op_name="psum"}') == ()
