"""Arguments that are documented and have no effect are told in the log, once."""

import inspect
import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jaxdist
from jaxdist import PerReplica, Variable, tpu
from jaxdist._collectives import options as _communication
from jaxdist._program.arguments import options as _options
from jaxdist._validate import arguments as _validate
from jaxdist.cluster_resolver import ClusterSpec, SimpleClusterResolver, TPUClusterResolver
from jaxdist.compat import v1
from jaxdist.experimental import CommunicationImplementation, CommunicationOptions


def _two() -> Any:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _in_merge() -> None:
    options = jaxdist.RunOptions(donate_argnums=(0,))

    def merge(strategy: Any, x: Any) -> Any:
        return strategy.run(lambda x: x + 1, (x,), options=options)

    _two().run(lambda x: jaxdist.get_replica_context().merge_call(merge, (x,)), (np.ones(2),))


def _check_gradients() -> None:
    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: (w * x).mean())(w)
        return w - jaxdist.get_replica_context().all_reduce("mean", grad)

    x = PerReplica([np.ones(2, np.float32)] * 2)
    options = jaxdist.RunOptions(donate_argnums=(0,))
    _two().check_gradients(step, (np.float32(1), x), options=options)


def _run_with(**entries: Any) -> Callable[[], Any]:
    return lambda: _two().run(lambda: 1, options=jaxdist.RunOptions(**entries))


def _run_op_by_op() -> Any:
    with jax.disable_jit():
        _run_with(
            compiler_options={"xla_cpu_enable_fast_math": True}, saved_program="step.program"
        )()


def _reduce_with(**hints: Any) -> Callable[[], Any]:
    value = PerReplica([np.ones(2), np.ones(2)])
    options = CommunicationOptions(**hints)
    return lambda: _two().reduce("sum", value, axis=None, options=options)


def _accelerators(**given: Any) -> Callable[[], Any]:
    spec = ClusterSpec({"worker": ["a:1"]})
    return lambda: SimpleClusterResolver(spec, num_accelerators={"GPU": 2}).num_accelerators(
        **given
    )


def _tpu_resolver(**given: Any) -> Callable[[], Any]:
    return lambda: TPUClusterResolver("virtual:v5e:1x2", **given)


def _steps_per_run() -> Any:
    return v1.experimental.TPUStrategy(TPUClusterResolver("virtual:v5e:1x2"), steps_per_run=4)


# What is called, and the two words that its line in the log has.
TOLD: dict[tuple[str, str], Callable[[], Any]] = {
    ("strategy.run in a merge function", "options"): _in_merge,
    ("strategy.check_gradients", "donate_argnums"): _check_gradients,
    ("Strategy.group", "name"): lambda: _two().group(PerReplica([1, 2]), name="train"),
    ("Strategy.experimental_make_numpy_dataset", "session"): lambda: (
        _two().experimental_make_numpy_dataset(np.ones(2), session=1)
    ),
    ("StrategyExtended.experimental_make_numpy_dataset", "session"): lambda: (
        _two().extended.experimental_make_numpy_dataset(np.ones(2), session=1)
    ),
    ("strategy.run", "experimental_enable_dynamic_batch_size"): _run_with(
        experimental_enable_dynamic_batch_size=False
    ),
    ("strategy.run", "experimental_bucketizing_dynamic_shape"): _run_with(
        experimental_bucketizing_dynamic_shape=True
    ),
    ("strategy.run", "experimental_xla_options"): _run_with(
        experimental_xla_options=tpu.XLAOptions(use_shardy_partitioner=True)
    ),
    ("strategy.run op by op", "compiler_options"): _run_op_by_op,
    ("strategy.run in a function that JAX compiles", "compiler_options"): lambda: jax.jit(
        _run_with(compiler_options={"xla_cpu_enable_fast_math": True})
    )(),
    ("strategy.run op by op", "saved_program"): _run_op_by_op,
    ("strategy.run in a function that JAX compiles", "saved_program"): lambda: jax.jit(
        _run_with(saved_program="step.program")
    )(),
    ("Strategy.reduce", "timeout_seconds"): _reduce_with(timeout_seconds=3.0),
    ("Strategy.reduce", "implementation"): _reduce_with(
        implementation=CommunicationImplementation.RING
    ),
    ("num_accelerators", "config_proto"): _accelerators(config_proto=object()),
    ("num_accelerators", "task_type"): _accelerators(task_type="worker"),
    ("num_accelerators", "task_id"): _accelerators(task_id=0),
    ("TPUClusterResolver", "zone"): _tpu_resolver(zone="z"),
    ("TPUClusterResolver", "project"): _tpu_resolver(project="p"),
    ("TPUClusterResolver", "credentials"): _tpu_resolver(credentials=1),
    ("TPUClusterResolver", "service"): _tpu_resolver(service=1),
    ("TPUClusterResolver", "discovery_url"): _tpu_resolver(discovery_url="u"),
    ("TPUStrategy", "steps_per_run"): _steps_per_run,
    ("Variable.load", "session"): lambda: Variable(1.0).load(2.0, session=1),
}

_ROWS = jaxdist.IndexedSlices([[1.0, 2.0]], [0])
_GIVEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("assign", "assign_add", "assign_sub"), (np.ones((2, 2)),)),
    **dict.fromkeys((f"scatter_{k}" for k in "add sub mul div min max update".split()), (_ROWS,)),
    **dict.fromkeys(
        (f"scatter_nd_{k}" for k in "add sub min max update".split()), ([[0, 1]], [1.0])
    ),
    "batch_scatter_update": (([[1.0], [2.0]], [[0], [1]]),),
    "sparse_read": ([0],),
    "gather_nd": ([[0]],),
    "is_initialized": (),
}


def _call(method: str, **extra: Any) -> Callable[[], Any]:
    return lambda: getattr(Variable(np.ones((2, 2), np.float32)), method)(*_GIVEN[method], **extra)


def _call_of_slice(method: str) -> Callable[[], Any]:
    return lambda: getattr(Variable([1.0, 2.0])[0], method)(3.0, name="n")


for _method in _GIVEN:
    TOLD[f"Variable.{_method}", "name"] = _call(_method, name="n")
    if "use_locking" in inspect.signature(getattr(Variable, _method)).parameters:
        TOLD[f"Variable.{_method}", "use_locking"] = _call(_method, use_locking=True)
for _method in ("assign", "assign_add", "assign_sub"):
    TOLD[f"Variable.[...].{_method}", "name"] = _call_of_slice(_method)


@pytest.mark.parametrize("row", TOLD, ids=" ".join)
def test_an_argument_without_effect_is_told_once(
    row: tuple[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (_validate, _communication, _options):
        monkeypatch.setattr(place, "_LOGGED", set())
    caller, argument = row
    with caplog.at_level(logging.INFO, "jaxdist"):
        for _ in range(3):
            TOLD[row]()
    lines = [r.getMessage() for r in caplog.records if argument in r.getMessage()]
    assert len(lines) == 1
    assert caller in lines[0]
    assert "no effect" in lines[0]


def test_nothing_is_told_where_nothing_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxdist"):
        for method in _GIVEN:
            _call(method)()
        _two().group(PerReplica([1, 2]))
        _two().run(lambda: 1, options=jaxdist.RunOptions())
        _accelerators()()
        _tpu_resolver()()
    assert "no effect" not in caplog.text


# Of entries of a configuration that belong to another entry, which are checked there.
_ELSEWHERE = {"jobs/_config/schema.py"}


def test_every_argument_that_is_documented_without_effect_is_in_the_table() -> None:
    """An argument in a docstring with the words is one that a row of the table passes."""
    root = pathlib.Path(jaxdist.__file__).parent
    documented = re.compile(r"^ +(\w+): (?:Has no effect|Without effect|.*has no effect)", re.M)
    found = {
        name
        for path in root.rglob("*.py")
        if str(path.relative_to(root)) not in _ELSEWHERE
        for name in documented.findall(path.read_text())
    }
    of_options = {"use_spmd_for_xla_partitioning", "enable_xla_dynamic_padder"}
    of_options |= {"use_shardy_partitioner", "options"}
    told = {argument for _, argument in TOLD}
    assert {"name", "use_locking", "session"} <= found
    assert found - of_options <= told
