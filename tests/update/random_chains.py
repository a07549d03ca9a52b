"""Random chains of optax transformations, and of hostile ones that look at shapes and places."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.update.transformations import CASES, OBJECTIVE, VALUE, VALUE_FN, parts

Fn = Callable[[Any], Any]

# They need parameters by name, other gradients, or more arguments; or they are not of one array.
_LEFT_OUT = (
    VALUE_FN
    | VALUE
    | OBJECTIVE
    | {"lookahead", "freeze", "selective_transform", "sm3", "scale_by_sm3", "sam"}
)
SHIPPED = sorted(set(CASES) - _LEFT_OUT - parts())

# What each leaf becomes. They look at its shape, at places in it, at other elements of it.
OF_LEAVES: dict[str, Fn] = {
    "by size": lambda x: x / x.size,
    "by a dim": lambda x: x * (x.shape[0] if x.ndim else 2) ** -0.5,
    "by rank": lambda x: x * (0.5**x.ndim),
    "plus places": lambda x: x + 0.01 * jnp.arange(float(x.size)).reshape(x.shape),
    "last places": lambda x: x * jax.lax.broadcasted_iota(x.dtype, (1, *x.shape), x.ndim)[0],
    "noise": lambda x: x + 0.1 * jax.random.normal(jax.random.key(5), x.shape, x.dtype),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0),
    "every second": lambda x: jnp.where(jnp.arange(x.size).reshape(x.shape) % 2 == 0, x, 0),
    "cut off": lambda x: jnp.clip(x, -0.5, 0.25),
    "largest": lambda x: x / (1 + jnp.max(x)),
    "smallest": lambda x: x - 0.1 * jnp.min(x),
    "mean": lambda x: x - jnp.mean(x),
    "deviation": lambda x: x / (1 + jnp.std(x)),
    "norm": lambda x: x / (1 + jnp.linalg.norm(x)),
    "sorted": lambda x: jnp.sort(x.ravel()).reshape(x.shape),
    "sums": lambda x: 0.1 * jnp.cumsum(x.ravel()).reshape(x.shape),
    "turned": lambda x: jnp.roll(x, 1),
    "first": lambda x: x - 0.1 * x.ravel()[0],
    "last": lambda x: x - 0.1 * x.ravel()[-1],
    "rows": lambda x: x - 0.1 * jnp.sum(x, axis=-1, keepdims=True) if x.ndim else x,
    "columns": lambda x: x * jnp.max(jnp.abs(x), axis=0, keepdims=True) if x.ndim else x,
    "share": lambda x: jax.nn.softmax(x.ravel()).reshape(x.shape),
    "median": lambda x: jnp.where(x > jnp.median(x), x, 0),
    "at the largest": lambda x: (
        jnp.where(jnp.arange(x.size) == jnp.argmax(x), 1, 0.5).reshape(x.shape) * x
    ),
    "counted": lambda x: x / (1 + jnp.count_nonzero(x)),
    "without nan": lambda x: jnp.nan_to_num(x, nan=0.5, posinf=1.0, neginf=-1.0),
    "largest but nan": lambda x: x / (1 + jnp.nanmax(jnp.abs(x))),
    "if finite": lambda x: jnp.where(jnp.all(jnp.isfinite(x)), x, 0),
    "any nan": lambda x: jax.lax.cond(jnp.isnan(x).any(), jnp.zeros_like, lambda v: v * 2, x),
    "integers": lambda x: jnp.round(x * 8).astype(jnp.int32).astype(x.dtype) / 8,
    "complex": lambda x: jnp.real(x * jnp.exp(0.5j)),
    "padded": lambda x: jnp.pad(x.ravel(), (0, 3))[: x.size].reshape(x.shape),
    "product": lambda x: (x.ravel() @ jnp.eye(x.size, dtype=x.dtype)).reshape(x.shape),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, v: v * 0.5 + i * x.size**-1, x),
    "two of them": lambda x: x * (2 if x.size > 4 else 0.5),
}


def _by_leaves(name: str) -> Any:
    fn = OF_LEAVES[name]
    return optax.stateless(lambda g, p: jax.tree.map(fn, g))


def _of_state(kind: str) -> Any:
    """State whose first value or whose count depends on shapes."""

    def init(params: Any) -> Any:
        if kind == "places":
            return jax.tree.map(
                lambda x: 0.01 * jnp.arange(float(jnp.size(x))).reshape(jnp.shape(x)), params
            )
        if kind == "drawn":
            return jax.tree.map(
                lambda x: jax.random.normal(jax.random.key(2), jnp.shape(x)), params
            )
        if kind == "counted":
            return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.int32), params)
        return jax.tree.map(lambda x: jnp.full(jnp.shape(x), 1 / jnp.size(x)), params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if kind == "counted":
            after = jax.tree.map(lambda s, g: s + (g > 0).astype(s.dtype), state, updates)
            return jax.tree.map(lambda g, s: g / (1 + s).astype(g.dtype), updates, after), after
        after = jax.tree.map(lambda s, g: 0.5 * s + g.astype(s.dtype), state, updates)
        return jax.tree.map(lambda g, s: s.astype(g.dtype), updates, after), after

    return optax.GradientTransformation(init, update)


def _keyed(shared: bool) -> Any:
    """Noise with a key in the state, split for each leaf."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        leaves, treedef = jax.tree.flatten(updates)
        keys = [state] * len(leaves) if shared else jax.random.split(state, len(leaves))
        made = [
            g + 0.1 * jax.random.uniform(k, g.shape, g.dtype)
            for g, k in zip(leaves, keys, strict=True)
        ]
        return treedef.unflatten(made), jax.random.fold_in(state, 1)

    return optax.GradientTransformation(lambda params: jax.random.key(3), update)


def _over_tree(kind: str) -> Any:
    """A number of all leaves together."""

    def update(g: Any, p: Any) -> Any:
        leaves = jax.tree.leaves(g)
        if kind == "largest":
            number = jnp.stack([jnp.max(jnp.abs(x)).astype("float32") for x in leaves]).max()
        elif kind == "count":
            number = sum(x.size for x in leaves)
        else:
            number = jnp.sqrt(sum(jnp.sum(x.astype("float32") ** 2) for x in leaves))
        return jax.tree.map(lambda x: (x / (1 + number)).astype(x.dtype), g)

    return optax.stateless(update)


HOSTILE: dict[str, Callable[[], Any]] = {
    **{f"leaf {n}": (lambda n=n: _by_leaves(n)) for n in OF_LEAVES},
    **{f"state {k}": (lambda k=k: _of_state(k)) for k in ("places", "drawn", "counted", "filled")},
    **{f"tree {k}": (lambda k=k: _over_tree(k)) for k in ("largest", "count", "norm")},
    "keyed noise": lambda: _keyed(False),
    "one key": lambda: _keyed(True),
}


def _large(tree: Any) -> Any:
    """A mask by the shape of each leaf."""
    return jax.tree.map(lambda x: jnp.size(x) > 4, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda x: "a" if jnp.ndim(x) > 1 else "b", tree)


# What one transformation is put into.
AROUND: dict[str, Callable[[Any], Any]] = {
    "masked": lambda tx: optax.masked(tx, _large),
    "multi_transform": lambda tx: optax.multi_transform({"a": tx, "b": optax.sgd(0.1)}, _labels),
    "partition": lambda tx: optax.partition({"a": optax.scale(-0.1), "b": tx}, _labels),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "skips": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "conditionally": lambda tx: optax.conditionally_transform(tx, lambda step, *_, **__: step != 1),
    "flatten": optax.flatten,
    "injected": lambda tx: optax.chain(
        tx, optax.inject_hyperparams(optax.scale)(optax.linear_schedule(1.0, 0.5, 3))
    ),
    "scheduled": lambda tx: optax.chain(tx, optax.scale_by_schedule(lambda n: 1.0 / (1 + n))),
}


class Chain:
    """The chain of one seed: its transformation, parameters, and gradients of each replica."""

    def __init__(self, seed: int) -> None:
        drawn = random.Random(seed)
        self.seed = seed
        self.count = drawn.choice([2, 2, 3, 4, 8])
        self.names: list[str] = []
        made = []
        for _ in range(drawn.choice([1, 1, 2, 3])):
            is_hostile = drawn.random() < 0.6
            name = drawn.choice(sorted(HOSTILE) if is_hostile else SHIPPED)
            tx: Any = (HOSTILE if is_hostile else CASES)[name]()
            if isinstance(tx, optax.MultiSteps):
                tx = tx.gradient_transformation()
            if drawn.random() < 0.3:
                around = drawn.choice(sorted(AROUND))
                name, tx = f"{around}({name})", AROUND[around](tx)
            self.names.append(name)
            made.append(tx)
        self.tx = optax.with_extra_args_support(optax.chain(*made))
        self.shapes = self._shapes(drawn)
        numbers = np.random.default_rng(seed)
        self.params = {
            n: (numbers.integers(-32, 33, s) / 32).astype(_dtype(n)) for n, s in self.shapes.items()
        }
        # Sums of these are exact in any order, so that rounding decides nothing.
        self.rows = [
            {
                n: (numbers.integers(-16, 17, (self.count, *s)) / 32).astype(_dtype(n))
                for n, s in self.shapes.items()
            }
            for _ in range(3)
        ]
        self.special = drawn.choice([None, None, None, "nan", "inf", "-inf"])
        if self.special:
            self._put(drawn, float(self.special))

    def _shapes(self, drawn: random.Random) -> dict[str, tuple[int, ...]]:
        r = self.count
        dims = [1, 2, 3, r, r + 1, 2 * r, 7, 11]
        shapes: dict[str, tuple[int, ...]] = {
            "one": (1,),
            "row": (drawn.choice(dims),),
            "flat": (drawn.choice(dims), drawn.choice(dims)),
            "box": (drawn.choice([1, 2, r]), drawn.choice(dims), 2),
        }
        if drawn.random() < 0.5:
            shapes["number"] = ()
        if drawn.random() < 0.3:
            shapes["half"] = (drawn.choice(dims),)
        return shapes

    def _put(self, drawn: random.Random, value: float) -> None:
        """One number that is none, in the gradient of one replica."""
        step, name = drawn.randrange(2), drawn.choice(sorted(self.shapes))
        row = self.rows[step][name]
        own = row[drawn.randrange(self.count)].reshape(-1)
        place = drawn.choice([0, -1, drawn.randrange(own.size)])
        if row.ndim > 1:
            own[place] = value

    def __str__(self) -> str:
        shapes = " ".join(f"{n}{list(s)}" for n, s in self.shapes.items())
        special = f", with {self.special}" if self.special else ""
        return f"{' | '.join(self.names)} on {self.count} replicas, {shapes}{special}"


def _dtype(name: str) -> Any:
    return jnp.bfloat16 if name == "half" else np.float32
