"""Every analysis over every primitive of JAX that holds programs.

An analysis is sound where a result that depends on a marked input is marked itself. A class that
says nothing about one of these primitives fails here by name.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

import jaxdist
from jaxdist._keras.forward.aligned import _Varies
from jaxdist._keras.forward.states import _Evaluation, _Reads
from jaxdist._parameter_server.closures.row_pieces import RowInterpreter
from jaxdist._parameter_server.closures.trace import Origin as Source
from jaxdist._parameter_server.closures.trace import SourceAnalysis
from jaxdist._program.jaxprs.interpreter import HIGHER_ORDER, ForwardAnalysis, Interpreter, rule_for
from jaxdist._program.logical.logical_device import MarkAnalysis
from jaxdist._program.proof.dependence import (
    Dependence,
    DependenceAnalysis,
    Part,
    UpdateAnalysis,
    WeightedSums,
)
from jaxdist._program.proof.divided import DividedValues
from jaxdist._program.proof.from_zero import MarkedInputs, TwoRuns
from jaxdist._program.proof.local_pieces import Local, LocalPieces
from jaxdist._program.proof.made_of_nothing import UNKNOWN, NothingAnalysis, Origin
from jaxdist._program.proof.moments import Trial
from jaxdist._program.proof.pieces import ShardFact, ShardingProof
from jaxdist._program.proof.reduced_gradients import Reduced, ReducedGradients
from jaxdist._program.proof.replication import NONE, ReplicationAnalysis
from jaxdist._program.proof.same_work import SameWorkAnalysis
from jaxdist._program.proof.uneven_mean import _Means
from jaxdist._program.state.constant_additions import _Additions
from jaxdist._program.uneven.joined_ops import FlatList
from jaxdist._program.virtual.device import OneReplica
from jaxdist._update.rules import PieceInterpreter
from jaxdist._update.values import Whole
from jaxdist.errors import UnsupportedError

AXES = frozenset({"replica"})
MATRIX = np.diag([2.0, 3.0, 4.0, 5.0]).astype(np.float32)


def _custom_jvp(x: Any, y: Any) -> Any:
    @jax.custom_jvp
    def f(a: Any, b: Any) -> Any:
        return a * 2, b + 1

    f.defjvp(lambda p, t: (f(*p), t))
    return f(x, y)


def _custom_vjp(x: Any, y: Any) -> Any:
    @jax.custom_vjp
    def f(a: Any, b: Any) -> Any:
        return a * 2, b + 1

    f.defvjp(lambda a, b: (f(a, b), None), lambda _, g: g)
    return f(x, y)


def _shard_map(x: Any, y: Any) -> Any:
    mesh = jax.make_mesh((1,), ("inner",), devices=jax.devices()[:1])
    spec = PartitionSpec()
    return jax.shard_map(
        lambda a, b: (a * 2, b + 1), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )(x, y)


def _linear_solve(x: Any, y: Any) -> Any:
    def solve(rows: Any) -> Any:
        return lax.custom_linear_solve(
            lambda v: MATRIX @ v, rows, lambda _, b: b / jnp.diag(MATRIX), symmetric=True
        )

    return solve(x), y + 1


# For each rule: a step whose first result depends only on `x`, and its second only on `y`.
STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda x, y: jax.jit(lambda a, b: (a * 2, b + 1))(x, y),
    "remat": lambda x, y: jax.checkpoint(lambda a, b: (a * 2, b + 1))(x, y),
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "shard_map": _shard_map,
    "scan": lambda x, y: lax.scan(lambda c, _: ((c[0] * 2, c[1] + 1), None), (x, y), length=3)[0],
    "while": lambda x, y: lax.while_loop(
        lambda s: s[2] < 3, lambda s: (s[0] * 2, s[1] + 1, s[2] + 1), (x, y, 0)
    )[:2],
    "cond": lambda x, y: lax.cond(
        jnp.float32(1.0) > lax.stop_gradient(jnp.float32(0.5)) + 0 * MATRIX[0, 0],
        lambda a, b: (a * 2, b + 1),
        lambda a, b: (a + 1, b * 2),
        x,
        y,
    ),
    "custom_linear_solve": _linear_solve,
}
X, Y = np.arange(1, 5, dtype=np.float32), np.arange(4, dtype=np.float32)


def _program(step: str) -> Any:
    return jax.make_jaxpr(STEPS[step])(X, Y)


def _layout() -> Any:
    return jaxdist.MirroredStrategy(jax.devices()[:2]).layout


# For each analysis: the analysis, the facts of a marked and an unmarked input, and is_marked(fact).
ANALYSES: dict[type, Callable[[], tuple[Any, Any, Any, Callable[[Any], bool]]]] = {
    ReplicationAnalysis: lambda: (ReplicationAnalysis(AXES), AXES, NONE, bool),
    DependenceAnalysis: lambda: (
        DependenceAnalysis(),
        Dependence.SAME,
        Dependence.FREE,
        lambda f: f is not Dependence.FREE,
    ),
    WeightedSums: lambda: (
        WeightedSums(),
        Dependence.SAME,
        Dependence.FREE,
        lambda f: f is not Dependence.FREE,
    ),
    SourceAnalysis: lambda: (
        SourceAnalysis(),
        Source(frozenset({0}), 0),
        Source(frozenset({1}), 1),
        lambda f: 0 in f.sources,
    ),
    UpdateAnalysis: lambda: (
        UpdateAnalysis(),
        Part.ITSELF,
        Part.DATA,
        lambda f: f not in (Part.CONSTANT, Part.DATA),
    ),
    ShardingProof: lambda: (
        ShardingProof(_layout(), AXES),
        ShardFact(AXES),
        ShardFact(NONE),
        lambda f: bool(f.differs),
    ),
    NothingAnalysis: lambda: (
        NothingAnalysis(AXES, lambda *_: None),
        type(UNKNOWN)(nan=Origin("div", "a line")),
        UNKNOWN,
        lambda f: f.nan is not None,
    ),
    MarkedInputs: lambda: (MarkedInputs(), True, False, bool),
    SameWorkAnalysis: lambda: (SameWorkAnalysis(AXES), 1, 0, lambda f: bool(f & 1)),
    _Additions: lambda: (_Additions(AXES), 4, 0, lambda f: bool(f & 4)),
    ReducedGradients: lambda: (
        ReducedGradients(),
        Reduced(is_mean=True),
        Reduced(),
        lambda f: f.is_mean,
    ),
    _Varies: lambda: (_Varies(AXES, frozenset()), AXES, NONE, bool),
    _Reads: lambda: (_Reads(), frozenset({("old", 0)}), frozenset(), bool),
}
# An unmarked result is sound there: a lost mark changes a layout or leaves out a warning, but never
# changes a value.
NOT_SOUND = (DividedValues, MarkAnalysis, _Means)
# Interpreters that compute values. The test compares each with JAX.
COMPUTING = {LocalPieces, OneReplica, PieceInterpreter, TwoRuns, _Evaluation}
# A trial of random numbers is a proof by itself (`test_state.py`); a list of operations has none.
# Rows of a shard have tests against whole optimizers (`tests/parameter_server/closures`).
OTHERS = {Trial, FlatList, RowInterpreter}


def _classes(root: type = Interpreter) -> Iterator[type]:
    for one in root.__subclasses__():
        if one.__module__.startswith("jaxdist."):
            yield one
        yield from _classes(one)


def _label(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


def test_every_class_of_the_contract_is_tried_here() -> None:
    found = set(_classes()) - {ForwardAnalysis}
    listed = {*ANALYSES, *NOT_SOUND} | COMPUTING | OTHERS
    assert {c.__name__ for c in found - listed} == set()


def test_every_rule_has_a_step() -> None:
    tried = {rule_for(e) for step in STEPS for e in _program(step).jaxpr.eqns} - {None}
    assert tried == set(HIGHER_ORDER.values())


@pytest.mark.parametrize("rule", sorted(set(HIGHER_ORDER.values())))
@pytest.mark.parametrize("analysis", [*ANALYSES, *NOT_SOUND], ids=_label)
def test_analysis_says_what_it_makes_of_each_primitive(analysis: type, rule: str) -> None:
    is_default = getattr(analysis, rule) is getattr(Interpreter, rule) and rule != "call"
    primitives = sorted(name for name, its in HIGHER_ORDER.items() if its == rule)
    assert not is_default, (
        f"{analysis.__name__} has no rule for {', '.join(primitives)}: "
        f"inherit ForwardAnalysis.{rule}, write one, or say `{rule} = operation`"
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("analysis", ANALYSES, ids=_label)
def test_result_that_depends_on_a_marked_input_is_marked(analysis: type, step: str) -> None:
    made, marked, other, is_marked = ANALYSES[analysis]()
    program = _program(step)
    assert is_marked(made.run(program, [marked, other])[0])
    assert is_marked(made.run(program, [other, marked])[1])


@pytest.mark.parametrize("step", [s for s in STEPS if s != "shard_map"])
def test_replication_is_exact_for_what_it_takes_apart(step: str) -> None:
    found = ReplicationAnalysis(AXES).run(_program(step), [AXES, NONE])
    assert [bool(f) for f in found] == [True, False]


def _two_runs(program: Any) -> list[Any]:
    runs = TwoRuns(set(program.jaxpr.outvars) | {v for e in program.jaxpr.eqns for v in e.outvars})
    return [real for real, _ in runs.run(program, [(X, X), (Y, None)])]


def _local_pieces(program: Any) -> list[Any]:
    runs = LocalPieces(ShardingProof(_layout(), AXES))
    return [x.array for x in runs.run(program, [Local(ShardFact(NONE), x) for x in (X, Y)])]


def _one_replica(program: Any) -> list[Any]:
    turns = type("Device", (), {"axes": AXES, "layout": _layout()})()
    return OneReplica(0, turns).run(program, [X, Y])


def _pieces(program: Any) -> list[Any]:
    runs = PieceInterpreter(_layout())
    return [v.whole() for v in runs.run(program, [Whole(x, _layout()) for x in (X, Y)])]


def _evaluation(program: Any) -> list[Any]:
    rows: Any = None  # It is for marks alone, which these programs do not have.
    return _Evaluation(rows).run(program, [X, Y])


RUNS = [
    (run, step)
    for run in (_two_runs, _local_pieces, _one_replica, _pieces, _evaluation)
    for step in STEPS
    if (run, step) != (_one_replica, "shard_map")
]


@pytest.mark.parametrize(("run", "step"), RUNS, ids=lambda v: getattr(v, "__name__", v))
def test_what_computes_gives_what_jax_gives(run: Callable[[Any], Any], step: str) -> None:
    program = _program(step)
    expected = jaxpr_as_fun(program)(X, Y)
    for made, wanted in zip(run(program), expected, strict=True):
        np.testing.assert_allclose(made, wanted, rtol=1e-6)


def test_virtual_replica_refuses_a_mesh_by_name() -> None:
    with pytest.raises(UnsupportedError, match="shard_map"):
        _one_replica(_program("shard_map"))
