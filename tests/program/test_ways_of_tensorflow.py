"""Calls as TensorFlow has them: the error has the way of jaxdist."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist import PerReplica
from jaxdist.errors import (
    ArgumentTypeError,
    CallArgumentsError,
    MissingModuleError,
    MissingNameError,
)
from tests.strategies.oracle import refused


def _strategy() -> Any:
    return jaxdist.MirroredStrategy(["cpu:0", "cpu:1"])


def _add(a: Any, b: Any, c: Any) -> Any:
    return a + b + c


def test_arguments_one_after_the_other_are_told_to_be_a_tuple() -> None:
    strategy: Any = _strategy()
    one = jnp.ones(2)
    for count, names in [(3, "a, b, c"), (4, "a, b, c, d"), (7, "a, b, c, d, e, f, g")]:
        said = f"{count} positional arguments", f"args=({names}), not {names}"
        with refused(CallArgumentsError, "strategy.run", *said):
            strategy.run(_add, *[one] * count)
    with refused(CallArgumentsError, "strategy.run", "args=(a, b, ...)"):
        strategy.run(_add, *[one] * 20)
    with refused(CallArgumentsError, "strategy.run", "args=(a, b), not a, b"):
        strategy.run(_add, one, one)
    with refused(CallArgumentsError, "strategy.run", "args=(a, b)"):
        strategy.run(_add, (one,), one)
    with refused(CallArgumentsError, "strategy.run", "args=(value,)"):
        strategy.run(_add, one)


OPTIMIZERS: dict[str, tuple[Any, str]] = {
    "nnx.Optimizer": (
        lambda: nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param),
        "optimizer.update(model, grads)",
    ),
    "optax": (lambda: optax.adam(0.1), "optax.apply_updates(params, updates)"),
    "compressed_update": (
        lambda: jaxdist.compressed_update(optax.adam(0.1), workers=2),
        "optax.apply_updates(params, updates)",
    ),
}


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("method", ["apply_gradients", "minimize"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_is_called_as_in_tensorflow(
    name: str, method: str, eagerly: bool
) -> None:
    make, way = OPTIMIZERS[name]
    optimizer = make()

    def step(x: Any) -> Any:
        return getattr(optimizer, method)(zip([x], [x], strict=True))

    with (
        jaxdist.config.run_eagerly(eagerly),
        refused(MissingNameError, f".{method} does not exist", "all_reduce('mean'", way),
    ):
        _strategy().run(step, (PerReplica([1.0, 2.0]),))


def test_other_missing_attributes_stay_errors_of_python() -> None:
    with pytest.raises(AttributeError, match="apply_gradients") as error:
        _strategy().run(lambda x: x.apply_gradients(), (PerReplica([1.0, 2.0]),))
    assert not isinstance(error.value, MissingNameError)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import jaxdist.distribute as dist", "jaxdist.MirroredStrategy"),
        ("from jaxdist import distribute", "jaxdist.MirroredStrategy"),
        ("from jaxdist.distribute import MirroredStrategy", "jaxdist.MirroredStrategy"),
        ("from jaxdist import keras", "KERAS_BACKEND=jax"),
        ("from jaxdist.keras import layers", "KERAS_BACKEND=jax"),
        ("from jaxdist.compat.v1 import TPUStrategy", "it is jaxdist.TPUStrategy"),
    ],
)
def test_an_import_of_a_documented_name_says_what_replaces_it(statement: str, said: str) -> None:
    with refused(MissingModuleError, "does not exist", said):
        exec(statement, {})


def test_an_import_of_a_name_that_nobody_documents_is_an_error_of_python() -> None:
    for statement in ("from jaxdist import nothing", "import jaxdist.nothing"):
        with pytest.raises(ImportError, match="nothing") as caught:
            exec(statement, {})
        assert not isinstance(caught.value, MissingModuleError)
    assert not hasattr(jaxdist, "keras")


def test_the_names_of_tf_distribute_are_those_of_jaxdist() -> None:
    with refused(MissingNameError, "jaxdist.distribute", "jaxdist.MirroredStrategy"):
        print(jaxdist.distribute)  # pyrefly: ignore


@pytest.mark.parametrize("eagerly", [False, True])
def test_an_iterator_is_no_result(eagerly: bool) -> None:
    strategy, value = _strategy(), PerReplica([1.0, 2.0])
    steps = [
        lambda x: (i for i in range(3)),
        lambda x: map(str, range(3)),
        lambda x: {"a": zip(range(3), range(3), strict=True)},
    ]
    for step in steps:
        # The second call returned the iterator of the first, which had ended.
        for _ in range(2):
            with jaxdist.config.run_eagerly(eagerly), refused(ArgumentTypeError, "a list or a"):
                strategy.run(step, (value,))
    with jaxdist.config.run_eagerly(eagerly), refused(ArgumentTypeError, "The step", "generator"):
        strategy.run(lambda x: (x + i for i in range(3)), (value,))


def test_an_iterator_is_no_result_of_a_function() -> None:
    for fn in (lambda x: iter([1, 2]), lambda x: (x + i for i in range(2))):
        with refused(ArgumentTypeError, "The function", "Return a list or a tuple"):
            jaxdist.function(fn)(jnp.ones(2))


@pytest.mark.parametrize("view", ["values", "items"])
def test_a_view_of_a_dict_does_not_let_traced_arrays_out(view: str) -> None:
    with refused(ArgumentTypeError, f"dict_{view}", "traced array", "a list or a tuple"):
        _strategy().run(lambda x: getattr({"a": x}, view)(), (PerReplica([1.0, 2.0]),))
    assert jax.tree.leaves(_strategy().run(lambda x: list({"a": x}.values()), (jnp.ones(()),)))
