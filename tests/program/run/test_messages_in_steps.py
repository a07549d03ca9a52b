"""What a user reads when their own step fails: their lines, their names, their axes."""

import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist
from jaxdist.errors import AxisNameError

OURS = str(pathlib.Path(jaxdist.__file__).parent)
STRATEGY = jaxdist.MirroredStrategy()


def _raised(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


def _files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _fails(x: Any) -> Any:
    raise KeyError("a mistake of the user")


def _fails_in_jit(x: Any) -> Any:
    return jax.jit(_fails)(x)


def _fails_in_a_loop(x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (_fails(c), None), x, None, length=2)


WAYS: dict[str, Callable[[Any], Any]] = {
    "run": lambda step: STRATEGY.run(step, (1.0,)),
    "run with options": lambda step: STRATEGY.run(
        step, (1.0,), options=jaxdist.RunOptions(donate_argnums=())
    ),
    "function": lambda step: jaxdist.function(lambda x: STRATEGY.run(step, (x,)))(1.0),
    "jit": lambda step: jax.jit(lambda x: STRATEGY.run(step, (x,)))(1.0),
    "virtual replicas": lambda step: jaxdist.MirroredStrategy(deterministic=True).run(step, (1.0,)),
    "one device": lambda step: jaxdist.OneDeviceStrategy("cpu:1").run(step, (1.0,)),
    "lower": lambda step: STRATEGY.lower(step, (1.0,)),
    "check_gradients": lambda step: STRATEGY.check_gradients(step, (1.0,)),
}


@pytest.mark.parametrize("step", [_fails, _fails_in_jit, _fails_in_a_loop])
@pytest.mark.parametrize("way", WAYS)
def test_no_frame_of_jaxdist_is_between_the_users_call_and_the_step(
    way: str, step: Callable[[Any], Any]
) -> None:
    error = _raised(lambda: WAYS[way](step))
    assert type(error) is KeyError
    assert [f for f in _files(error) if f.startswith(OURS)] == []
    assert traceback.extract_tb(error.__traceback__)[-1].name == "_fails"
    assert any("internal frames" in note for note in error.__notes__)


def test_the_frames_are_there_where_jax_shows_its_own() -> None:
    config: Any = jax.config
    before = config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = _raised(lambda: STRATEGY.run(_fails, (1.0,)))
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert any(f.startswith(OURS) for f in _files(error))


def test_an_error_of_jaxdist_ends_at_the_users_line() -> None:
    error = _raised(lambda: STRATEGY.run(_fails, 1.0))  # pyrefly: ignore
    assert isinstance(error, jaxdist.errors.JaxdistError)
    assert [f for f in _files(error) if f.startswith(OURS)] == []


class _Model(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Param(jnp.ones(2))])


def _if_of(read: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: Any, *batches: Any, scale: Any = 1.0) -> Any:
        return 1.0 if read(state, batches, scale) else 0.0

    return step


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda state, batches, scale: state["w"][0] > 0, "state['w']"),
        (lambda state, batches, scale: batches[0]["x"][0] > 0, "batches[0]['x']"),
        (lambda state, batches, scale: batches[1] > 0, "batches[1]"),
        (lambda state, batches, scale: scale > 0, "scale"),
        (lambda state, batches, scale: state["model"].layers[0][0] > 0, "state['model'].layers[0]"),
    ],
    ids=["state['w']", "batches[0]['x']", "batches[1]", "scale", "state['model']"],
)
def test_jax_names_the_parameter_and_the_function_of_the_user(
    read: Callable[..., Any], name: str
) -> None:
    state = {"w": np.ones(2), "model": _Model()}
    step = _if_of(read)
    error = _raised(lambda: STRATEGY.run(step, (state, {"x": np.ones(2)}, 2.0), {"scale": 2.0}))
    assert isinstance(error, jax.errors.TracerBoolConversionError)
    assert name in str(error)
    assert f"step at {__file__}:{step.__code__.co_firstlineno}" in str(error)
    assert "<unknown>" not in str(error)
    assert "leaves[" not in str(error)


def test_jax_names_a_variable_that_the_step_closes_over() -> None:
    with STRATEGY.scope():
        v = jaxdist.Variable(1.0, name="rate")
    error = _raised(lambda: STRATEGY.run(lambda x: x if v > 0 else -x, (1.0,)))
    assert "leaves[" not in str(error)


class _Callable:
    def __call__(self, batch: Any) -> Any:
        return batch if batch > 0 else -batch

    def method(self, batch: Any) -> Any:
        return batch if batch > 0 else -batch


@pytest.mark.parametrize("step", [_Callable(), _Callable().method], ids=["object", "method"])
def test_jax_names_the_parameters_of_objects_and_methods(step: Callable[[Any], Any]) -> None:
    error = _raised(lambda: STRATEGY.run(step, (1.0,)))
    assert "the argument batch." in str(error)
    assert "<unknown>" not in str(error)


@pytest.mark.parametrize(
    "collective",
    [jax.lax.psum, jax.lax.pmean, jax.lax.pmax, jax.lax.all_gather, jax.lax.axis_index],
    ids=lambda f: f.__name__,
)
def test_a_wrong_axis_name_is_told_the_right_one(collective: Any) -> None:
    def step(x: Any) -> Any:
        return collective("batch") if collective is jax.lax.axis_index else collective(x, "batch")

    error = _raised(lambda: STRATEGY.run(step, (1.0,)))
    assert isinstance(error, AxisNameError)
    for part in ("'batch'", "'replica'", "{'replica': 8, 'logical': 1}", "'step'"):
        assert part in str(error)


def test_a_wrong_axis_name_is_told_the_axes_of_the_users_mesh() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes=("data",))
    error = _raised(lambda: strategy.run(lambda x: jax.lax.psum(x, "batch"), (1.0,)))
    assert isinstance(error, AxisNameError)
    assert "{'data': 4, 'model': 2}" in str(error)
    assert "jax.lax.psum(x, 'data')" in str(error)


def test_a_name_error_of_the_user_stays_what_it_is() -> None:
    def step(x: Any) -> Any:
        return x + no_such_name  # noqa: F821  # pyrefly: ignore

    error = _raised(lambda: STRATEGY.run(step, (1.0,)))
    assert type(error) is NameError
    assert "no_such_name" in str(error)


def test_a_wrong_axis_name_is_told_the_right_one_op_by_op() -> None:
    with jaxdist.config.run_eagerly(True):
        error = _raised(lambda: STRATEGY.run(lambda x: jax.lax.psum(x, "batch"), (1.0,)))
    assert isinstance(error, AxisNameError)
    assert "'replica'" in str(error)
