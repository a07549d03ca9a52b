"""What goes into a step and comes out of it in containers that JAX does not know."""

import collections
import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import sparse

import jaxdist
from jaxdist import PerReplica, Variable
from jaxdist.errors import ArgumentTypeError, StateDivergenceWarning
from tests.tables import sampled


class Config(dict[str, Any]):
    """A dict with access by attribute."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class ReadOnly(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Rows(list[Any]):
    """A list of a class of its own."""


class Columns(tuple[Any, ...]):
    """A tuple of a class of its own."""


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


class Strange(dict[str, Any]):
    """A dict that cannot be made of a dict."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first=first, second=second)


@dataclasses.dataclass
class Unregistered:
    """A dataclass that JAX does not know."""

    x: Any


@dataclasses.dataclass(eq=False)
class ByIdentity:
    """A dataclass that is compared by identity."""

    x: Any


class Plain:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self) -> Any:
        """A method."""
        return self


class Slotted:
    """An object with slots."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


MAPPINGS = [Config, ReadOnly, collections.UserDict, collections.Counter, types.MappingProxyType]
KNOWN = [dict, collections.OrderedDict, functools.partial(collections.defaultdict, list)]
X = PerReplica([1.0, 2.0])


WAYS = ["compiled", "op_by_op", "function", "first call"]


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest) -> Any:
    """`run` of a strategy of two replicas, in each way that a step can be run."""
    return _run(request.param)


def _run(way: str) -> Any:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def call(fn: Any, args: Any) -> Any:
        if way == "compiled":
            for _ in range(2):
                strategy.run(fn, args)
            return strategy.run(fn, args)
        if way == "op_by_op":
            with jaxdist.config.run_eagerly(True):
                return strategy.run(fn, args)
        if way == "function":
            return jaxdist.function(lambda *a: strategy.run(fn, a))(*args)
        return strategy.run(fn, args)

    return call


@pytest.mark.parametrize(
    "kind", [*KNOWN, *MAPPINGS], ids=lambda k: getattr(k, "__name__", "defaultdict")
)
def test_a_mapping_comes_out_as_its_own_type(run: Any, kind: Any) -> None:
    def step(x: Any) -> Any:
        return kind({"own": x, "words": "text", "in": [kind({"same": jnp.zeros(())})]}), x

    result, _ = run(step, (X,))
    assert type(result) is type(kind({}))
    assert isinstance(result["own"], PerReplica)
    assert [float(v) for v in result["own"].values] == [1.0, 2.0]
    assert result["words"] == "text"
    assert type(result["in"][0]) is type(kind({}))
    assert isinstance(result["in"][0]["same"], jax.Array)


@pytest.mark.parametrize(
    "kind", [*KNOWN, *MAPPINGS], ids=lambda k: getattr(k, "__name__", "defaultdict")
)
def test_a_mapping_goes_in_as_its_own_type(run: Any, kind: Any) -> None:
    def step(batch: Any, nested: Any) -> Any:
        assert type(batch) is type(nested[0]) is type(kind({}))
        return batch["x"] * nested[0]["scale"], batch["name"]

    given = (kind({"x": X, "name": "a"}), [kind({"scale": 3.0})])
    result, name = run(step, given)
    assert [float(v) for v in result.values] == [3.0, 6.0]
    assert name == "a"


@pytest.mark.parametrize("kind", [Rows, Columns])
def test_lists_and_tuples_of_other_classes_go_in_and_come_out(run: Any, kind: Any) -> None:
    def step(rows: Any) -> Any:
        assert type(rows) is kind
        return kind([rows[0] + 1, Point(rows[1], "y")])

    result = run(step, (kind([X, 2.0]),))
    assert type(result) is kind
    assert [float(v) for v in result[0].values] == [2.0, 3.0]
    assert type(result[1]) is Point


def test_a_mapping_without_arrays_is_the_same_object(run: Any) -> None:
    words = Config(a="text")
    assert run(lambda: words, ()) is words


def test_collectives_go_into_mappings() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    value = strategy.run(lambda x: Config(a=x, b=ReadOnly({"c": x[None]})), (X,))
    total = strategy.reduce("SUM", value, axis=None)
    assert type(total) is Config
    assert float(total["a"]) == 3.0
    assert type(total["b"]) is ReadOnly
    assert strategy.gather(value["b"], axis=0)["c"].tolist() == [1.0, 2.0]
    first, second = strategy.experimental_local_results(value)
    assert (float(first["a"]), float(second["b"]["c"][0])) == (1.0, 2.0)

    def step(x: Any) -> Any:
        context = jaxdist.get_replica_context()
        given = Config(a=x, b=ReadOnly({"c": x[None]}))
        return context.all_reduce("sum", given), context.all_gather(given["b"], axis=0)

    reduced, gathered = strategy.run(step, (X,))
    assert type(reduced) is Config
    assert float(reduced["b"]["c"][0]) == 3.0
    assert gathered["c"].tolist() == [1.0, 2.0]


def test_a_mapping_that_cannot_be_rebuilt_is_named(run: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"result\[0\] is a Strange.*Strange\(dict\)"):
        run(lambda x: (Strange(x, x), x), (X,))
    with pytest.raises(ArgumentTypeError, match=r"args\[0\] is a Strange"):
        run(lambda x: x["first"], (Strange(X, X),))


HIDING = {
    "a deque": lambda x: collections.deque([x]),
    "a dataclass": lambda x: Unregistered(x),
    "an object": lambda x: Plain(a=Plain(b=[x])),
    "an object with slots": lambda x: Slotted({"a": x}),
    "a namespace": lambda x: types.SimpleNamespace(x=x),
    "a function": lambda x: lambda: x,
    "a default": lambda x: lambda y=x: y,
    "a partial": lambda x: functools.partial(print, x),
    "a method": lambda x: Plain(x=x).method,
    "a generator": lambda x: (x for _ in range(2)),
    "a map": lambda x: map(abs, [x]),
    "a zip": lambda x: zip([x], [x], strict=True),
    "an iterator": lambda x: iter([x]),
    "an exception": lambda x: ValueError("too large", x),
}


@pytest.mark.parametrize("row", sampled(list(product(HIDING, WAYS)), 26, name=", ".join))
def test_a_result_that_hides_arrays_is_named_with_the_way_that_works(row: tuple[str, str]) -> None:
    name, run = row[0], _run(row[1])
    with pytest.raises(
        ArgumentTypeError, match=r"returned a .* as result\['r'\].*traced array"
    ) as e:
        run(lambda x: {"r": HIDING[name](x), "x": x}, (X,))
    assert any(word in str(e.value) for word in ("Return", "Register"))


OBJECTS = {
    "an object": lambda a: Plain(w=a),
    "an object in an object": lambda a: Plain(layers=[Plain(weights={"w": a})]),
    "an object with slots": lambda a: Slotted(a),
    "a dataclass by identity": lambda a: ByIdentity(a),
    "a partial": lambda a: functools.partial(jnp.dot, a),
    "a method": lambda a: Plain(w=a).method,
    "an object with a module": lambda a: Plain(net=nnx.Dict(w=nnx.Param(a))),
}


ARRAYS: dict[str, Any] = {"numpy": np.ones, "jax": jnp.ones}
STATIC = list(product(OBJECTS, ARRAYS, WAYS))


@pytest.mark.parametrize("row", sampled(STATIC, 18, name=", ".join))
def test_an_object_with_arrays_is_no_static_argument(row: tuple[str, str, str]) -> None:
    name, array, run = row[0], ARRAYS[row[1]](2), _run(row[2])
    with pytest.raises(
        ArgumentTypeError, match=r"args\[0\]\['m'\], a .*holds arrays.*not a pytree"
    ):
        run(lambda m, x: x, ({"m": OBJECTS[name](array)}, X))


def test_a_static_argument_with_arrays_is_refused_by_name() -> None:
    strategy = jaxdist.OneDeviceStrategy("cpu:0")
    options = jaxdist.RunOptions(static_argnames=("model",))
    with pytest.raises(ArgumentTypeError, match=r"kwargs\['model'\], a Plain.*\['model'\]\.w"):
        strategy.run(lambda model: model.w, (), {"model": Plain(w=np.ones(2))}, options)


class Trainer:
    """An object with weights and a step."""

    def __init__(self, w: Any) -> None:
        self.w = w

    def step(self, x: Any) -> Any:
        """One step."""
        return x * self.w

    def __call__(self, x: Any) -> Any:
        """The same."""
        return self.step(x)


@pytest.mark.parametrize("way", ["a method", "an object"])
@pytest.mark.parametrize("through", ["run", "function"])
def test_a_step_of_an_object_with_arrays_is_refused(way: str, through: str) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    trainer = Trainer(jnp.full((), 2.0))
    step = trainer.step if way == "a method" else trainer
    run = (lambda: strategy.run(step, (X,))) if through == "run" else jaxdist.function(step)
    args = () if through == "run" else (1.0,)
    with pytest.raises(ArgumentTypeError, match=r"of a Trainer|a Trainer as a function") as error:
        run(*args)
    assert "(object.w)" in str(error.value)
    frozen = strategy.run(lambda *args: step(*args), (X,))
    assert [float(v) for v in frozen.values] == [2.0, 4.0]


def test_a_step_of_an_object_without_arrays_or_of_a_module_runs() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones)
    for step in (Trainer(3).step, Trainer(3), Trainer(Variable(3.0)).step):
        assert [float(v) for v in strategy.run(step, (X,)).values] == [3.0, 6.0]
    assert strategy.run(model, (jnp.ones((1, 1)),)).tolist() == [[1.0]]
    assert strategy.run(model.__call__, (jnp.ones((1, 1)),)).tolist() == [[1.0]]


def test_objects_without_arrays_and_with_variables_are_static_arguments(run: Any) -> None:
    v = Variable(2.0)
    given = Plain(name="a", sizes=(1, 2), fn=jnp.sin, v=v, mesh=jax.make_mesh((1,), ("a",)))
    vars(given)["itself"] = given
    result = run(lambda m, x: x * m.v * m.sizes[1], (given, X))
    assert [float(x) for x in result.values] == [4.0, 8.0]


def _sgd(loss: Any) -> Any:
    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    return step


ONE_LEAF = {
    "an array": (_sgd(lambda w, x: ((w * x) ** 2).sum()), jnp.ones(3)),
    "a scalar": (_sgd(lambda w, x: ((w * x) ** 2).sum()), jnp.ones(())),
    "a dict": (_sgd(lambda w, x: (w["w"] * x).sum()), {"w": jnp.ones(3)}),
    "a dict of another class": (_sgd(lambda w, x: (w["w"] * x).sum()), {"w": jnp.ones(3)}),
    "a tuple": (_sgd(lambda w, x: (w[0] * x).sum()), (jnp.ones(()),)),
    "with decay": (lambda w, x: 0.9 * w - 0.1 * jnp.tanh(w * x), jnp.ones(3)),
    "in a scan": (
        lambda w, x: jax.lax.scan(lambda c, _: (c - 0.1 * jnp.tanh(c * x), None), w, length=2)[0],
        jnp.ones(3),
    ),
}


@pytest.mark.parametrize("form", ["alone", "with a loss", "in a list", "by name"])
@pytest.mark.parametrize("name", ONE_LEAF)
def test_a_forgotten_all_reduce_of_one_leaf_warns(name: str, form: str) -> None:
    step, w = ONE_LEAF[name]
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    wrap = {
        "alone": lambda w, x: w,
        "with a loss": lambda w, x: (w, x.sum()),
        "in a list": lambda w, x: [x.sum(), w],
        "by name": lambda w, x: {"loss": x.sum(), "w": w},
    }[form]
    x = strategy.run(lambda x: x[None], (X,))
    args, kwargs = ((), {"w": w, "x": x}) if form == "by name" else ((w, x), {})
    with pytest.warns(StateDivergenceWarning, match="all_reduce"):
        strategy.run(lambda w, x: wrap(step(w, x), x), args, kwargs)


ORDINARY = {
    "a loss": lambda w, x: (w * x - 1.0) ** 2,
    "an offset": lambda w, x: w + x,
    "a scale": lambda w, x: w * x + x,
    "an affine map": lambda w, x: 2.0 * w - x,
    "itself": lambda w, x: w,
    "an all-reduced update": lambda w, x: (
        w - 0.1 * jaxdist.get_replica_context().all_reduce("mean", jnp.tanh(w * x))
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_result_of_the_shape_of_an_argument_does_not_warn(name: str) -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.run(ORDINARY[name], (2.0, X))


def test_gathering_rows_of_an_array_is_refused_and_not_their_sum() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def slices(x: Any) -> jaxdist.IndexedSlices:
        return jaxdist.IndexedSlices(x[None, None], jnp.array([1]), (3, 1))

    rows = strategy.run(slices, (X,))
    one_each = PerReplica([slices(jnp.asarray(1.0)), slices(jnp.asarray(2.0))])
    for value in (rows, {"a": rows}, one_each, slices(jnp.asarray(1.0))):
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            strategy.gather(value, axis=0)
    with pytest.raises(NotImplementedError, match="all_gather was given value"):
        strategy.run(lambda x: jaxdist.get_replica_context().all_gather(slices(x), 0), (X,))

    def merged(x: Any) -> Any:
        return jaxdist.get_replica_context().merge_call(
            lambda s, v: s.gather(v, axis=0), (slices(x),)
        )

    with pytest.raises(NotImplementedError, match=r"Strategy\.gather was given value"):
        strategy.run(merged, (X,))
    total = strategy.reduce("SUM", rows, axis=None)
    assert total.to_dense().ravel().tolist() == [0.0, 3.0, 0.0]


def test_sparse_matrices_of_jax_are_refused_by_collectives() -> None:
    strategy = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])

    def matrix(x: Any) -> sparse.BCOO:
        return sparse.BCOO((x[None, None], jnp.array([[1]])), shape=(3, 1))

    value = strategy.run(matrix, (X,))
    for call in (
        lambda: strategy.reduce("SUM", value, axis=None),
        lambda: strategy.gather(value, axis=0),
        lambda: strategy.run(
            lambda x: jaxdist.get_replica_context().all_reduce("sum", matrix(x)), (X,)
        ),
    ):
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            call()


@pytest.mark.parametrize("kind", [nnx.Dict, nnx.List], ids=["Dict", "List"])
def test_containers_of_nnx_are_updated_in_place(run: Any, kind: Any) -> None:
    held = (
        kind({"a": nnx.Param(jnp.zeros(()))})
        if kind is nnx.Dict
        else kind([nnx.Param(jnp.zeros(()))])
    )
    key: Any = "a" if kind is nnx.Dict else 0
    settings = Config(name="b")

    def step(held: Any, settings: Any) -> Any:
        held[key][...] = held[key][...] + 1
        return settings.name

    assert run(step, (held, settings)) == "b"
    assert float(held[key][...]) in (1.0, 3.0)
