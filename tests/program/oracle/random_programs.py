"""Random programs of one replica, for the replication analysis to be wrong about.

A program is a straight line of instructions on a pool of `float32[4]` values; an instruction may
hold blocks (the bodies of loops, branches and transformations), which are such programs again.
Everything is drawn from one seed, so a failure is named by its seed.
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import jaxdist

SIZE = 4
Values: TypeAlias = list[Any]

# A primitive that no analysis has heard of; it happens to be the identity.
UNHEARD_OF = Primitive("unheard_of")
UNHEARD_OF.def_impl(lambda x: x)
UNHEARD_OF.def_abstract_eval(lambda x: x)
mlir.register_lowering(UNHEARD_OF, lambda ctx, x: [x])
batching.defvectorized(UNHEARD_OF)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One operation on values of the pool; its results join the pool."""

    op: str
    operands: tuple[int, ...]
    static: tuple[Any, ...] = ()
    blocks: tuple["Block", ...] = ()

    def lines(self, indent: str = "") -> list[str]:
        """How it reads in a failure."""
        operands = ", ".join(f"v{i}" for i in self.operands)
        static = f" {list(self.static)}" if self.static else ""
        shown = [f"{indent}{self.op}({operands}){static}"]
        for block in self.blocks:
            shown += block.lines(indent + "  | ")
        return shown


@dataclasses.dataclass(frozen=True)
class Block:
    """A program: the number of its inputs, its instructions, and which values it gives."""

    num_inputs: int
    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]

    def lines(self, indent: str = "") -> list[str]:
        """How it reads in a failure; the pool starts with the inputs."""
        shown = [f"{indent}block of {self.num_inputs} inputs"]
        for instruction in self.instructions:
            shown += instruction.lines(indent + "  ")
        return [*shown, f"{indent}gives {list(self.results)}"]

    def __call__(self, *inputs: Any) -> Values:
        pool = self.pool(inputs)
        return [pool[i] for i in self.results]

    def pool(self, inputs: Sequence[Any]) -> Values:
        """Every value that it makes."""
        pool = list(inputs)
        for instruction in self.instructions:
            operation = OPERATIONS[instruction.op]
            values = [pool[i] for i in instruction.operands]
            pool += [tame(r) for r in operation.run(instruction, values)]
        return pool


def tame(value: Any) -> Any:
    """A `float32[4]` of moderate size that still tells different values apart."""
    return 2 * jnp.sin(jnp.nan_to_num(jnp.asarray(value, jnp.float32)))


@dataclasses.dataclass(frozen=True)
class Operation:
    """A kind of instruction: how many operands, how it is drawn, how it runs."""

    run: Callable[[Instruction, Values], Sequence[Any]]
    num_operands: int
    draw: Callable[["Drawer"], tuple[tuple[Any, ...], tuple[Block, ...]]]
    weight: float
    is_differentiable: bool


OPERATIONS: dict[str, Operation] = {}


def _nothing(_: "Drawer") -> tuple[tuple[Any, ...], tuple[Block, ...]]:
    return (), ()


def operation(
    num_operands: int,
    draw: Callable[["Drawer"], tuple[tuple[Any, ...], tuple[Block, ...]]] = _nothing,
    *,
    weight: float = 1.0,
    is_differentiable: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function `(instruction, *values) -> results` into the table."""

    def enter(fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(instruction: Instruction, values: Values) -> Sequence[Any]:
            results = fun(instruction, *values)
            return results if isinstance(results, (list, tuple)) else [results]

        OPERATIONS[fun.__name__.strip("_")] = Operation(
            run, num_operands, draw, weight, is_differentiable
        )
        return fun

    return enter


@dataclasses.dataclass
class Drawer:
    """Draws programs for a mesh of these replica axes."""

    rng: random.Random
    axes: Mapping[str, int]
    depth: int = 0
    differentiable: bool = False
    batched: bool = False

    def program(self, num_inputs: int, length: int) -> Block:
        """A whole program; every value that it makes is a result."""
        return self.block(num_inputs, length, num_results=None)

    def block(
        self,
        num_inputs: int,
        length: int,
        num_results: int | None,
        *,
        differentiable: bool = False,
        batched: bool = False,
    ) -> Block:
        """A program of about `length` instructions."""
        inner = Drawer(
            self.rng,
            self.axes,
            self.depth + 1,
            self.differentiable or differentiable,
            self.batched or batched,
        )
        instructions: list[Instruction] = []
        count = num_inputs
        for _ in range(length):
            name = inner._name()
            kind = OPERATIONS[name]
            # The newest values most often, so that programs are deep and not wide.
            operands = tuple(
                count - 1 - min(int(self.rng.expovariate(0.4)), count - 1)
                for _ in range(kind.num_operands)
            )
            static, blocks = kind.draw(inner)
            instruction = Instruction(name, operands, static, blocks)
            instructions.append(instruction)
            count += _num_results(instruction)
        if num_results is None:
            results = tuple(range(num_inputs, count))
        else:
            newest = list(range(max(0, count - 2 * num_results), count))
            results = tuple(self.rng.choice(newest) for _ in range(num_results))
        return Block(num_inputs, tuple(instructions), results)

    def _name(self) -> str:
        names = [
            n
            for n, o in OPERATIONS.items()
            if (o.is_differentiable or not self.differentiable)
            and (self.depth < 3 or n not in HIGHER_ORDER)
        ]
        return self.rng.choices(names, [OPERATIONS[n].weight for n in names])[0]

    def some_axes(self) -> tuple[str, ...]:
        """One replica axis, or all of them."""
        names = tuple(self.axes)
        return self.rng.choice([(n,) for n in names] + [names])

    def axes_and_groups(self) -> tuple[tuple[Any, ...], tuple[Block, ...]]:
        """Axes of a collective, and sometimes groups of replicas along one of them."""
        axes = self.some_axes()
        size = int(np.prod([self.axes[a] for a in axes]))
        groups = None
        if len(axes) == 1 and self.rng.random() < 0.35:
            members = list(range(size))
            self.rng.shuffle(members)
            each = self.rng.choice([n for n in (1, 2, 4) if size % n == 0])
            groups = tuple(tuple(members[i : i + each]) for i in range(0, size, each))
        return (axes, groups, size if groups is None else len(groups[0])), ()

    def axes_and_groups_where_not_batched(self) -> tuple[tuple[Any, ...], tuple[Block, ...]]:
        """JAX has no batching rule for some grouped collectives."""
        static, blocks = self.axes_and_groups()
        if self.batched and static[1] is not None:
            static = (static[0], None, self.axes[static[0][0]])
        return static, blocks

    def body(self, num_inputs: int, num_results: int, **kwargs: Any) -> Block:
        """A block for an instruction to hold."""
        return self.block(num_inputs, self.rng.randint(1, 4), num_results, **kwargs)


def _num_results(instruction: Instruction) -> int:
    return {
        "optimization_barrier": 2,
        "sort_pairs": 2,
        "scan": 3,
        "while_loop": 2,
        "cond": 2,
        "switch": 2,
        "split": 2,
        "jit_twice": 2,
    }.get(instruction.op, 1)


def _index(x: Any) -> Any:
    """A number from 0 to 3 out of a value."""
    return (jnp.abs(x[0]) * 997).astype(jnp.int32) % SIZE


# First-order operations.

UNARY: dict[str, Callable[[Any], Any]] = {
    "sin": jnp.sin,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "tanh": jnp.tanh,
    "floor": lambda x: jnp.floor(x * 8),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 0.1),
    "log": lambda x: jnp.log1p(jnp.abs(x)),
    "logistic": jax.nn.sigmoid,
    "erf": lax.erf,
    "sign": lambda x: jnp.sign(x) + x,
    "negative": lambda x: -x,
    "bf16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "integers": lambda x: (x * 100).astype(jnp.int32).astype(jnp.float32),
    "cube": lambda x: x**3,
    "reverse": lambda x: x[::-1],
    "reshape": lambda x: x.reshape(2, 2).T.reshape(-1),
    "pad": lambda x: jnp.pad(x, 1)[:SIZE],
    "roll": lambda x: jnp.roll(x, 1),
    "sum": lambda x: jnp.broadcast_to(x.sum(), x.shape),
    "max": lambda x: x.max() - x,
    "product": lambda x: jnp.prod(x) + x,
    "softmax": jax.nn.softmax,
    "cumsum": jnp.cumsum,
    "cumprod": jnp.cumprod,
    "cummax": lambda x: lax.cummax(x),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x),
    "sort": jnp.sort,
    "top_k": lambda x: jnp.concatenate([lax.top_k(x, 2)[0]] * 2),
    "pool": lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "SAME"),
    "complex": lambda x: jnp.abs(lax.complex(x, x[::-1]) * 1j),
    "stop_gradient": lax.stop_gradient,
    "logsumexp": lambda x: jax.nn.logsumexp(x) * x,
    "matmul": lambda x: jnp.outer(x, x) @ x,
    "cholesky": lambda x: jnp.linalg.cholesky(jnp.outer(x, x) + 8 * jnp.eye(SIZE))[-1],
    "solve": lambda x: jnp.linalg.solve(jnp.outer(x, x) + 8 * jnp.eye(SIZE), x),
    "constant": lambda x: x * np.linspace(-1, 1, SIZE, dtype=np.float32),
}
UNARY_WITHOUT_GRADIENT: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x + jnp.argmax(x),
    "argsort": lambda x: jnp.argsort(x).astype(jnp.float32) + x,
    "bits": lambda x: lax.population_count(lax.bitcast_convert_type(x, jnp.uint32)) * 0.1 + x,
    "flip_bits": lambda x: lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.uint32) ^ jnp.uint32(3), jnp.float32
    ),
    "finite": lambda x: jnp.where(jnp.isfinite(x), x, 0),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "eigh": lambda x: jnp.linalg.eigh(jnp.outer(x, x) + jnp.diag(x))[0],
    "qr": lambda x: jnp.linalg.qr(jnp.outer(x, x) + 8 * jnp.eye(SIZE))[1][0],
    "lgamma": lambda x: lax.lgamma(jnp.abs(x) + 1),
    "uniform": lambda x: jax.random.uniform(jax.random.key(_index(x)), x.shape) + x[0],
    "permutation": lambda x: jax.random.permutation(jax.random.key(_index(x)), x),
    "gamma": lambda x: jax.random.gamma(jax.random.key(_index(x)), jnp.abs(x) + 0.5),
    "own_key": lambda x: jax.random.normal(
        jax.random.fold_in(jax.random.split(jax.random.key(3))[0], _index(x)), x.shape
    ),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "multiply": jnp.multiply,
    "subtract": jnp.subtract,
    "divide": lambda x, y: x / (jnp.abs(y) + 1),
    "maximum": jnp.maximum,
    "atan2": jnp.arctan2,
    "where": lambda x, y: jnp.where(x > y, x, -y),
    "concatenate": lambda x, y: jnp.concatenate([x[:2], y[2:]]),
    "stack": lambda x, y: jnp.stack([x, y]).mean(0),
    "outer": lambda x, y: jnp.outer(x, y).sum(0),
    "convolve": lambda x, y: jnp.convolve(x, y)[:SIZE],
    "gather": lambda x, y: x[_index(y)] * jnp.ones(SIZE),
    "take": lambda x, y: jnp.take(x, (jnp.abs(y) * 9).astype(jnp.int32) % SIZE),
    "scatter_add": lambda x, y: x.at[_index(y)].add(y[0]),
    "dynamic_slice": lambda x, y: lax.dynamic_slice(jnp.concatenate([x, x]), (_index(y),), (4,)),
    "dynamic_update": lambda x, y: lax.dynamic_update_slice(x, y[:2], (_index(y),)),
    "ignore": lambda x, y: x,
    "triangular": lambda x, y: lax.linalg.triangular_solve(
        jnp.tril(jnp.outer(x, x)) + 8 * jnp.eye(SIZE), y[:, None], left_side=True, lower=True
    )[:, 0],
}


@operation(1, lambda d: ((d.rng.choice(sorted(UNARY)),), ()), weight=10)
def _unary(instruction: Instruction, x: Any) -> Any:
    return UNARY[instruction.static[0]](x)


@operation(
    1,
    lambda d: ((d.rng.choice(sorted(UNARY_WITHOUT_GRADIENT)),), ()),
    weight=5,
    is_differentiable=False,
)
def _unary_without_gradient(instruction: Instruction, x: Any) -> Any:
    return UNARY_WITHOUT_GRADIENT[instruction.static[0]](x)


@operation(2, lambda d: ((d.rng.choice(sorted(BINARY)),), ()), weight=9)
def _binary(instruction: Instruction, x: Any, y: Any) -> Any:
    return BINARY[instruction.static[0]](x, y)


@operation(2)
def _optimization_barrier(_: Instruction, x: Any, y: Any) -> Any:
    return lax.optimization_barrier((x, y))


@operation(2)
def _sort_pairs(_: Instruction, x: Any, y: Any) -> Any:
    return lax.sort((x, y), num_keys=1)


@operation(1)
def _split(_: Instruction, x: Any) -> Any:
    first, second = jnp.split(x, 2)
    return [jnp.tile(first, 2), jnp.tile(second, 2)]


@operation(1, weight=0.3, is_differentiable=False)
def _unheard_of(_: Instruction, x: Any) -> Any:
    return UNHEARD_OF.bind(x)


@operation(1, weight=0.3, is_differentiable=False)
def _pure_callback(_: Instruction, x: Any) -> Any:
    return jax.pure_callback(_on_host, jax.ShapeDtypeStruct((SIZE,), jnp.float32), x)


def _on_host(x: Any) -> Any:
    return np.asarray(x) + np.float32(1)


# Collectives. The axes, the groups along them, and how many replicas take part.


def _keywords(instruction: Instruction) -> dict[str, Any]:
    axes, groups, _ = instruction.static
    return {
        "axis_name": axes if len(axes) > 1 else axes[0],
        "axis_index_groups": groups and [list(g) for g in groups],
    }


@operation(1, Drawer.axes_and_groups, weight=2)
def _psum(instruction: Instruction, x: Any) -> Any:
    return lax.psum(x, **_keywords(instruction))


@operation(2, Drawer.axes_and_groups)
def _psum_of_two(instruction: Instruction, x: Any, y: Any) -> Any:
    return sum(lax.psum((x, y), **_keywords(instruction)))


@operation(1, Drawer.axes_and_groups, weight=2)
def _pmean(instruction: Instruction, x: Any) -> Any:
    return lax.pmean(x, **_keywords(instruction))


@operation(1, Drawer.axes_and_groups, is_differentiable=False)
def _pmax(instruction: Instruction, x: Any) -> Any:
    return lax.pmax(x, **_keywords(instruction))


@operation(1, Drawer.axes_and_groups, is_differentiable=False)
def _pmin(instruction: Instruction, x: Any) -> Any:
    return lax.pmin(x, **_keywords(instruction))


@operation(1, Drawer.axes_and_groups)
def _all_gather(instruction: Instruction, x: Any) -> Any:
    weights = jnp.arange(1.0, 1.0 + instruction.static[2])
    return weights @ lax.all_gather(x, **_keywords(instruction))


@operation(1, Drawer.axes_and_groups)
def _all_gather_tiled(instruction: Instruction, x: Any) -> Any:
    return lax.all_gather(x, **_keywords(instruction), tiled=True)[-SIZE:]


@operation(1, Drawer.axes_and_groups_where_not_batched)
def _psum_scatter(instruction: Instruction, x: Any) -> Any:
    count = instruction.static[2]
    rows = jnp.outer(jnp.arange(1.0, 1.0 + count), x)
    return lax.psum_scatter(rows, **_keywords(instruction))


@operation(1, Drawer.axes_and_groups_where_not_batched)
def _all_to_all(instruction: Instruction, x: Any) -> Any:
    count = instruction.static[2]
    rows = jnp.outer(jnp.arange(1.0, 1.0 + count), x)
    return lax.all_to_all(rows, split_axis=0, concat_axis=0, **_keywords(instruction)).sum(0)


def _permutation(d: Drawer) -> tuple[tuple[Any, ...], tuple[Block, ...]]:
    axis = d.rng.choice(sorted(d.axes))
    size = d.axes[axis]
    to = d.rng.sample(range(size), size)
    pairs = tuple((i, to[i]) for i in range(size) if d.rng.random() < 0.8)
    return (axis, pairs), ()


@operation(1, _permutation)
def _ppermute(instruction: Instruction, x: Any) -> Any:
    axis, pairs = instruction.static
    return lax.ppermute(x, axis, pairs)


@operation(1, lambda d: ((d.some_axes(),), ()))
def _axis_index(instruction: Instruction, x: Any) -> Any:
    return x + lax.axis_index(instruction.static[0])


@operation(1, lambda d: ((tuple(d.axes),), ()), weight=0.5)
def _assume_replicated(instruction: Instruction, x: Any) -> Any:
    # What it is put on is true: a grouped sum over all replicas in one group.
    size = int(lax.psum(1, instruction.static[0]))
    if len(instruction.static[0]) > 1:
        return jaxdist.assume_replicated(lax.psum(x, instruction.static[0]))
    whole = [list(range(size))]
    return jaxdist.assume_replicated(lax.psum(x, instruction.static[0][0], axis_index_groups=whole))


# Operations with blocks. A block may also take values from outside, which become constants of
# the loop or branch.


def _one_block(num_inputs: int, num_results: int, **kwargs: Any) -> Callable[[Drawer], Any]:
    return lambda d: ((), (d.body(num_inputs, num_results, **kwargs),))


@operation(2, _one_block(2, 1))
def _jit(instruction: Instruction, x: Any, y: Any) -> Any:
    return jax.jit(instruction.blocks[0])(x, y)


@operation(3, _one_block(2, 1))
def _jit_twice(instruction: Instruction, x: Any, y: Any, z: Any) -> Any:
    fun = jax.jit(instruction.blocks[0])
    return [*fun(x, y), *fun(z, y)]


@operation(2, _one_block(2, 1))
def _remat(instruction: Instruction, x: Any, y: Any) -> Any:
    return jax.checkpoint(instruction.blocks[0])(x, y)


@operation(2, lambda d: ((), (d.body(2, 1), d.body(2, 1))))
def _custom_jvp(instruction: Instruction, x: Any, y: Any) -> Any:
    fun = jax.custom_jvp(lambda a, b: instruction.blocks[0](a, b)[0])

    @fun.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # Linear in the tangents, with a factor that the block decides.
        factor = lax.stop_gradient(instruction.blocks[1](*primals)[0])
        return fun(*primals), tangents[0] * factor + tangents[1]

    return fun(x, y)


@operation(2, lambda d: ((), (d.body(2, 1), d.body(2, 2))))
def _custom_vjp(instruction: Instruction, x: Any, y: Any) -> Any:
    fun = jax.custom_vjp(lambda a, b: instruction.blocks[0](a, b)[0])

    def forward(a: Any, b: Any) -> Any:
        return fun(a, b), a

    def backward(a: Any, cotangent: Any) -> Any:
        return tuple(instruction.blocks[1](a, cotangent))

    fun.defvjp(forward, backward)
    return fun(x, y)


@operation(2, _one_block(2, 1, batched=True))
def _vmap(instruction: Instruction, x: Any, y: Any) -> Any:
    rows = jnp.stack([x, y, x * y])
    (out,) = jax.vmap(instruction.blocks[0], in_axes=(0, None))(rows, y)
    return out.sum(0)


@operation(2, _one_block(2, 1, differentiable=True), weight=2)
def _grad(instruction: Instruction, x: Any, y: Any) -> Any:
    return jax.grad(lambda a: (instruction.blocks[0](a, y)[0] * y).sum())(x)


@operation(2, _one_block(2, 1, differentiable=True))
def _jvp(instruction: Instruction, x: Any, y: Any) -> Any:
    primal, tangent = jax.jvp(lambda a: instruction.blocks[0](a, y)[0], (x,), (y,))
    return primal + tangent


@operation(3, lambda d: ((d.rng.randint(0, 3), d.rng.random() < 0.3), (d.body(4, 3),)), weight=3)
def _scan(instruction: Instruction, x: Any, y: Any, z: Any) -> Any:
    length, reverse = instruction.static
    block = instruction.blocks[0]

    def body(carry: Any, row: Any) -> Any:
        a, b, out = block(*carry, row, z)
        return (a, b), out

    rows = jnp.stack([x, y, z])[:length]
    (a, b), outs = lax.scan(body, (x, y), rows, length=length, reverse=reverse)
    return [a, b, outs.sum(0)]


def _while_parts(d: Drawer) -> tuple[tuple[Any, ...], tuple[Block, ...]]:
    return (d.rng.random() < 0.5,), (d.body(3, 2), d.body(2, 1))


@operation(4, _while_parts, weight=2, is_differentiable=False)
def _while_loop(instruction: Instruction, x: Any, y: Any, z: Any, n: Any) -> Any:
    (computes_its_end,) = instruction.static
    body, ends = instruction.blocks
    count = _index(n) + 1

    def goes_on(state: Any) -> Any:
        if not computes_its_end:
            return state[0] < count
        return (state[0] < 4) & (ends(state[1], n)[0][0] + 1 > 0)

    def once(state: Any) -> Any:
        return (state[0] + 1, *body(state[1], state[2], z))

    return lax.while_loop(goes_on, once, (0, x, y))[1:]


@operation(3, lambda d: ((), (d.body(2, 2), d.body(2, 2))), weight=3)
def _cond(instruction: Instruction, x: Any, y: Any, p: Any) -> Any:
    return lax.cond(p[0] > 0, *instruction.blocks, x, y)


@operation(3, lambda d: ((), (d.body(2, 2), d.body(2, 2), d.body(2, 2))))
def _switch(instruction: Instruction, x: Any, y: Any, p: Any) -> Any:
    return lax.switch(_index(p), instruction.blocks, x, y)


HIGHER_ORDER = frozenset(
    {
        "jit",
        "jit_twice",
        "remat",
        "custom_jvp",
        "custom_vjp",
        "vmap",
        "grad",
        "jvp",
        "scan",
        "while_loop",
        "cond",
        "switch",
    }
)


@functools.cache
def draw(seed: int, axes: tuple[tuple[str, int], ...], num_inputs: int, length: int) -> Block:
    """The program of a seed, for replicas over these axes."""
    return Drawer(random.Random(seed), dict(axes)).program(num_inputs, length)
