"""All-gathers that loops repeat, and the categories of instructions."""

import jax
import jax.numpy as jnp
import pytest

from jaxdist import hlo

LOOP = """HloModule jit_step, num_partitions=8

%body (p: (s32[], f32[2,64], f32[8,64])) -> (s32[], f32[2,64], f32[8,64]) {
  %p = (s32[], f32[2,64]{1,0}, f32[8,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[2,64]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,64]{1,0} get-tuple-element(%p), index=2
  %half = bf16[8,64]{1,0} convert(%w)
  %whole = bf16[64,64]{1,0} all-gather(GATHERED), replica_groups=[1,8]<=[8], dimensions={0}
  %y = f32[2,64]{1,0} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[2,64]{1,0}, f32[8,64]{1,0}) tuple(%next, %y, RETURNED)
}

%condition (c: (s32[], f32[2,64], f32[8,64])) -> pred[] {
  %c = (s32[], f32[2,64]{1,0}, f32[8,64]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%j, %n), direction=LT
}

ENTRY %main (a: f32[2,64], b: f32[8,64]) -> f32[2,64] {
  %a = f32[2,64]{1,0} parameter(0)
  %b = f32[8,64]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[2,64]{1,0}, f32[8,64]{1,0}) tuple(%zero, %a, %b)
  %loop = (s32[], f32[2,64]{1,0}, f32[8,64]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"TRIPS"}}
  ROOT %r = f32[2,64]{1,0} get-tuple-element(%loop), index=1
}
"""


def fill(gathered: str = "%half", returned: str = "%w", trips: int = 4) -> str:
    text = LOOP.replace("GATHERED", gathered).replace("RETURNED", returned)
    return text.replace("TRIPS", str(trips))


def test_a_gather_of_what_the_loop_does_not_change_is_repeated() -> None:
    assert hlo.repeated_gathers(fill()) == (hlo.RepeatedGather(64 * 64 * 2, 4, ""),)


@pytest.mark.parametrize(
    "text",
    [
        fill(gathered="%x"),  # another value in each iteration
        fill(returned="%other"),  # the loop replaces the array
        fill(trips=1),
    ],
)
def test_other_gathers_in_loops_are_not(text: str) -> None:
    assert hlo.repeated_gathers(text) == ()


def test_instructions_have_categories() -> None:
    found = hlo.categories(fill())
    assert found["whole"] == "collectives"
    assert found["y"] == "matrix products"
    assert found["next"] == "other compute"
    assert found["loop"] == ""


def test_a_fusion_has_the_category_of_what_is_in_it() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ x + 1)

    text = jax.jit(step).lower(jnp.ones((128, 128))).compile().as_text() or ""
    assert "matrix products" in {
        category
        for name, category in hlo.categories(text).items()
        if "fusion" in name or "dot" in name
    }
