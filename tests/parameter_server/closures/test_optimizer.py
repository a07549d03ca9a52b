"""Optax transformations cut per variable, against optax itself in one process."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.tree_util import keystr, tree_map_with_path

from jaxdist._parameter_server.closures import VariableUpdate, cut_update
from jaxdist._parameter_server.protocol import Change, ChangeVariables, Create, Creation
from jaxdist._parameter_server.server import VariableServer
from jaxdist.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from tests import tables
from tests.update.transformations import CASES

_STEPS = 4
# Without fused multiply-add, which rounds once where two operations happen to be in one loop. Then
# the bits do not depend on what else a program computes.
_EXACT = {"xla_cpu_max_isa": "AVX"}


def _params() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {"bias": (4,), "kernel": (6, 4), "other": (6, 4), "scale": ()}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def _grads() -> list[dict[str, Any]]:
    rng = np.random.default_rng(2)
    return [
        {k: rng.normal(size=v.shape).astype(np.float32) for k, v in _params().items()}
        for _ in range(_STEPS)
    ]


def _run_optax(tx: Any, params: Any, grads: list[Any]) -> list[Any]:
    """The oracle."""

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(update, compiler_options=_EXACT)
    state, found = tx.init(params), []
    for each in grads:
        params, state = update(params, state, each)
        found.append(params)
    return found


def _run_optax_for(tx: Any, params: Any, grads: list[Any], update: VariableUpdate) -> list[Any]:
    """The oracle to the bit: all of optax is compiled, but only one variable comes out.

    XLA rounds differently where it puts operations of several variables into one loop.
    """

    def is_own(path: Any, leaf: Any) -> bool:
        return keystr(path, simple=True, separator=".") in update.slots

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, new = tx.update(grads, state, params)
        own = tree_map_with_path(lambda p, a, b: a if is_own(p, a) else b, new, state)
        after: Any = optax.apply_updates(params, updates)
        return {**params, update.name: after[update.name]}, own

    compiled = jax.jit(step, compiler_options=_EXACT)
    state, found = tx.init(params), []
    for each in grads:
        params, state = compiled(params, state, each)
        found.append(params[update.name])
    return found


def _load(content: bytes) -> Callable[..., Any]:
    return export.deserialize(bytearray(content)).call


class _Variable:
    """What a server does with one variable or shard, without the server."""

    def __init__(self, update: VariableUpdate, value: Any) -> None:
        cut = update.by_shape[tuple(value.shape)]
        self.value, self._program = value, jax.jit(_load(cut.program), compiler_options=_EXACT)
        self.slots = () if cut.init is None else tuple(_load(cut.init)(value))
        assert len(self.slots) == len(update.slots)

    def apply(self, grad: Any) -> None:
        self.value, *slots = self._program(self.value, *self.slots, grad)
        self.slots = tuple(slots)


def _split(array: Any, rows: tuple[int, ...]) -> list[Any]:
    return np.split(np.asarray(array), np.cumsum(rows)[:-1])


def _is_equal(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


_ALONE: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw with a mask": lambda: optax.adamw(
        0.1, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "a schedule": lambda: optax.adam(optax.exponential_decay(0.1, 2, 0.5)),
    "a chain": lambda: optax.chain(
        optax.clip(0.5), optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale(-0.1)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "inject_hyperparams with a schedule": lambda: optax.inject_hyperparams(optax.sgd)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 3), momentum=0.9
    ),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1), "c": optax.set_to_zero()},
        {"bias": "b", "kernel": "a", "other": "c", "scale": "a"},
    ),
    "masked": lambda: optax.masked(
        optax.adam(0.1), {"bias": False, "kernel": True, "other": True, "scale": False}
    ),
    "several steps for one": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "noise": lambda: optax.noisy_sgd(0.1, key=3),
}


@pytest.mark.parametrize("name", _ALONE)
def test_each_variable_by_itself_has_the_bits_of_optax(name: str) -> None:
    tx, params = _ALONE[name](), _params()
    updates = cut_update(tx, params)
    assert [u.name for u in updates] == list(params)
    variables = {u.name: _Variable(u, params[u.name]) for u in updates}
    to_the_bit = {u.name: _run_optax_for(tx, params, _grads(), u) for u in updates}
    for n, (grads, wanted) in enumerate(
        zip(_grads(), _run_optax(tx, params, _grads()), strict=True)
    ):
        # In another order than that of the leaves.
        for key in reversed(params):
            variables[key].apply(grads[key])
            _is_equal(variables[key].value, to_the_bit[key][n])
            np.testing.assert_allclose(variables[key].value, wanted[key], rtol=1e-5, atol=1e-7)


_BY_ELEMENT = [name for name in _ALONE if name != "noise"]


@pytest.mark.parametrize("rows", [(3, 3), (4, 2), (1, 5), (6,), (2, 2, 1, 1)])
@pytest.mark.parametrize("name", _BY_ELEMENT)
def test_shards_have_the_bits_of_the_whole_variable(name: str, rows: tuple[int, ...]) -> None:
    tx, params = _ALONE[name](), _params()
    updates = cut_update(tx, params, {"kernel": rows})
    [update] = [u for u in updates if u.name == "kernel"]
    assert set(update.by_shape) == {(n, 4) for n in rows}
    shards = [_Variable(update, jnp.asarray(x)) for x in _split(params["kernel"], rows)]
    for grads, wanted in zip(_grads(), _run_optax_for(tx, params, _grads(), update), strict=True):
        for shard, grad in zip(shards, _split(grads["kernel"], rows), strict=True):
            shard.apply(grad)
        _is_equal(np.concatenate([s.value for s in shards]), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", tables.sampled(list(CASES), 16))
def test_every_transformation_of_optax_is_cut_exactly_or_refused_by_name(name: str) -> None:
    params = _params()
    try:
        tx = CASES[name]()
        updates = cut_update(tx, params)
    except (UnsupportedError, ArgumentError, ArgumentTypeError) as error:
        first = str(error).partition("\n\n")[0]
        assert (
            "couples variables" in first
            or "cannot trace" in first
            or "was given" in first
            or "makes" in first
        )
        return
    variables = {u.name: _Variable(u, params[u.name]) for u in updates}
    for grads, wanted in zip(_grads(), _run_optax(tx, params, _grads()), strict=True):
        for key, variable in variables.items():
            variable.apply(grads[key])
            # Some programs hold sums, which XLA may order in another way.
            np.testing.assert_allclose(variable.value, wanted[key], rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", tables.sampled(list(CASES), 16))
def test_every_transformation_on_shards_is_that_of_the_whole_or_refused(name: str) -> None:
    params, rows = _params(), (4, 2)
    try:
        tx = CASES[name]()
        updates = cut_update(tx, params, {"kernel": rows})
    except (UnsupportedError, ArgumentError, ArgumentTypeError):
        return
    [update] = [u for u in updates if u.name == "kernel"]
    shards = [_Variable(update, jnp.asarray(x)) for x in _split(params["kernel"], rows)]
    for grads, wanted in zip(_grads(), _run_optax(tx, params, _grads()), strict=True):
        for shard, grad in zip(shards, _split(grads["kernel"], rows), strict=True):
            shard.apply(grad)
        found = np.concatenate([s.value for s in shards])
        np.testing.assert_allclose(found, wanted["kernel"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("tx", "culprit", "remedy"),
    [
        (
            lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
            "global_norm",
            "optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())",
        ),
        (
            lambda: optax.apply_if_finite(optax.adam(0.1), 3),
            "apply_if_finite",
            "jnp.where(is_finite, g, 0)",
        ),
        (
            lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
            "normalize",
            "Leave normalize_by_update_norm out",
        ),
    ],
)
def test_a_transformation_that_couples_variables_is_an_error_that_names_it(
    tx: Callable[[], Any], culprit: str, remedy: str
) -> None:
    with pytest.raises(UnsupportedError, match="couples variables") as caught:
        cut_update(tx(), _params())
    first = str(caught.value).partition("\n\n")[0]
    assert f"because of {culprit}" in first or culprit in first
    assert "'bias' needs 'kernel', 'other', 'scale'" in first
    assert remedy in str(caught.value).rpartition("\n\n")[2]


@pytest.mark.parametrize(
    "tx",
    [
        lambda: optax.lamb(0.1),
        lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
        lambda: optax.contrib.muon(0.1),
        lambda: optax.adaptive_grad_clip(0.1),
        lambda: optax.noisy_sgd(0.1, key=3),
        lambda: optax.clip_by_block_rms(0.1),
    ],
)
def test_an_update_that_needs_all_rows_is_refused_for_shards_only(tx: Callable[[], Any]) -> None:
    assert len(cut_update(tx(), _params())) == 4
    with pytest.raises(UnsupportedError, match="update of 'kernel', which is in shards"):
        cut_update(tx(), _params(), {"kernel": (3, 3)})


def test_equal_programs_are_exported_once() -> None:
    by_name = {u.name: u for u in cut_update(optax.adam(0.1), _params())}
    assert by_name["kernel"].by_shape[6, 4] is by_name["other"].by_shape[6, 4]
    assert by_name["kernel"].by_shape[6, 4].key != by_name["bias"].by_shape[(4,)].key
    assert by_name["kernel"].slots == ("0.count", "0.mu.kernel", "0.nu.kernel")
    # Traced again, from another line, it has the same key.
    again = cut_update(optax.adam(0.1), _params())[1]
    assert again.by_shape[6, 4].key == by_name["kernel"].by_shape[6, 4].key
    other = cut_update(optax.adam(0.2), _params())[1]
    assert other.by_shape[6, 4].key != by_name["kernel"].by_shape[6, 4].key


def test_constants_of_the_update_are_part_of_the_key() -> None:
    def scale(by: float) -> optax.GradientTransformation:
        factors = np.full((6, 4), by, np.float32)
        return optax.stateless(
            lambda u, _: jax.tree.map(lambda x: x * factors if x.ndim > 1 else x, u)
        )

    keys = {cut_update(scale(by), _params())[1].by_shape[6, 4].key for by in (1.0, 2.0)}
    assert len(keys) == 2
    with pytest.raises(UnsupportedError, match="an array that is not cut into the same rows"):
        cut_update(scale(1.0), _params(), {"kernel": (3, 3)})


def test_a_mask_by_shape_is_that_of_the_whole_variable() -> None:
    def is_long(params: Any) -> Any:
        return jax.tree.map(lambda x: x.shape[:1] == (6,), params)

    tx, params = optax.masked(optax.scale(-0.5), is_long), _params()
    [update] = [u for u in cut_update(tx, params, {"kernel": (3, 3)}) if u.name == "kernel"]
    shard = _Variable(update, params["kernel"][:3])
    shard.apply(jnp.ones((3, 4)))
    _is_equal(shard.value, params["kernel"][:3] - 0.5)


def test_programs_hold_nothing_of_other_variables() -> None:
    params = {"small": jnp.zeros(3), "large": jnp.zeros((512, 513))}
    for tx in (optax.adam(0.1), _ALONE["several steps for one"]()):
        update = cut_update(tx, params)[1]
        assert update.name == "small"
        [cut] = update.by_shape.values()
        assert "512" not in export.deserialize(bytearray(cut.program)).mlir_module()


def test_float64_and_bfloat16_keep_their_dtypes() -> None:
    for dtype in (jnp.float64, jnp.bfloat16):
        with jax.enable_x64(True):
            params = {"w": jnp.ones((2, 3), dtype)}
            [update] = cut_update(optax.adam(0.1), params)
            variable = _Variable(update, params["w"])
            variable.apply(params["w"])
            assert variable.value.dtype == dtype


def test_a_server_applies_the_updates_with_its_initialisers() -> None:
    tx, params, rows = optax.adam(0.1), _params(), (4, 2)
    server, names = VariableServer(), dict[str, list[str]]()
    for update in cut_update(tx, params, {"kernel": rows}):
        parts = _split(params[update.name], rows) if update.name == "kernel" else None
        values = {update.name: np.asarray(params[update.name])}
        if parts is not None:
            values = {f"kernel/part_{n}": part for n, part in enumerate(parts)}
        names[update.name] = list(values)
        server.call(Create([Creation(name, value) for name, value in values.items()]))
        for name, value in values.items():
            cut = update.by_shape[value.shape]
            server.call(cut.make_request("t", name, len(update.slots), None, "slot"))
    keys = dict(server._state.slots.keys())
    for grads, wanted in zip(_grads(), _run_optax(tx, params, _grads()), strict=True):
        for key, parts in names.items():
            pieces = _split(grads[key], rows) if len(parts) > 1 else [grads[key]]
            changes = [
                Change(f"program:{keys[name]}", name, [piece])
                for name, piece in zip(parts, pieces, strict=True)
            ]
            found = server.call(ChangeVariables(changes, read=parts)).values
            whole = np.concatenate(list(found.values())) if len(parts) > 1 else found[key]
            np.testing.assert_allclose(whole, wanted[key], rtol=1e-5, atol=1e-7)


def test_what_is_no_optimizer_is_an_error() -> None:
    for tx in (None, optax.MultiSteps(optax.sgd(0.1), 2), optax.adam):
        with pytest.raises(ArgumentTypeError, match=r"optax\.GradientTransformation"):
            cut_update(tx, _params())  # type: ignore[arg-type]


def test_an_optimizer_that_needs_more_arguments_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="cannot trace the update"):
        cut_update(optax.polyak_sgd(1.0), _params())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.astype(jnp.float16), "makes float16"),
        (lambda state: [state, state], "state of 2 arrays, and its init one of 1"),
    ],
)
def test_a_state_that_changes_is_an_error(change: Callable[[Any], Any], reason: str) -> None:
    def init(params: Any) -> Any:
        return jnp.zeros(2)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, change(state)

    with pytest.raises(ArgumentError, match=reason):
        cut_update(optax.GradientTransformation(init, update), _params())


@pytest.mark.parametrize("shards", [{"x": (1,)}, {"kernel": (3, 2)}, {"scale": (1,)}])
def test_shards_that_do_not_fit_are_an_error(shards: Any) -> None:
    with pytest.raises(ArgumentError, match="given shards of"):
        cut_update(optax.sgd(0.1), _params(), shards)
