"""Random programs as source, one for each number: steps that mean something on one device.

A step is written once, with a context `c` that reduces over replicas (`meanings.py`). With the
rows of all replicas on one device the context does nothing, and the step is plain JAX.
"""

import dataclasses
import random
import textwrap

from tests.program.one_device import models, statements
from tests.program.one_device.exclusions import EXCLUDED

ROWS = {  # Rows of each replica, for a number of replicas.
    1: [(6,), (5,)],
    2: [(3, 3), (4, 4), (4, 3), (5, 0)],
    3: [(2, 2, 2), (3, 3, 1), (2, 2, 0)],
    4: [(2, 2, 2, 2), (3, 3, 3, 3), (3, 3, 3, 1), (2, 2, 1, 0), (1, 1, 0, 0)],
    8: [(1,) * 8, (2,) * 8, (2, 2, 2, 2, 2, 2, 1, 0)],
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a number, and how its replicas, rows and parameters are placed."""

    number: int
    kind: str  # "rows", "pytree" or "module"
    strategy: str  # "mirrored", "two axes", "grid" (with logical devices) or "virtual"
    rows: tuple[int, ...]
    placement: str  # "whole", "zero", "fsdp" or "hsdp"
    dtype: str
    steps: int
    features: frozenset[str]
    source: str

    @property
    def is_even(self) -> bool:
        return len(set(self.rows)) == 1

    @property
    def has_empty_replica(self) -> bool:
        return 0 in self.rows

    def __str__(self) -> str:
        head = f"# program {self.number}: {self.strategy}, rows {self.rows}, {self.placement}, "
        return f"{head}{self.dtype}, {self.steps} steps\n{self.source}"


def program_of(number: int) -> Program:
    """Return the program of a number: the first that is not excluded."""
    attempt = 0
    while True:
        program = _Writer(random.Random(f"{number} {attempt}"), number).program()
        if not any(is_excluded(program) for is_excluded in EXCLUDED.values()):
            return program
        attempt += 1


class _Writer:
    """Draws the parts of one program, and writes them down."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self.rng = rng
        self.number = number
        self.features: set[str] = set()
        self.lines: list[str] = []
        self.of_rows = ["x", "t"]
        self.equal = ["w0", "w1"]

    def program(self) -> Program:
        rng = self.rng
        kind = rng.choice(["rows", "pytree", "pytree", "module"])
        strategy = rng.choice(["mirrored"] * 6 + ["two axes", "two axes", "grid", "virtual"])
        count = {"two axes": 4, "grid": 2, "virtual": 4}.get(strategy)
        rows = rng.choice(ROWS[count or rng.choice([1, 2, 2, 2, 2, 3, 3, 4, 4, 8])])
        if strategy in ("grid", "virtual"):
            rows = (rng.choice([2, 3]),) * len(rows)
        placements = ["whole", "whole"]
        # Virtual replicas share devices, so nothing is in pieces.
        placements += ["fsdp", "zero"] if strategy != "virtual" else []
        placements += ["hsdp", "hsdp"] if strategy == "two axes" else []
        placement = "whole" if kind == "rows" else rng.choice(placements)
        dtype = rng.choice(["float32"] * 4 + ["bfloat16"])
        steps = rng.choice([1, 2, 2, 3]) if kind != "rows" else 1
        body = {"rows": self.rows, "pytree": self.pytree, "module": self.module}[kind]
        self.is_even = len(set(rows)) == 1
        source = body(placement)
        features = frozenset(self.features | {strategy, placement, dtype, kind})
        return Program(self.number, kind, strategy, rows, placement, dtype, steps, features, source)

    def pick(self, table: dict[str, str] | dict[str, tuple[str, str]], what: str) -> str:
        name = self.rng.choice(sorted(table))
        self.features.add(f"{what} {name}")
        return name

    def fill(self, text: str) -> str:
        newest = self.of_rows[-3:]
        return text.format(
            a=self.rng.choice(newest),
            b=self.rng.choice(self.of_rows),
            w=self.rng.choice(self.equal[-3:]),
            v=self.rng.choice(self.equal),
            m=self.rng.choice(["m0", "m1"]),
        )

    def statements(self, least: int, most: int) -> None:
        for i in range(self.rng.randint(least, most)):
            of = self.rng.choice(["row", "row", "over", "equal"])
            tables = {
                "row": statements.OF_A_ROW,
                "over": statements.OVER_ROWS,
                "equal": statements.OF_EQUAL,
            }
            text = self.fill(tables[of][self.pick(tables[of], of)])
            name = f"r{i}" if of == "row" else f"e{i}"
            self.lines.append(f"{name} = {text}")
            (self.of_rows if of == "row" else self.equal).append(name)

    def head(self) -> list[str]:
        return [
            "n = c.sum(x.shape[0])",
            "t = jnp.sin(x[:, ::-1] * 2)",
            "w0, w1 = vector(0), vector(1)",
            "m0, m1 = matrix(0), matrix(1)",
        ]

    def results(self) -> str:
        rows, equal = self.of_rows[2:][-2:], self.equal[2:][-3:]
        return (
            "{" + ", ".join(f"'{n}': {n}" for n in rows) + "}, "
            "{" + ", ".join([*(f"'{n}': {n}" for n in equal), "'n': n"]) + "}"
        )

    def rows(self, placement: str) -> str:
        self.statements(3, 6)
        lines = [*self.head(), *self.lines, f"return state, {self.results()}"]
        return "def start(c):\n    return ()\n\n\n" + _function("step(c, state, x, y)", lines)

    def loss(self) -> list[str]:
        text = models.LOSSES[self.pick(models.LOSSES, "loss")]
        if self.rng.random() < 0.2:
            self.features.add("loss regularized")
            norm = "sum((q ** 2).sum() for q in jax.tree.leaves(c.whole(p)))"
            return [f"return ({text}).sum() / n + 0.01 * {norm} * x.shape[0] / n"]
        return [f"return ({text}).sum() / n"]

    def optimizer(self, placement: str) -> str:
        table = self.rng.choice([models.ELEMENTWISE, models.NOT_ELEMENTWISE])
        # Norms and the like need whole arrays, or `sharded_update`.
        needs_whole = table is models.NOT_ELEMENTWISE or self.rng.random() < 0.2
        if placement == "zero" or (placement != "whole" and needs_whole):
            self.features.add("sharded_update")
        return table[self.pick(table, "optimizer")]

    def pytree(self, placement: str) -> str:
        self.statements(0, 2)
        start, body = models.PYTREES[self.pick(models.PYTREES, "model")]
        tx = self.optimizer(placement)
        second = self.rng.random() < 0.3
        table = models.SECOND_ORDER if second else models.GRADIENTS
        gradient = self.fill(table[self.pick(table, "second" if second else "gradient")])
        lines = [
            *self.head(),
            *self.lines,
            "p, s = state",
            f"h = jnp.clip(jnp.nan_to_num({self.of_rows[-1]}), -3, 3)",
            *_function("model(p, h)", body.split("\n")).splitlines(),
            *_function("loss_of(p)", ["out = model(p, h)", *self.loss()]).splitlines(),
            *gradient.split("\n"),
            _reduction(placement),
            "updates, s = c.tx.update(grads, s, p)",
            "p = optax.apply_updates(p, updates)",
            f"return (p, s), {self.results()[:-1]}, 'loss': loss}}",
        ]
        return (
            f"TX = {tx}\n\n\n"
            f"def start(c):\n    return {start}\n\n\n"
            f"{_function('step(c, state, x, y)', lines)}"
        )

    def module(self, placement: str) -> str:
        self.statements(0, 2)
        names = {k: v for k, v in models.MODULES.items() if k != "batch_norm" or self.is_even}
        init, body = names[self.pick(names, "module")]
        tx = self.optimizer(placement)
        lines = [
            *self.head(),
            *self.lines,
            "model, optimizer = state",
            f"h = jnp.clip(jnp.nan_to_num({self.of_rows[-1]}), -3, 3)",
            *_function("loss_of(p)", ["out = p(c, h, y, n)", *self.loss()])
            .replace(
                "jax.tree.leaves(c.whole(p))", "jax.tree.leaves(c.whole(nnx.state(p, nnx.Param)))"
            )
            .splitlines(),
            "loss, grads = nnx.value_and_grad(loss_of)(model)",
            _reduction(placement),
            "optimizer.update(model, grads)",
            f"return state, {self.results()[:-1]}, 'loss': loss}}",
        ]
        module = "class Model(nnx.Module):\n" + textwrap.indent(
            _function("__init__(self, c, rngs)", init.split("\n"))
            + "\n\n"
            + _function("__call__(self, c, h, y, n)", body.split("\n")),
            "    ",
        )
        return (
            f"TX = {tx}\n\n\n{module}\n\n\n"
            "def start(c):\n    return Model(c, nnx.Rngs(0))\n\n\n"
            f"{_function('step(c, state, x, y)', lines)}"
        )


def _function(signature: str, lines: list[str]) -> str:
    return f"def {signature}:\n" + textwrap.indent("\n".join(lines), "    ")


def _reduction(placement: str) -> str:
    # With `zero`, `sharded_update` sums the gradients.
    if placement == "zero":
        return "loss, grads = c.sum(loss), c.own(grads)"
    return "loss, grads = c.sum((loss, grads))"
