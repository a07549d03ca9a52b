"""Reading collectives of programs that were compiled here, against what they really do."""

import itertools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdist
from jaxdist import hlo
from tests.tables import examples

FOURS = [[0, 1, 2, 3], [4, 5, 6, 7]]
PAIRS = [[0, 4], [1, 5], [2, 6], [3, 7]]


def every_collective(x: Any, bound: Any) -> Any:
    whole = lax.psum(x, "replica")
    part = lax.psum_scatter(x, "replica", axis_index_groups=FOURS, tiled=True)
    again = lax.all_gather(part, "replica", axis_index_groups=FOURS, tiled=True)
    across = lax.psum(again * 2, "replica", axis_index_groups=PAIRS)
    moved = lax.ppermute(x * 3, "replica", [(i, (i + 2) % 8) for i in range(8)])
    swapped = lax.all_to_all(x.reshape(8, -1) * 4, "replica", 0, 0)

    def outer(carry: Any, _: Any) -> Any:
        carry = lax.fori_loop(0, 3, lambda j, c: c + lax.psum(c * j, "replica"), carry)
        return lax.pmax(carry, "replica"), None

    looped, _ = lax.scan(outer, x, None, length=5)
    until = lax.while_loop(
        lambda c: lax.psum(c[0], "replica") > bound, lambda c: lax.pmin(c, "replica") - 1, x
    )
    chosen = lax.cond(bound > 0, lambda x: lax.psum(x * 7, "replica"), lambda x: x, x)
    complex_sum = lax.psum(x + 1j * x, "replica")
    small = lax.pmax((x > 0).astype(jnp.uint8), "replica")
    return whole, across, moved, swapped, looped, until, chosen, complex_sum, small


@pytest.fixture(scope="module")
def compiled() -> Any:
    x = jaxdist.PerReplica([np.arange(16.0, dtype="float32")] * 8)
    return jaxdist.MirroredStrategy().lower(every_collective, (x, 3.0)).compile()


# kind, results, operands, devices in a group, times, in a loop, in a branch, what the line holds
EXPECTED = [
    ("all-reduce", 64, 64, 8, 1, False, False, "whole ="),
    ("reduce-scatter", 16, 64, 4, 1, False, False, "part ="),
    ("all-gather", 64, 16, 4, 1, False, False, "again ="),
    ("all-reduce", 64, 64, 2, 1, False, False, "across ="),
    ("collective-permute", 64, 64, 4, 1, False, False, "moved ="),
    ("all-to-all", 64, 64, 8, 1, False, False, "swapped ="),
    ("all-reduce", 64, 64, 8, 15, True, False, "fori_loop"),
    ("all-reduce", 64, 64, 8, 5, True, False, "lax.pmax(carry"),
    ("all-reduce", 4, 4, 8, None, True, False, "while_loop", "lambda c: lax.psum"),
    ("all-reduce", 64, 64, 8, None, True, False, "lambda c: lax.psum"),
    ("all-reduce", 64, 64, 8, 1, False, True, "lax.cond"),
    ("all-reduce", 128, 128, 8, 1, False, False, "complex_sum ="),
    ("all-reduce", 16, 16, 8, 1, False, False, "small ="),
]


def _line(source: str) -> str:
    file, _, rest = source.partition(".py:")
    with open(file + ".py") as lines:
        return lines.readlines()[int(rest.split()[0]) - 1]


def test_compiled_collectives_are_found_with_sizes_groups_loops_and_lines(compiled: Any) -> None:
    found = [
        (
            c.kind,
            c.bytes_per_device,
            c.operand_bytes,
            c.group_size,
            c.times,
            c.in_loop,
            c.in_branch,
            _line(c.source),
        )
        for c in compiled.collectives
    ]
    for row in EXPECTED:
        fitting = [
            f for f in found if list(f[:7]) == list(row[:7]) and any(w in f[7] for w in row[7:])
        ]
        assert fitting, f"{row} is not among {found}"
        found.remove(fitting[0])
    assert found == []


def test_groups_and_pairs_are_those_that_were_asked_for(compiled: Any) -> None:
    by_kind = {c.kind: c for c in compiled.collectives}
    assert by_kind["reduce-scatter"].groups == tuple(map(tuple, FOURS))
    assert by_kind["all-gather"].groups == tuple(map(tuple, FOURS))
    permute = by_kind["collective-permute"]
    assert permute.pairs == tuple((i, (i + 2) % 8) for i in range(8))
    assert permute.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert tuple(map(tuple, PAIRS)) in {c.groups for c in compiled.collectives}


def test_bytes_sent_are_the_least_that_messages_can_do(compiled: Any) -> None:
    by_kind = {c.kind: c for c in compiled.collectives if c.times == 1 and c.operand_bytes}
    assert by_kind["reduce-scatter"].bytes_sent == 3 / 4 * 64
    assert by_kind["all-gather"].bytes_sent == 3 / 4 * 64
    assert by_kind["collective-permute"].bytes_sent == 64
    assert by_kind["all-to-all"].bytes_sent == 7 / 8 * 64


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_decoded_groups_are_those_whose_values_are_really_added(order: Any) -> None:
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2).transpose(order)
    mesh = Mesh(devices, ("a", "b", "c"))
    names = [n for k in (1, 2, 3) for n in itertools.combinations("abc", k)] + [("c", "a")]
    spec = PartitionSpec(("a", "b", "c"))

    def masks(x: Any) -> Any:
        # Sums that differ, or XLA would make one of two.
        return [lax.psum(x * (2**i), over) // 2**i for i, over in enumerate(names)]

    mapped = jax.shard_map(masks, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    bits = jax.device_put(2 ** np.arange(8, dtype="int32"), NamedSharding(mesh, spec))
    program = jax.jit(mapped).lower(bits).compile()
    really = {
        frozenset(frozenset(d for d in range(8) if int(m) >> d & 1) for m in np.asarray(sums))
        for sums in program(bits)
    }
    told = {frozenset(map(frozenset, c.groups)) for c in hlo.collectives(program.as_text() or "")}
    assert told == really


@settings(max_examples=examples(50))
@given(st.data())
def test_groups_over_a_mesh_are_the_devices_that_differ_only_on_the_named_axes(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    names = "abc"[: len(sizes)]
    over = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    count = int(np.prod(sizes))
    devices = data.draw(st.permutations(range(count)))
    listed = ",".join(map(str, devices))
    written = ",".join(f"'{n}'={s}" for n, s in zip(names, sizes, strict=True))
    text = f"mesh[{written}], device_ids=({listed}) {{{','.join(repr(n) for n in over)}}}"
    found = hlo.decoded(text, count)
    grid = np.array(devices).reshape(sizes)
    for group in found:
        at = [np.argwhere(grid == d)[0] for d in group]
        for i, name in enumerate(names):
            seen = {int(place[i]) for place in at}
            assert seen == (set(range(sizes[i])) if name in over else {int(at[0][i])})
    assert sorted(itertools.chain(*found)) == list(range(count))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(2,1,0)", ((0, 4), (2, 6), (1, 5), (3, 7))),
        ("mesh['x'=8] {'x'}", (tuple(range(8)),)),
        ("mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_every_form_of_groups_is_decoded(text: str, groups: Any) -> None:
    assert hlo.decoded(text, 8) == groups


def test_what_gspmd_adds_is_found_with_its_groups() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))

    def f(x: Any) -> Any:
        return (x @ x.T).sum()

    given_ = jax.ShapeDtypeStruct(
        (8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("a", "b"))
    )
    found = hlo.collectives(jax.jit(f).lower(given_).compile().as_text() or "")
    assert found
    assert all(sorted(itertools.chain(*c.groups)) == list(range(8)) for c in found)
    assert {c.group_size for c in found} <= {2, 4, 8}


ASYNC = """
HloModule m, is_scheduled=true, num_partitions=4

FileNames
1 "/home/me/train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%scatter (p: f32[8]) -> f32[2] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add
}

%once (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %ar = f32[8]{0} all-reduce(%q), replica_groups={{0,1},{2,3}}, to_apply=%add, \
metadata={op_name="jit(f)/psum" source_file="old.py" source_line=3}
}

ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  %b = s4[5]{0} parameter(1)
  %start = ((f32[8]{0}), f32[2]{0}, u32[]) async-start(%x), calls=%scatter
  %update = ((f32[8]{0}), f32[2]{0}, u32[]) async-update(%start), calls=%scatter
  %done = f32[2]{0} async-done(%update), calls=%scatter
  %gs = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %ps = (s4[5]{0}, s4[5]{0}, u32[], u32[]) collective-permute-start(%b), \
source_target_pairs={{0,1},{2,3}}, metadata={op_name="a{b}" stack_frame_id=1}
  %pd = s4[5]{0} collective-permute-done(%ps)
  %c1 = f32[8]{0} call(%x), to_apply=%once
  %c2 = f32[8]{0} call(%c1), to_apply=%once
  ROOT %gd = f32[32]{0} all-gather-done(%gs)
}
"""


def test_asynchronous_ones_count_once_with_their_own_bytes() -> None:
    found = {c.kind: c for c in hlo.collectives(ASYNC)}
    assert len(hlo.collectives(ASYNC)) == 4
    scatter, gather = found["reduce-scatter"], found["all-gather"]
    assert (scatter.operand_bytes, scatter.bytes_per_device, scatter.times) == (32, 8, 1)
    assert (gather.operand_bytes, gather.bytes_per_device) == (32, 128)
    assert scatter.groups == gather.groups == ((0, 1, 2, 3),)
    permute = found["collective-permute"]
    assert permute.bytes_per_device == permute.operand_bytes == 3, "5 x 4 bits"
    assert permute.source == "/home/me/train.py:7 (step)"
    assert permute.op_name == "a{b}"


def test_a_computation_that_is_called_twice_counts_twice() -> None:
    [once] = [c for c in hlo.collectives(ASYNC) if c.kind == "all-reduce"]
    assert once.times == 2
    assert once.source == "old.py:3", "the older way of noting lines"


TPU = """
import os
os.environ.update(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-16", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxdist import _mesh as mesh
from jaxdist import cost, hlo
from jaxdist._collectives import TraceNotes
from jaxdist._program.report.explanation import explain_program

for slices in (1, 2):
    description = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:4x4", **({"num_slices": 2} if slices == 2 else {})
    )
    layout = mesh.build(description.devices)
    links = cost.links_of(layout)
    n = layout.num_replicas
    print("links", slices, links.inner.name, links.outer and links.outer.name)

    def step(x):
        shifted = lax.ppermute(x * 3, "replica", [(i, (i + 1) % n) for i in range(n)])
        return lax.psum(x, "replica"), shifted

    mapped = jax.shard_map(
        step, mesh=layout.mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False
    )
    rows = NamedSharding(layout.mesh, P("replica"))
    x = jax.ShapeDtypeStruct((n * 65536,), jnp.float32, sharding=rows)
    text = jax.jit(mapped).lower(x).compile().as_text()
    print("devices", slices, hlo.num_participants(text))
    for c in hlo.collectives(text):
        print(c.kind, slices, c.bytes_per_device, c.group_size, len(c.groups), c.between_slices)
    report = explain_program("step", layout, (), TraceNotes(), text)
    print("sent", slices, report.bytes_sent("inside"), report.bytes_sent("between"))
"""


def test_programs_for_tpus_are_read_and_slices_exchange_the_least_bytes() -> None:
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, "-c", TPU],
        env={**os.environ, "PYTHONPATH": str(jaxdist.__path__[0]) + "/.."},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    printed = [line.split() for line in done.stdout.splitlines()]
    assert ["links", "1", "tpu-v5e-ici", "None"] in printed
    assert ["links", "2", "tpu-v5e-ici", "tpu-v5e-dcn"] in printed
    assert ["devices", "2", "16"] in printed, "written for one slice"
    size = 4 * 65536
    assert ["all-reduce", "1", str(size), "16", "1", "False"] in printed
    assert ["collective-permute", "1", str(size), "16", "1", "False"] in printed
    across = [row for row in printed if row[0] == "all-reduce" and row[-1] == "True"]
    # The one of 256 KiB over two slices: every device sends a 16th to its twin.
    assert across == [["all-reduce", "2", str(size // 16), "2", "16", "True"]]
    assert ["collective-permute", "2", str(size), "2", "2", "True"] in printed
    # Inside: the sum over 16 chips, and the gathering of it; the shift goes both ways.
    assert ["sent", "1", str(2 * 15 / 16 * size + size), "0"] in printed
    assert ["sent", "2", str((2 + 1) * 15 / 16 * size + size), str(size / 16 + size)] in printed
