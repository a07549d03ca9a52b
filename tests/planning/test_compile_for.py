"""Plans of steps, against counts by hand on descriptions of real slices."""

import collections
import concurrent.futures
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import _mesh, _reports, cost, errors, partition, tpu
from jaxdist._planning import planner
from jaxdist._planning.slice_axes import Axes, assign_slices
from jaxdist._planning.slices import find_logical_shape, list_counts
from jaxdist._program.report.compiled_program import CompiledProgram
from jaxdist.cluster_resolver import TPUClusterResolver
from jaxdist.tpu.experimental import DeviceAssignment

pytest.importorskip("libtpu")

LAYERS, WIDTH, ROWS = 3, 128, 4
TX = optax.adam(1e-3)
BYTES = LAYERS * WIDTH * WIDTH * 4


def loss_of(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(params: Any, state: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    loss, grads = jaxdist.get_replica_context().all_reduce("mean", (loss, grads))
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def abstract_args(replicas: int, rows: int = ROWS, width: int = WIDTH) -> tuple[Any, ...]:
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32) for _ in range(LAYERS)]
    whole: Any = jax.ShapeDtypeStruct((replicas * rows, width), jnp.float32)
    return params, jax.eval_shape(TX.init, params), jaxdist.PerReplica.of_global(whole)


def lowered() -> jaxdist.Program:
    return jaxdist.MirroredStrategy().lower(step, abstract_args(8))


@pytest.fixture(scope="module")
def two_slices() -> _reports.SlicePlan:
    return lowered().compile_for("v5e:2x2*2", global_batch=16)


def test_memory_flops_and_traffic_are_those_counted_by_hand(two_slices: _reports.SlicePlan) -> None:
    plan = two_slices
    assert (plan.num_chips, plan.num_replicas, plan.num_logical, plan.num_slices) == (8, 8, 1, 2)
    assert (plan.rows_per_replica, plan.global_rows) == (2, 16)
    assert plan.memory.parameters == BYTES
    assert plan.memory.optimizer == 2 * BYTES + 4  # and a count
    assert plan.memory.batch == 2 * WIDTH * 4
    assert plan.memory.capacity == 16 << 30
    assert plan.memory.fits
    assert plan.memory.results is not None
    assert plan.memory.results >= 3 * BYTES
    # A product forward and two backward in each layer, but for the gradient of the batch.
    assert plan.flops == (3 * LAYERS - 1) * 2 * 2 * WIDTH * WIDTH
    # In a slice each of 4 holds all, and sends 3/4 of it twice in any order of operations; between
    # 2 slices there is one exchange of at least 1/4 of it.
    assert math.isclose(plan.bytes_sent("ICI"), 2 * 3 / 4 * BYTES, rel_tol=0.01)
    assert math.isclose(plan.bytes_sent("DCN"), BYTES / 4, rel_tol=0.02)


def test_times_are_work_over_peaks(two_slices: _reports.SlicePlan) -> None:
    plan, chip = two_slices, cost.CHIPS["v5e"]
    times = plan.times
    assert times is not None
    assert plan.flops is not None
    assert plan.hbm_traffic is not None
    assert times.compute == plan.flops / chip.flops
    assert times.hbm == plan.hbm_traffic / chip.hbm_bytes_per_second
    assert times.inner == plan.bytes_sent("ICI") / chip.inner_bytes_per_second
    assert times.outer == plan.bytes_sent("DCN") / chip.outer_bytes_per_second
    assert times.bound == max(times.compute, times.hbm, times.inner, times.outer)
    assert times.predicted >= times.bound
    # State is read and written once at least.
    assert plan.hbm_traffic >= 2 * 3 * BYTES
    assert plan.efficiency is not None
    assert 0 < plan.efficiency < 1


def test_a_plan_prints_everything_and_says_that_nothing_was_measured(
    two_slices: _reports.SlicePlan, tmp_path: Any
) -> None:
    text = two_slices.text()
    for words in (
        "8 chips, 8 replicas x 1 logical device",
        "parameters",
        "optimizer",
        "It fits.",
        "all-reduce",
        "DCN",
        "Scaling efficiency",
        "slice 1, z = 0",
        _reports.CAVEAT,
    ):
        assert words in text
    assert repr(two_slices) == text
    assert re.search("<pre[^>]*monospace[^>]*>Assignment", two_slices._repr_html_())
    written = two_slices.figure(tmp_path / "plan.png")
    assert written.read_bytes().startswith(b"\x89PNG")


def test_what_is_not_understood_of_a_program_stands_before_the_numbers_that_are_too_small() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.lax.while_loop(lambda x: jnp.sum(x) < 7, lambda x: x @ w, x)
        return jnp.linalg.cholesky(x.T @ x)

    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    rows = jax.ShapeDtypeStruct((8 * WIDTH, WIDTH), jnp.float32)
    program = jaxdist.MirroredStrategy().lower(step, (w, jaxdist.PerReplica.of_global(rows)))
    lines = program.compile_for("v5e:2x2", global_batch=4 * WIDTH).text().splitlines()
    assert "Work and times below are too small" in lines[1]
    gaps = [line for line in lines[2:] if line.startswith("  ")][:2]
    assert "with an unknown number of iterations: work and bytes of one" in gaps[0]
    assert "cholesky" in gaps[1].lower()
    text = "\n".join(lines)
    for number in ("Work of a step: at least", "Predicted: at least", "Expected: at least"):
        assert number in text
    assert "at least" not in lowered().compile_for("v5e:2x2").text().replace(
        "A step takes at least", ""
    ).replace("; at least", "")


def test_the_picture_shows_each_replica_where_its_device_is() -> None:
    topology = tpu.slice_of("v4:2x2x2").topology
    build = tpu.experimental.DeviceAssignment.build
    assignment = build(topology, [1, 1, 1, 2], num_replicas=8)
    places = _reports.Places.from_assignment(assignment, 1)
    picture = _reports.Picture(places, "eight")
    replicas, logical = picture.grid.replicas, picture.grid.logical
    for r, part in np.ndindex(8, 2):
        assert replicas[assignment.coordinates(r, part)] == r
        assert logical[assignment.coordinates(r, part)] == part
    assert "0.0,0.1" in "\n".join(picture.grid.lines())


def test_a_title_that_is_wider_than_the_panels_is_drawn_whole(tmp_path: pathlib.Path) -> None:
    topology = tpu.slice_of("v5e:2x2").topology
    assignment = tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 1], num_replicas=4)
    places = _reports.Places.from_assignment(assignment, 1)
    widths = []
    for title in ("short", "a long title " * 10):
        path = _reports.Picture(places, title).draw(tmp_path / "plan.png")
        # The width is in the header of a PNG.
        widths.append(int.from_bytes(path.read_bytes()[16:20], "big"))
    assert widths[1] > 1.5 * widths[0]


class Net(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.layer(x))


def nnx_step(net: Net, optimizer: Any, x: jax.Array, scale: str) -> jax.Array:
    def loss(net: Net) -> jax.Array:
        return jnp.mean(net(x) ** 2)

    value, grads = nnx.value_and_grad(loss)(net)
    replica = jaxdist.get_replica_context()
    optimizer.update(net, replica.all_reduce(scale, grads))
    return replica.all_reduce(scale, value)


def test_nnx_objects_are_planned_from_arrays_and_from_shapes_alike() -> None:
    def made() -> tuple[Net, Any]:
        net = Net()
        return net, nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    strategy = jaxdist.MirroredStrategy()
    x: Any = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    plans = [
        strategy.lower(nnx_step, (*make(), jaxdist.PerReplica.of_global(x), "mean"))
        for make in (made, lambda: nnx.eval_shape(made))
    ]
    concrete, abstract = (program.compile_for("v5e:2x2", quick=True) for program in plans)
    assert concrete.text() == abstract.text()
    of_params = 4 * (WIDTH * WIDTH + 3 * WIDTH)
    assert concrete.memory.parameters == of_params
    assert of_params <= concrete.memory.optimizer <= of_params + 8  # and a count
    assert concrete.memory.other_state == 2 * 4 * WIDTH  # statistics


COLUMNS = 1 << 20


def scaled_step(w: Any, state: Any, x: Any) -> Any:
    """Cheap to compile, whatever the batch."""
    grads = jaxdist.get_replica_context().all_reduce("mean", jnp.mean(jnp.tanh(x * w[None]), 0))
    updates, state = TX.update(grads, state, w)
    return optax.apply_updates(w, updates), state


def test_what_does_not_fit_is_told_with_what_would_help() -> None:
    rows = 8192
    w = jax.ShapeDtypeStruct((COLUMNS,), jnp.float32)
    x: Any = jax.ShapeDtypeStruct((rows, COLUMNS), jnp.float32)
    args = (w, jax.eval_shape(TX.init, w), jaxdist.PerReplica.of_global(x))
    program = jaxdist.OneDeviceStrategy("cpu:0").lower(scaled_step, args)
    plan = program.compile_for("v5e:1x2")
    assert not plan.memory.fits
    assert plan.times is None
    assert plan.memory.batch == 4 * rows * COLUMNS
    assert plan.memory.peak is not None
    assert plan.memory.peak > plan.memory.limit
    donating, sharded, fsdp, batch = plan.advice
    assert "donate_argnums" in donating
    assert "12 MiB less" in donating
    assert "4 MiB less" in sharded
    assert "6 MiB less" in fsdp
    smaller = int(batch.split()[3].replace(",", ""))
    # The batch takes nearly all of the memory.
    assert 0.8 * plan.memory.limit < 4 * smaller * COLUMNS < plan.memory.limit
    assert batch.endswith("and fits.")
    assert "It does not fit: it needs 3" in plan.text()
    quick = program.compile_for("v5e:1x2", quick=True)
    assert quick.advice == plan.advice[:3]


def split_step(w: Any, x: Any) -> Any:
    w = jax.lax.with_sharding_constraint(w, jax.P(None, "logical"))
    return jnp.mean(jaxdist.get_replica_context().all_reduce("mean", x @ w))


def test_logical_devices_share_the_work_of_a_replica() -> None:
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    x: Any = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    strategy = jaxdist.MirroredStrategy()
    program = strategy.lower(split_step, (w, jaxdist.PerReplica.of_global(x)))
    with strategy.scope():  # which is not that of the plan
        whole, quarter = (program.compile_for("v5e:4x4", logical=n, quick=True) for n in (1, "2x2"))
    assert (quarter.num_replicas, quarter.num_logical) == (4, 4)
    assert whole.flops == 2 * ROWS * WIDTH * WIDTH
    assert quarter.flops == whole.flops // 4
    assert "replica.logical device" in quarter.text()


def test_the_program_of_a_replica_does_not_grow_with_the_replicas() -> None:
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    x: Any = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    program = jaxdist.MirroredStrategy().lower(split_step, (w, jaxdist.PerReplica.of_global(x)))
    few, many = (program.compile_for(name, quick=True) for name in ("v5p:2x2x1", "v5p:8x8x8"))
    assert (few.num_chips, many.num_chips) == (4, 512)
    assert few.flops == many.flops
    assert few.memory.parameters == many.memory.parameters
    assert [t.kind for t in few.traffic] == [t.kind for t in many.traffic] == ["all-reduce"]
    assert many.traffic[0].devices == 512


@given(
    st.sampled_from(["v4:2x2x2", "v5e:4x4", "v5p:4x4x8", "v5e:4x4*2", "v2:4x4"]), st.integers(1, 64)
)
@settings(deadline=None)
def test_a_number_of_logical_devices_is_a_box_that_divides_a_slice_or_an_error(
    name: str, number: int
) -> None:
    described = tpu.slice_of(name)
    x, y, z, cores = described.topology.mesh_shape.tolist()
    within = (x, y, z // described.num_slices, cores)
    possible = {
        math.prod(box)
        for box in np.ndindex(*(n + 1 for n in within))
        if all(box) and all(n % b == 0 for n, b in zip(within, box, strict=True))
    }
    assert set(list_counts(described.topology, described.num_slices)) == possible
    if number not in possible:
        with pytest.raises(errors.TopologyError, match="Use one of the numbers"):
            find_logical_shape(described.topology, described.num_slices, number)
        return
    box = find_logical_shape(described.topology, described.num_slices, number)
    assert math.prod(box) == number
    assert all(n % b == 0 for n, b in zip(within, box, strict=True))


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("v5e:4x4", {"logical": "3x1"}, errors.TopologyError, "divides the slice"),
    ("v5e:4x4", {"logical": "8x1"}, errors.TopologyError, "Use one of 2x4x1x1, 4x2x1x1"),
    ("v5e:4x4", {"logical": 7}, errors.TopologyError, "one of the numbers 1, 2, 4, 8"),
    ("v5e:4x4", {"logical": "2by2"}, errors.TopologyError, "or a shape of chips"),
    ("v5e:4x4", {"logical": "2x0"}, errors.TopologyError, "each 1 or more"),
    ("v5e:4x4", {"logical": (1, 1, 1, 1, 4)}, errors.TopologyError, "It has 2 to 4 sizes"),
    ("v5e:4x4", {"logical": 0}, errors.TopologyError, "1 logical device or more"),
    ("v5e:4x4", {"logical": 2.0}, errors.ArgumentTypeError, "type float"),
    ("v5e:4x4", {"global_batch": 33}, errors.ArgumentError, "Use 32 or 48"),
    ("v5e:16x32", {}, errors.TopologyError, "largest slice of v5e has 256"),
    ("v5e:3x4", {}, errors.TopologyError, "nearest slices"),
    ("v9:2x2", {}, errors.TopologyError, "The generations are v2"),
    ("local", {}, errors.ArgumentError, "TPUs or GPUs that this machine does not have"),
]


@pytest.mark.parametrize(("topology", "more", "error", "words"), BAD)
def test_what_cannot_be_planned_is_refused_with_what_can(
    topology: str, more: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        lowered().compile_for(topology, **more)


@pytest.mark.parametrize(
    ("broken", "words"),
    [("compile", "the compiler failed"), ("as_text", "cannot read what the compiler wrote")],
)
def test_what_the_compiler_cannot_do_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, broken: str, words: str
) -> None:
    def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nand more")

    def compiled(program: jaxdist.Program) -> Any:
        executable: Any = SimpleNamespace(as_text=fail)
        return CompiledProgram(program, executable)

    replaced: Any = fail if broken == "compile" else compiled
    monkeypatch.setattr(jaxdist.Program, "compile", replaced)
    with pytest.raises(errors.DeviceError, match=f"TPU v5 lite: .*{words}.*RET_CHECK failure\n"):
        lowered().compile_for("v5e:2x2", quick=True)


def test_a_plan_that_fails_leaves_no_compilation_on_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process would abort if it ended while XLA compiles on a thread."""
    ended = []

    def fail(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    def compile_slowly(*_: Any) -> Any:
        with pytest.raises(TimeoutError):
            concurrent.futures.Future[None]().result(timeout=0.2)
        ended.append(True)

    monkeypatch.setattr(planner, "compile_or_get_refusal", fail)
    monkeypatch.setattr(planner, "compile_needs", compile_slowly)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RET_CHECK"):
        lowered().compile_for("v5e:2x2")
    assert ended == [True]


def test_a_bare_topology_has_no_generation() -> None:
    with pytest.raises(errors.ArgumentTypeError, match="the generation of the TPU"):
        lowered().compile_for(tpu.slice_of("v5e:4x4").topology)


def _with_variable() -> jaxdist.Program:
    strategy = jaxdist.MirroredStrategy()
    with strategy.scope():
        total = jaxdist.Variable(0.0, name="total")
    return strategy.lower(lambda x: x + total.read_value(), (1.0,))


def _deterministic() -> jaxdist.Program:
    return jaxdist.MirroredStrategy(deterministic=True).lower(lambda x: x, (1.0,))


def _uneven() -> jaxdist.Program:
    values = [np.ones(1 + i % 2, "float32") for i in range(8)]
    return jaxdist.MirroredStrategy().lower(lambda x: x.sum(), (jaxdist.PerReplica(values),))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_with_variable, "variable total"),
        (_deterministic, "deterministic=True"),
        (_uneven, "different shapes"),
    ],
)
def test_steps_that_belong_to_one_strategy_are_refused(
    make: Callable[[], jaxdist.Program], words: str
) -> None:
    with pytest.raises(errors.ArgumentError, match=words):
        make().compile_for("v5e:2x2")


def on_mesh(shape: tuple[int, ...], names: str, replica_axes: str) -> jaxdist.MirroredStrategy:
    own = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), tuple(names))
    return jaxdist.MirroredStrategy(mesh=own, replica_axes=tuple(replica_axes))


def test_state_in_pieces_within_a_slice_is_planned_for_slices() -> None:
    strategy = on_mesh((2, 4), "sd", "sd")

    def made() -> tuple[Net, Any]:
        net = Net()
        return net, nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    net, optimizer = nnx.eval_shape(made)
    partition.place(strategy, (net, optimizer), partition.fsdp(min_bytes=4 * WIDTH**2, axes=("d",)))
    x: Any = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
    program = strategy.lower(nnx_step, (net, optimizer, jaxdist.PerReplica.of_global(x), "mean"))
    plan = program.compile_for("v5p:2x2x2*3", quick=True)
    assert plan.num_replicas == 24
    kernel, small = 4 * WIDTH**2, 4 * 3 * WIDTH
    assert plan.memory.parameters == kernel // 8 + small
    # Pieces, and small arrays with padding, are all-reduced: of three slices 2/3 are sent twice.
    across = plan.bytes_sent("DCN") / (2 * 2 / 3)
    assert kernel // 8 + small // 8 <= across < kernel // 4
    # The ring of the assignment begins in the first slice and ends there; the axis does not.
    slices = plan.places.coordinates[:, 0, 2] // 2
    assert slices.tolist() == [0] * 8 + [1] * 8 + [2] * 8


@given(
    st.sampled_from(["a", "ab", "abc", "ba", "cab"]),
    st.permutations("abcd"),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
)
def test_axes_over_a_slice_keep_its_replicas_in_order(
    replica: str, names: list[str], kept: int, logical: int
) -> None:
    layout = _mesh.build(jax.devices(), num_logical=logical)
    sizes = dict.fromkeys(names, kept)
    of_logical = [name for name in names if name not in replica]
    sizes |= dict.fromkeys(of_logical, 1) | {of_logical[-1]: logical}
    axes = Axes(tuple(names), tuple(replica), sizes)
    before = math.prod(kept for _ in replica[:-1])
    if layout.num_replicas % before:
        with pytest.raises(errors.ArgumentError, match=f"a multiple of {before} replicas"):
            axes.apply(layout, 1)
        return
    made = axes.apply(layout, 1)
    assert made.mesh.axis_names == tuple(names)
    assert made.replica_axes == tuple(replica)
    assert (made.device_grid == layout.device_grid).all()
    assert all(made.mesh.shape[name] == kept for name in replica[:-1])
    assert axes.single_device.apply(_mesh.build(jax.devices()[:1]), 1).num_replicas == 1


@pytest.mark.parametrize(
    ("strategy", "topology", "more", "words"),
    [
        (((2, 4), "ab", "ab"), "v5e:1x1", {}, "1 replicas .* a multiple of 2 replicas"),
        (((2, 2, 2), "abc", "abc"), "v5e:1x1*3", {}, "3 for 'a', 2 for 'b'.* a multiple of 6"),
        (((2, 2, 2), "abc", "a"), "v5e:4x4", {"logical": 2}, "'b' of 2, 'c' of 2.* a shape of 4"),
    ],
)
def test_axes_that_a_slice_cannot_have_are_refused(
    strategy: Any, topology: str, more: dict[str, Any], words: str
) -> None:
    program = on_mesh(*strategy).lower(lambda x: x, (1.0,))
    with pytest.raises(errors.ArgumentError, match=f"(?s){words}"):
        program.compile_for(topology, **more)


def test_axis_names_of_the_strategy_stay() -> None:
    data = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    strategy = jaxdist.MirroredStrategy(mesh=data, replica_axes=("data",))
    program = strategy.lower(lambda x: jax.lax.psum(x, "data"), (np.ones(256, "float32"),))
    plan = program.compile_for(tpu.slice_of("v5e:2x2"), quick=True)
    assert plan.traffic[0].devices == 4


def test_a_program_that_lower_did_not_make_cannot_be_planned() -> None:
    with pytest.raises(errors.ContextError, match="that strategy"):
        dataclasses.replace(lowered(), planner=None).compile_for("v5e:2x2")


def _gather_and_scatter(x: Any) -> Any:
    axes = jaxdist.get_replica_context().strategy.replica_axes
    whole = jax.lax.all_gather(x, axes, axis=0, tiled=True)
    return jax.lax.psum_scatter(jnp.sin(whole), axes, scatter_dimension=0, tiled=True)


# What the reduce-scatter becomes: two stages, one operation, or an all-reduce.
@pytest.mark.parametrize(
    ("name", "chips", "made"),
    [
        ("v5p:4x4x4", 64, "2 reduce-scatter"),
        ("v5e:2x2", 4, "1 reduce-scatter"),
        ("v5p:2x2x4", 16, "1 all-reduce"),
    ],
)
def test_a_plan_says_which_collectives_became_all_reduces_and_what_it_costs(
    name: str, chips: int, made: str
) -> None:
    x: Any = jax.ShapeDtypeStruct((8 * 64, 1024), jnp.float32)
    args = (jaxdist.PerReplica.of_global(x),)
    program = jaxdist.MirroredStrategy().lower(_gather_and_scatter, args)
    plan = program.compile_for(name, quick=True)
    kinds: dict[str, float] = collections.defaultdict(float)
    for row in plan.traffic:
        kinds[row.kind] += row.bytes_sent
    sent = (chips - 1) * 64 * 1024 * 4
    if "reduce-scatter" in made:
        assert (kinds, plan.notes) == ({"all-gather": sent, "reduce-scatter": sent}, ())
    else:
        assert kinds == {"all-gather": sent, "all-reduce": 2 * sent}
        more = _reports.size(sent)
        what = "The compiler replaced reduce-scatters of the step with 1 all-reduce"
        assert plan.notes == (f"{what}: a device sends {more} more.",)
    described = jaxdist.TPUStrategy(TPUClusterResolver(f"described:{name}"))
    whole: Any = jax.ShapeDtypeStruct((chips * 64, 1024), jnp.float32)
    lowered = described.lower(_gather_and_scatter, (jaxdist.PerReplica.of_global(whole),))
    became = {row.kind: row.became for row in lowered.explain().asked}
    assert became == {"all_gather": "1 all-gather", "reduce_scatter": made}


@pytest.mark.parametrize("slices", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("name", "box"),
    [("v5e:2x2", (1, 1, 1, 1)), ("v5e:2x4", (2, 1, 1, 1)), ("v4:2x2x2", (1, 2, 1, 2))],
)
def test_each_slice_has_the_replicas_of_one_slice_and_no_ring_is_missed(
    name: str, box: tuple[int, ...], slices: int, caplog: pytest.LogCaptureFixture
) -> None:
    one = tpu.slice_of(name).topology
    count = int(np.prod(one.mesh_shape) // np.prod(box))
    alone = DeviceAssignment.build(one, list(box), num_replicas=count).core_assignment
    topology = tpu.slice_of(f"{name}*{slices}").topology
    found = assign_slices(topology, box, slices).core_assignment
    for index, mine in enumerate(np.split(found, slices)):
        np.testing.assert_array_equal(mine - [0, 0, index * one.mesh_shape[2], 0], alone)
    assert "ring" not in caplog.text
