"""The allow-list has no stale names, and its operations map equal operands to equal results."""

import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.extend.core import primitives as public
from jax.sharding import PartitionSpec

import jaxdist
from jaxdist._program.jaxprs import primitives as known

for _module in (
    "jax.scipy.special",
    "jax.scipy.linalg",
    "jax.extend.random",
    "jax.extend.linear_util",
):
    importlib.import_module(_module)

# Names that only some of the supported versions of JAX have.
ONLY_IN_SOME = {
    "log2": "0.12",
    "one_minus_square": "0.12",
    "polynomial": "0.12",
    "pcast": "0.11",
    "closed_call": "0.10",
}


@functools.cache
def _installed() -> dict[str, Primitive]:
    return {p.name: p for p in gc.get_objects() if isinstance(p, Primitive)}


def _bind(name: str, *operands: Any, **params: Any) -> Any:
    return _installed()[name].bind(*operands, **params)


X = np.linspace(0.1, 0.9, 8, dtype=np.float32)
M = (np.outer(X[:4], X[4:]) + 4 * np.eye(4)).astype(np.float32)
S = (M + M.T).astype(np.float32)
IMAGE = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 8, 8)


def _i(x: Any) -> Any:
    return (x * 100).astype(jnp.int32)


def _u(x: Any) -> Any:
    return (x * 100).astype(jnp.uint32)


def _b(x: Any) -> Any:
    return x > 0.5


def _c(x: Any) -> Any:
    return lax.complex(x, x[::-1])


def _m(x: Any) -> Any:
    return x[0] * M


def _s(x: Any) -> Any:
    return x[0] * S


def _key(x: Any) -> Any:
    return jax.random.key(_i(x)[0])


def _scatter(fun: Callable[..., Any]) -> Callable[[Any], Any]:
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    return lambda x: fun(x, _i(x)[:2, None] % 8, x[:2], numbers)


def _window(fun: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: fun(x, (2,), (2,), ((0, 0),), (1,), (1,))


UNARY_OF_X = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh cumlogsumexp
    cummax cummin cumprod cumsum digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma
    log log1p log2 logistic neg one_minus_square round rsqrt sign sin sinh sqrt square tan tanh
    reduce_sum reduce_max reduce_min reduce_prod
""".split()
BINARY_OF_X = """
    add atan2 div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter pow rem sub
""".split()
OF_INTEGERS = "and or xor shift_left shift_right_arithmetic shift_right_logical mulhi".split()

BUILDERS: dict[str, Callable[[Any], Any]] = {
    "acosh": lambda x: lax.acosh(x + 1),
    "add_any": lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(y) * y))(x),
    "approx_top_k": lambda x: lax.approx_max_k(x, 2),
    "argmax": lambda x: lax.argmax(x, 0, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 0, jnp.int32),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "broadcast_in_dim": lambda x: lax.broadcast(x, (2,)),
    "cholesky": lambda x: lax.linalg.cholesky(_s(x)),
    "cholesky_update": lambda x: lax.linalg.cholesky_update(jnp.linalg.cholesky(_s(x)).T, x[:4]),
    "clamp": lambda x: lax.clamp(0.2, x, 0.6),
    "clz": lambda x: lax.clz(_i(x)),
    "complex": _c,
    "concatenate": lambda x: lax.concatenate([x, x], 0),
    "conj": lambda x: lax.conj(_c(x)),
    "conv_general_dilated": lambda x: lax.conv(
        IMAGE * x[0], jnp.asarray(IMAGE[:, :, :3, :3]), (1, 1), "SAME"
    ),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "copy": lambda x: _bind("copy", x),
    "device_put": lambda x: jax.device_put(x),
    "dot_general": lambda x: jnp.dot(x, x),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (_i(x)[0] % 4,), (4,)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2], (_i(x)[0] % 4,)),
    "eig": lambda x: lax.linalg.eig(_m(x))[0],
    "eigh": lambda x: lax.linalg.eigh(_s(x)),
    "eq_to": lambda x: _bind("eq_to", x, x),
    "erf_inv": lambda x: lax.erf_inv(x),
    "fft": lambda x: jnp.fft.fft(x),
    "gather": lambda x: x[_i(x) % 8],
    "geqp3": lambda x: _bind("geqp3", _m(x), jnp.zeros(4, jnp.int32), use_magma=None),
    "geqrf": lambda x: _bind("geqrf", _m(x)),
    "hessenberg": lambda x: lax.linalg.hessenberg(_m(x)),
    "householder_product": lambda x: lax.linalg.householder_product(_m(x), x[:4]),
    "imag": lambda x: lax.imag(_c(x)),
    # JAX fills with zeros the residuals that one branch does not compute.
    "empty2": lambda x: jax.grad(lambda x: lax.cond(x[0] > 0, jnp.square, jnp.sin, x).sum())(x),
    "integer_pow": lambda x: x**3,
    "iota": lambda x: lax.iota(jnp.int32, 8),
    "iota_2x32_shape": lambda x: _bind("iota_2x32_shape", shape=(4,)),
    "le_to": lambda x: _bind("le_to", x, x),
    "lt_to": lambda x: _bind("lt_to", x, x),
    "lu": lambda x: lax.linalg.lu(_m(x)),
    "lu_pivots_to_permutation": lambda x: lax.linalg.lu_pivots_to_permutation(
        jnp.sort(_i(x)[:4] % 4), 4
    ),
    "mulhi": lambda x: lax.mulhi(_u(x) << 24, _u(x) << 24),
    "not": lambda x: ~_i(x),
    "ormqr": lambda x: _bind("ormqr", _m(x), x[:4], _m(x), left=True, transpose=False),
    "name": lambda x: checkpoint_name(x, "kept"),
    "pad": lambda x: lax.pad(x, 0.0, [(1, 1, 1)]),
    "platform_index": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "polygamma": lambda x: lax.polygamma(x * 0 + 1, x),
    "polynomial": lambda x: vars(lax)["polynomial"](x, [1.0, 2.0]),
    "population_count": lambda x: lax.population_count(_i(x)),
    "qr": lambda x: lax.linalg.qr(_m(x)),
    "ragged_dot_general": lambda x: lax.ragged_dot(
        jnp.outer(x, x[:4]), jnp.stack([_m(x), _s(x)]), jnp.array([3, 5])
    ),
    "random_bits": lambda x: jax.random.bits(_key(x), (4,)),
    "random_clone": lambda x: jax.random.key_data(jax.random.clone(_key(x))),
    "random_fold_in": lambda x: jax.random.key_data(jax.random.fold_in(_key(x), _i(x)[1])),
    "random_gamma": lambda x: jax.random.gamma(_key(x), x + 1),
    "random_seed": lambda x: jax.random.key_data(_key(x)),
    "random_split": lambda x: jax.random.key_data(jax.random.split(_key(x))),
    "random_unwrap": lambda x: jax.random.key_data(_key(x)),
    "random_wrap": lambda x: jax.random.bits(jax.random.wrap_key_data(_u(x)[:2]), (2,)),
    "real": lambda x: lax.real(_c(x)),
    "reduce_and": lambda x: jnp.all(_b(x)),
    "reduce_or": lambda x: jnp.any(_b(x)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 4),
    "reduce_window": lambda x: lax.reduce_window(
        x, 0.0, lambda a, b: a * 2 + b, (2,), (1,), "SAME"
    ),
    "reduce_xor": lambda x: lax.reduce_xor(_i(x), (0,)),
    "regularized_incomplete_beta": lambda x: lax.betainc(x, x, x),
    "reshape": lambda x: x.reshape(2, 4),
    "rev": lambda x: lax.rev(x, (0,)),
    "rng_bit_generator": lambda x: lax.rng_bit_generator(_u(x)[:4], (8,))[1],
    "scatter": _scatter(lax.scatter),
    "scatter-add": _scatter(lax.scatter_add),
    "scatter-max": _scatter(lax.scatter_max),
    "scatter-min": _scatter(lax.scatter_min),
    "scatter-mul": _scatter(lax.scatter_mul),
    "scatter-sub": _scatter(lax.scatter_sub),
    "schur": lambda x: lax.linalg.schur(_m(x)),
    "select_n": lambda x: jnp.where(_b(x), x, -x),
    "sharding_constraint": lambda x: lax.with_sharding_constraint(x, PartitionSpec()),
    "slice": lambda x: lax.slice(x, (1,), (5,)),
    "sort": lambda x: lax.sort((x % 0.3, x), num_keys=1),
    "split": lambda x: lax.split(x, (3, 5)),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "svd": lambda x: jnp.linalg.svd(_m(x)),
    "symmetric_product": lambda x: lax.linalg.symmetric_product(_m(x), _s(x)),
    "threefry2x32": lambda x: _bind("threefry2x32", *[_u(x)] * 4),
    "top_k": lambda x: lax.top_k(x, 3),
    "transpose": lambda x: _m(x).T,
    "triangular_solve": lambda x: lax.linalg.triangular_solve(_s(x), _m(x)),
    "tridiagonal": lambda x: lax.linalg.tridiagonal(_s(x)),
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(x * 0.1, x, x * 0.1, x[:, None]),
    "zeta": lambda x: lax.zeta(x + 2, x),
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (1,), "SAME"),
    "reduce_window_min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2,), (1,), "SAME"),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "SAME"),
    "select_and_scatter_add": lambda x: jax.grad(
        lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2,), (2,), "VALID").sum()
    )(x),
    "select_and_gather_add": lambda x: jax.jvp(
        lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2,), (2,), "VALID"), (x,), (x,)
    ),
    **{
        n: lambda x, n=n: getattr(lax, n)(x)
        for n in UNARY_OF_X
        if n not in ("acosh", "erf_inv") and not n.startswith("reduce_")
    },
    **{n: lambda x, n=n: getattr(lax, n)(x, (0,)) for n in UNARY_OF_X if n.startswith("reduce_")},
    **{n: lambda x, n=n: getattr(lax, n)(x, x[::-1]) for n in BINARY_OF_X},
    **{n: lambda x, n=n: _bind(n, _i(x), _i(x)[::-1] % 8) for n in OF_INTEGERS if n != "mulhi"},
}
BUILDERS["acosh"] = lambda x: lax.acosh(x + 1)

# XLA's CPU backend cannot compile these for several devices.
NOT_ON_CPU = {"mulhi"}

# Primitives that are not in the table, with the reason.
NOT_BUILT = {
    "broadcast_to": "only inside Pallas",
    "jaxdist_open_piece": "what a Sharded value is in a trace: tests/partition",
    "jaxdist_piece": "what a Sharded value is in a trace: tests/partition",
    "pbroadcast": "a collective",
    "philox2x32": "needs a generator that is chosen by its own name",
    "philox4x32": "needs a generator that is chosen by its own name",
    "pvary": "only under check_vma=True",
    "reshard": "only on meshes with explicit axes",
    "select_and_scatter": "has no public function",
    "stack": "an intermediate of newer versions",
    "stop_gradient": "leaves nothing in a program",
    "threefry4x32": "needs a generator that is chosen by its own name",
    "tile": "only inside other operations",
    "unstack": "an intermediate of newer versions",
    "zeros_like": "leaves nothing in a program",
}


def _names_in(jaxpr: Any) -> Iterator[str]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from _names_in(inner)


def test_every_name_on_the_allow_list_is_a_primitive_of_an_installed_jax() -> None:
    missing = known.FIRST_ORDER - set(_installed())
    assert missing <= set(ONLY_IN_SOME), sorted(missing - set(ONLY_IN_SOME))
    stale = {n for n in missing if jax.__version__.startswith(ONLY_IN_SOME[n])}
    assert not stale


def test_no_collective_and_no_callback_is_on_the_first_order_list() -> None:
    others = known.REPLICATING | known.VARYING | set(known.CALLS) | known.PAIRWISE
    assert not known.FIRST_ORDER & others
    for name in (
        "pure_callback",
        "io_callback",
        "debug_callback",
        "ffi_call",
        "rng_uniform",
        "scan",
        "while",
        "cond",
        "custom_linear_solve",
        "run_state",
        "get",
        "swap",
        "pbroadcast",
    ):
        assert name not in known.FIRST_ORDER, name


def test_every_public_collective_is_known_as_one() -> None:
    names = {
        p.name
        for n, p in vars(public).items()
        if isinstance(p, Primitive)
        and n.split("_p")[0]
        in (
            "psum",
            "pmax",
            "pmin",
            "all_gather",
            "all_to_all",
            "ppermute",
            "reduce_scatter",
            "pbroadcast",
            "ragged_all_to_all",
            "psum_invariant",
            "all_gather_invariant",
        )
    }
    assert {"psum", "all_gather", "ppermute"} <= names
    assert names <= known.COLLECTIVES


def test_the_table_of_builders_covers_the_allow_list() -> None:
    left = (known.FIRST_ORDER & set(_installed())) - set(BUILDERS) - set(NOT_BUILT)
    assert not left, sorted(left)
    assert not set(BUILDERS) & set(NOT_BUILT)


def _usable() -> list[str]:
    return sorted(n for n in BUILDERS if n in known.FIRST_ORDER and n not in _absent())


def _absent() -> set[str]:
    return {n for n in ONLY_IN_SOME if n not in _installed()}


def _kept_apart(fun: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Return the results of `fun` as arrays of numbers."""

    def call(x: Any) -> list[Any]:
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(fun(x))]

    return call


@pytest.mark.parametrize("name", _usable())
def test_an_operation_of_the_allow_list_is_proved_to_be_equal(name: str) -> None:
    strategy = jaxdist.MirroredStrategy()
    program = strategy.lower(_kept_apart(BUILDERS[name]), (X,))
    assert name in set(_names_in(program.traced.jaxpr)), "the builder does not make it"
    assert {what.split()[0] for what in program.results.values()} == {"mirrored"}


def test_operations_of_the_allow_list_give_equal_bits_on_all_replicas() -> None:
    strategy = jaxdist.MirroredStrategy()

    def all_of_them(x: Any) -> Any:
        names = [n for n in _usable() if n not in NOT_ON_CPU]
        return {name: _kept_apart(BUILDERS[name])(x) for name in names}

    results = strategy.run(all_of_them, (X,))
    different = [
        name
        for name, leaves in results.items()
        for leaf in leaves
        if len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) != 1
    ]
    assert not different
    assert len(results) > 130
    assert all(len(leaf.addressable_shards) == 8 for leaf in jax.tree.leaves(results))
