"""The collectives that a step asked for, and those that XLA compiled."""

import dataclasses
import html.parser
import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import jaxdist
from jaxdist import cost
from jaxdist._collectives import AllReducePlan, TraceNotes
from jaxdist._program.jaxprs import primitives
from jaxdist._program.report import explanation
from tests.hlo.test_compiled import EXPECTED, every_collective

X = jaxdist.PerReplica([np.arange(16.0, dtype="float32")] * 8)


def explain(step: Any, *args: Any) -> Any:
    return jaxdist.MirroredStrategy().lower(step, args or (X,)).explain()


def _line(row: Any) -> str:
    file, _, rest = row.source.partition(".py:")
    with open(file + ".py") as lines:
        return lines.readlines()[int(rest.split()[0]) - 1].strip()


def test_what_xla_merges_loses_and_keeps_is_told_by_line() -> None:
    def step(x: Any) -> Any:
        one = lax.psum(x, "replica")
        two = lax.psum(x * 2, "replica")
        lax.psum(x * 3, "replica")
        alone = lax.all_gather(x, "replica")
        again = lax.psum(x, "replica")
        return one, two, alone, again

    report = explain(step)
    outcomes = {_line(a): a.outcome for a in report.asked}
    assert outcomes == {
        'one = lax.psum(x, "replica")': "merged",
        'two = lax.psum(x * 2, "replica")': "merged",
        'lax.psum(x * 3, "replica")': "gone",
        'alone = lax.all_gather(x, "replica")': "compiled",
        'again = lax.psum(x, "replica")': "gone",
    }
    assert [(c.kind, c.operands, len(c.sources)) for c in report.compiled] == [
        ("all-reduce", 2, 2),
        ("all-gather", 1, 1),
    ]
    assert report.num_collectives == 2
    # 7/8 of the whole, twice for an all-reduce: of 2 x 64 bytes, and of 8 x 64.
    assert report.bytes_sent("inside") == 2 * 7 / 8 * 128 + 7 / 8 * 512
    assert report.bytes_sent("between") == 0
    assert not any(c.added for c in report.compiled)


def test_operations_of_one_line_are_counted_one_by_one() -> None:
    def step(x: Any) -> Any:
        sums = [lax.psum(x * i, "replica") for i in range(1, 6)]
        return sums[0], sums[2], sums[0]

    report = explain(step)
    assert [(c.kind, c.operands) for c in report.compiled] == [("all-reduce", 2)]
    assert [a.outcome for a in report.asked] == ["merged", "merged", "gone", "gone", "gone"]
    assert "merged with 1 other" in str(report)

    def large(x: Any) -> Any:
        return lax.psum([x * i for i in range(1, 301)], "replica")

    report = explain(large)
    assert sorted(c.operands for c in report.compiled) == [44, 256], "XLA's limit on CPU"
    assert sum(a.operands for a in report.asked) == 300
    assert not {a.outcome for a in report.asked} & {"gone", "unknown"}


def test_loops_and_branches_are_told() -> None:
    def step(x: Any) -> Any:
        same = lax.psum(x, "replica")
        looped = lax.fori_loop(0, 5, lambda _, c: lax.pmax(c + 1, "replica"), same)
        until = lax.while_loop(lambda c: c[0] > 3, lambda c: lax.pmin(c, "replica") - 1, looped)
        return lax.cond(until[0] > 0, lambda c: lax.psum(c, "replica"), lambda c: c, until)

    report = explain(step)
    rows = [(c.times, c.in_loop, c.in_branch) for c in report.compiled]
    assert sorted(rows, key=str) == [
        (1, False, False),
        (1, False, True),
        (5, True, False),
        (None, True, False),
    ]
    assert [a.times for a in report.asked] == [1, 5, None, 1]
    assert report.num_collectives is None
    assert "as many runs as its loops decide" in str(report)
    assert "1, if taken" in str(report)
    assert "while loop" in str(report)


def test_what_gspmd_adds_is_told_apart() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    strategy = jaxdist.MirroredStrategy(mesh=mesh, replica_axes="data")
    split = NamedSharding(mesh, PartitionSpec(None, "model"))
    weights = jax.device_put(jnp.ones((8, 8)), split)

    def step(w: Any, x: Any) -> Any:
        local = jnp.sum(x @ w)
        return jaxdist.get_replica_context().all_reduce("sum", local)

    x = jaxdist.PerReplica([np.ones((2, 8), "float32")] * 4)
    report = strategy.lower(step, (weights, x)).explain()
    assert [(c.group_size, c.num_groups, c.added) for c in report.compiled if c.added] == [
        (2, 4, True)
    ]
    assert [(c.group_size, c.num_groups) for c in report.compiled if not c.added] == [(4, 2)]
    assert [a.outcome for a in report.asked] == ["compiled"]
    assert "added by XLA" in str(report)


def test_without_logical_devices_nothing_is_added_and_nothing_is_forgotten() -> None:
    strategy = jaxdist.MirroredStrategy()
    program = strategy.lower(every_collective, (X, 3.0))
    report = program.explain()
    assert len(report.asked) == len(program.traced_collectives) == len(EXPECTED)
    assert {a.outcome for a in report.asked} == {"compiled"}
    assert sum(c.count for c in report.compiled) == len(EXPECTED)
    assert not any(c.added for c in report.compiled)


def test_what_jaxdist_itself_asks_for_is_named_and_found() -> None:
    """Statistics of BatchNorm are averaged over the replicas, in the operation of the gradients."""
    strategy = jaxdist.MirroredStrategy()
    with strategy.scope():
        model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def step(model: Any, x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", jnp.sum(model(x)))

    x = jaxdist.PerReplica([np.ones((2, 4), "float32")] * 8)
    report = strategy.lower(step, (model, x)).explain()
    assert [(c.kind, c.operands) for c in report.compiled] == [("all-reduce", 3)]
    assert sorted((a.source.split("[")[0], a.outcome) for a in report.asked)[1:] == [
        ("jaxdist, for args", "merged"),
        ("jaxdist, for args", "merged"),
    ]
    [row] = report.compiled
    assert [_line(row)] == [
        'return jaxdist.get_replica_context().all_reduce("sum", jnp.sum(model(x)))'
    ]


def test_gather_of_a_step_on_uneven_values_is_found() -> None:
    rows = [np.ones((2 + (r == 7), 4), "float32") for r in range(8)]

    def step(x: Any) -> Any:
        return jaxdist.get_replica_context().all_gather(x, 0)

    report = explain(step, jaxdist.PerReplica(rows))
    assert [a.outcome for a in report.asked] == ["compiled"]
    assert [(c.kind, c.added) for c in report.compiled] == [("all-gather", False)]


def test_hints_without_effect_are_named_with_the_reason_in_the_program_that_had_them() -> None:
    options = jaxdist.experimental.CommunicationOptions(
        bytes_per_pack=8, timeout_seconds=5.0, implementation="NCCL"
    )

    def step(x: Any) -> Any:
        replica = jaxdist.get_replica_context()
        return replica.all_gather(x, 0, options=options), replica.all_reduce("sum", x)

    for _ in range(2):
        report = explain(step)
        fields = [sentence.split()[0] for sentence in report.ignored]
        assert fields == ["bytes_per_pack", "timeout_seconds", "implementation"]
        assert "all replicas are in this process" in str(report)

    def without(x: Any) -> Any:
        return jaxdist.get_replica_context().all_reduce("sum", x)

    assert explain(without).ignored == ()
    assert "Hints without effect" not in str(explain(without))


# A call-like primitive that holds a plan.
ALL_REDUCE = Primitive("stand_in_all_reduce")
ALL_REDUCE.multiple_results = True
ALL_REDUCE.def_abstract_eval(lambda *_, jaxpr, plan: [v.aval for v in jaxpr.jaxpr.outvars])
mlir.register_lowering(
    ALL_REDUCE,
    mlir.lower_fun(lambda *a, jaxpr, plan: jaxpr_as_fun(jaxpr)(*a), multiple_results=True),
)


def test_algorithm_of_an_all_reduce_is_shown_with_what_was_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(primitives.CALLS, ALL_REDUCE.name, "jaxpr")
    plan = AllReducePlan(
        "xring", "large", (("xring", 2e-3), ("xla", 3e-3)), ("timeout_seconds: no",)
    )

    def step(x: Any) -> Any:
        ring = [(i, (i + 1) % 8) for i in range(8)]

        def algorithm(x: Any) -> Any:
            for _ in range(3):
                x = lax.ppermute(x, "replica", ring) + 1
            return [x]

        jaxpr = jax.make_jaxpr(algorithm, axis_env=[("replica", 8)])(x)
        [moved] = ALL_REDUCE.bind(x, jaxpr=ClosedJaxpr(jaxpr.jaxpr, jaxpr.consts), plan=plan)
        return moved, lax.psum(x, "replica")

    program = jaxdist.MirroredStrategy().lower(step, (X,))
    assert [(c.kind, c.algorithm) for c in program.traced_collectives] == [
        ("ppermute", "xring"),
        ("ppermute", "xring"),
        ("ppermute", "xring"),
        ("psum", ""),
    ]
    assert "by xring" in repr(program)
    report = program.explain()
    assert [a.outcome for a in report.asked] == ["compiled"] * 4
    assert [a.became for a in report.asked] == ["1 collective-permute"] * 3 + ["1 all-reduce"]
    text = str(report)
    assert re.search(r"xring, 2 ms: large\n +not xla 3 ms", text)
    assert text.endswith("Hints without effect\n  timeout_seconds: no")


def test_links_between_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices 0 to 3 as one worker, 4 to 7 as another."""
    monkeypatch.setattr(cost, "worker_of", lambda d: d.id // 4)
    monkeypatch.setattr("jaxdist.cost._links_of.worker_of", lambda d: d.id // 4)
    inside, across = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]

    def step(x: Any) -> Any:
        part = lax.psum_scatter(x, "replica", axis_index_groups=inside, tiled=True)
        whole = lax.psum(part, "replica", axis_index_groups=across)
        gathered = lax.all_gather(whole, "replica", axis_index_groups=inside, tiled=True)
        swapped = lax.ppermute(x, "replica", [(i, (i + 4) % 8) for i in range(8)])
        near = lax.ppermute(x, "replica", [(0, 1), (4, 5)])
        return gathered, swapped, near

    report = explain(step)
    levels = {(c.kind, c.level) for c in report.compiled}
    assert levels == {
        ("reduce-scatter", "inside"),
        ("all-reduce", "between"),
        ("all-gather", "inside"),
        ("collective-permute", "between"),
        ("collective-permute", "inside"),
    }
    # Two levels send 1/4 of the tensor between workers, in and out; the swap sends all of it.
    assert report.bytes_sent("between") == 64 / 4 + 64
    assert "between workers" in str(report)


def test_program_whose_lines_xla_lost_is_not_guessed_at() -> None:
    program = jaxdist.MirroredStrategy().lower(lambda x: lax.psum(x, "replica"), (X,))
    text = re.sub(r"metadata=\{[^}]*\}", "", program.compile().as_text())
    report = explanation.explain_program(
        "f", program.layout, program.traced_collectives, TraceNotes(), text
    )
    assert [a.outcome for a in report.asked] == ["compiled"], "kind and size are alike"
    [asked] = program.traced_collectives
    other = dataclasses.replace(asked, bytes_per_device=4)
    report = explanation.explain_program("f", program.layout, (other,), TraceNotes(), text)
    assert [a.outcome for a in report.asked] == ["unknown"]
    assert not any(c.added for c in report.compiled)


def test_what_the_reader_does_not_know_is_named_and_what_it_knows_is_not() -> None:
    program = jaxdist.MirroredStrategy().lower(lambda x: x + 1, (1.0,))
    text = program.compile().as_text()
    assert program.compile().explain().unknown == ()
    line = '  %other = f32[] custom-call(), custom_call_target="my_kernel"\n'
    changed = re.sub(r"(?m)^(ENTRY .*)$", r"\1\n" + line, text)
    report = explanation.explain_program("f", program.layout, (), TraceNotes(), changed)
    assert report.unknown == ("custom-call to my_kernel",)
    told = "it may communicate\n  custom-call to my_kernel"
    assert told in str(report)
    for name in "not know it", "my_kernel":
        assert name in report._repr_html_()


def test_program_without_collectives_says_so() -> None:
    report = explain(lambda x: x + 1)
    assert str(report).endswith("The compiled program has none.")
    assert report.num_collectives == 0


class _Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_text_html_and_rich_show_the_same_rows() -> None:
    report = explain(lambda x: (lax.psum(x, "replica"), lax.all_gather(x * 2, "replica")))
    parser = _Cells()
    parser.feed(report._repr_html_())
    assert parser.open == [], "every tag is closed"
    text = str(report)
    assert text == repr(report)
    for row in parser.rows:
        assert re.search(r"\s+".join(map(re.escape, row)), text), row
    assert any("<lambda>" in cell for row in parser.rows for cell in row), "escaped and read back"
    console = Console(file=io.StringIO(), width=250)
    console.print(report)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for row in parser.rows:
        assert all(cell in shown for cell in row)
    table = text.splitlines()[text.splitlines().index("Compiled") + 1 :][:3]
    starts = [m.start() for m in re.finditer(r"(?<=  )\S", table[0])]
    for line in table[1:]:
        assert len(line) >= starts[-1]
        assert line[starts[-1] - 1] == " "
