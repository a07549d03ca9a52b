"""Every number that `explain` prints, against HLO, XLA's memory analysis, and arrays that exist.

Three models (a perceptron, a convolutional net, a transformer) on three topologies (one device,
eight replicas, four replicas of two logical devices).
"""

import collections
import functools
import gc
import re
from typing import Any, NamedTuple

import jax
import pytest
from flax import nnx

import jaxdist
from jaxdist import Sharded, hlo, jobs

# The smallest models of the jobs, of which XLA still merges and moves collectives.
MODELS = {
    "perceptron": ("configs/tabular_regression.toml", ()),
    "convolutional": ("configs/digits_mirrored.toml", ("model.channels=[4]",)),
    "transformer": (
        "configs/topics_lm_data_parallel.toml",
        (
            "model.layers=1",
            "model.width=32",
            "model.hidden=64",
            "data.sequence_length=16",
            "strategy.whole_below=1024",
        ),
    ),
}
TOPOLOGIES = ("one", "eight", "four_by_two")
ROWS = [(model, topology) for model in MODELS for topology in TOPOLOGIES]
HLO_SIZES = {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "pred": 1, "u8": 1, "s8": 1, "bf16": 2}


def _in_words(num_bytes: int) -> str:
    """Write a size with three digits, in the largest unit of which it has at least one."""
    for power, unit in (30, "GiB"), (20, "MiB"), (10, "KiB"):
        if num_bytes >= 1 << power:
            value = num_bytes / (1 << power)
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes} B"


class Case(NamedTuple):
    """A step of a job, its compiled text, and what `explain` says of it."""

    job: Any
    strategy: jaxdist.Strategy
    rules: str
    executable: Any
    text: str
    report: Any


def make_strategy(topology: str) -> jaxdist.Strategy:
    if topology == "one":
        return jaxdist.OneDeviceStrategy("cpu:0")
    if topology == "eight":
        return jaxdist.MirroredStrategy()
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    return jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))


@functools.cache
def make_case(model: str, topology: str) -> Case:
    path, overrides = MODELS[model]
    job, strategy = jobs.load_job(path, overrides), make_strategy(topology)
    rules = "replicated"
    if topology == "four_by_two":
        rules = "tensor_parallel" if model == "transformer" else "fsdp"
    program = job.lower(strategy, 4, rules)
    compiled = program.compile()
    report = jaxdist.explain(program)
    assert type(report).__name__ == "ProgramReport"
    return Case(job, strategy, rules, compiled.executable, compiled.as_text(), report)


def entry_parameters(text: str) -> list[int]:
    """Bytes of the parameters of the entry computation, read without a reader of jaxdist."""
    entry = text[text.index("\nENTRY ") :]
    shapes = re.findall(r"= (\w+)\[([\d,]*)\]\S* parameter\(\d+\)", entry)
    return [
        HLO_SIZES[dtype]
        * functools.reduce(lambda a, b: a * int(b), filter(None, dims.split(",")), 1)
        for dtype, dims in shapes
    ]


@pytest.mark.parametrize(("model", "topology"), ROWS)
def test_memory_of_a_program_is_that_of_xla(model: str, topology: str) -> None:
    case = make_case(model, topology)
    analysis, memory = case.executable.memory_analysis(), case.report.memory
    assert memory.arguments == analysis.argument_size_in_bytes
    assert memory.results == analysis.output_size_in_bytes
    assert memory.reused == analysis.alias_size_in_bytes
    assert memory.temporaries == analysis.temp_size_in_bytes
    assert memory.code == analysis.generated_code_size_in_bytes
    rows = dict(case.report.rows())
    assert sum(rows.values()) == memory.total
    # What is printed are these numbers, and no others.
    table = case.report.text().split("Arguments, the largest first")[0].splitlines()[2:]
    printed = {
        r[0]: int(r[1].replace(",", "")) for r in (re.split(r" {2,}", x.strip()) for x in table)
    }
    assert printed == {k: n for k, n in rows.items() if n} | {"in all": memory.total}


@pytest.mark.parametrize(("model", "topology"), ROWS)
def test_arguments_of_a_program_are_the_parameters_of_its_hlo(model: str, topology: str) -> None:
    case = make_case(model, topology)
    parameters = collections.Counter(entry_parameters(case.text))
    arguments = collections.Counter(a.leaf.device_bytes for a in case.report.arguments)
    # XLA drops arguments that the step does not use: the counter of an optimizer without schedule.
    dropped = arguments - parameters
    assert parameters - arguments == collections.Counter()
    assert sum(n * count for n, count in parameters.items()) == case.report.memory.arguments
    unused = sum(n * count for n, count in dropped.items())
    assert dict(case.report.rows()).get("arguments: not used", 0) == -unused
    roles = {a.leaf.role for a in case.report.arguments}
    by_role = {role: case.report.argument_bytes(role) for role in roles}
    assert sum(by_role.values()) - unused == case.report.memory.arguments
    assert {"parameters", "optimizer", "batch"} <= roles


@pytest.mark.parametrize(("model", "topology"), ROWS)
def test_donated_arguments_are_those_that_results_reuse(model: str, topology: str) -> None:
    case = make_case(model, topology)
    donated = sum(a.leaf.device_bytes for a in case.report.arguments if a.is_donated)
    header = case.text.splitlines()[0]
    # XLA names each pair of a result and the argument whose memory it takes.
    pairs = re.findall(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}", header)
    assert len(pairs) <= sum(a.is_donated for a in case.report.arguments)
    assert bool(pairs) == case.job.config.training.donate
    assert case.report.memory.reused <= donated
    assert (case.report.memory.reused > 0) == bool(pairs)


@pytest.mark.parametrize(("model", "topology"), ROWS)
def test_collectives_are_the_instructions_of_the_hlo(model: str, topology: str) -> None:
    case = make_case(model, topology)
    rows = case.report.communication.compiled
    found: collections.Counter[str] = collections.Counter()
    for row in rows:
        found[row.kind] += row.count
    kinds = "|".join(hlo.KINDS)
    lines = (re.search(rf" ({kinds})(?:-start)?\(", line) for line in case.text.splitlines())
    assert found == collections.Counter(match[1] for match in lines if match)
    if topology == "one":
        assert not rows
        return
    assert {row.kind for row in rows} >= {"all-reduce"}
    printed = case.report.text()
    for row in rows:
        assert re.search(
            rf"\n  {row.kind} +{row.count} +{row.operands} +{row.num_bytes:,} ", printed
        )


@pytest.mark.parametrize(("model", "topology"), ROWS)
def test_memory_of_arrays_is_that_of_the_arrays_that_exist(model: str, topology: str) -> None:
    case = make_case(model, topology)
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    state = case.job.with_rules(case.rules).build(case.strategy)
    gc.collect()
    made = [x for x in jax.live_arrays() if id(x) not in before]
    # Only arrays on the devices of the strategy: a model is made on one device and placed then.
    report = jaxdist.explain(state, case.strategy)
    measured: collections.Counter[jax.Device] = collections.Counter()
    kept = {id(x) for x in held_arrays(state)}
    for array in (x for x in made if id(x) in kept):
        for shard in array.addressable_shards:
            measured[shard.device] += shard.data.nbytes
    assert len([x for x in made if id(x) in kept]) == len(report.leaves)
    assert {d: report.bytes_on(d) for d in report.devices} == dict(measured)
    assert {d: report.bytes_on(d) for d in report.devices} == {
        d: sum(report.bytes_on(d, r) for r in ("parameters", "optimizer", "other"))
        for d in report.devices
    }
    for leaf, array in zip(report.leaves, held_arrays(state), strict=True):
        assert {s.device: s.num_bytes for s in leaf.shards} == {
            s.device: s.data.nbytes for s in array.addressable_shards
        }
        assert leaf.device_bytes == max(s.data.nbytes for s in array.addressable_shards)
    text = report.text()
    total = max(measured.values())
    assert re.search(rf"\n  cpu:0.* {re.escape(_in_words(total))}\n", text)
    for leaf in report.leaves:
        if f"  {leaf.name} " in text:
            sizes = f"{_in_words(leaf.num_bytes)} +{_in_words(leaf.device_bytes)}"
            cells = rf"{re.escape(leaf.array)} .* {sizes} "
            assert re.search(rf"  {re.escape(leaf.name)} +{cells}", text)


def held_arrays(state: Any) -> list[jax.Array]:
    """The arrays of NNX objects, in the order of their graphs."""
    found: list[jax.Array] = []
    seen: set[int] = set()
    for node in state:
        for _, variable in nnx.iter_graph(node):
            if isinstance(variable, nnx.Variable):
                value = variable.get_raw_value()
                array = value.held if isinstance(value, Sharded) else value
                if isinstance(array, jax.Array) and id(array) not in seen:
                    seen.add(id(array))
                    found.append(array)
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_arguments_of_the_step_are_the_arrays_that_the_model_has(topology: str) -> None:
    case = make_case("perceptron", topology)
    state = case.job.with_rules(case.rules).build(case.strategy)
    report = jaxdist.explain(state, case.strategy)
    one = report.devices[0]
    for role in ("parameters", "optimizer"):
        assert report.bytes_on(one, role) == case.report.argument_bytes(role)
