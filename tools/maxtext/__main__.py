"""Compiles training steps of MaxText and of jaxdist, and writes the table of both.

Models, batches and slices are the same, and so are JAX, Flax and libtpu. Nothing runs on a TPU. One
reader (`jaxdist.hlo`) and one planner read both texts.
"""

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist import hlo
from jaxdist._planning import make_target, predict_expected
from jaxdist.jobs import load_job
from jaxdist.jobs._plan import _make_source

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "machines" / "maxtext.md"
OUT = ROOT / "build" / "maxtext" / "steps"
CONFIG = ROOT / "configs" / "published" / "v5e_16b.toml"
_BEGIN, _END = "<!-- table: make maxtext -->", "<!-- end of the table -->"
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Column:
    """A step that both libraries compile.

    Attributes:
        title: What the table calls it.
        topology: The slice.
        maxtext: Settings of MaxText beside its defaults, which are the model of 1B.
        entries: Entries of the configuration of jaxdist beside those of `v5e_16b.toml`.
        logical: The logical devices of a replica.
    """

    title: str
    topology: str
    maxtext: tuple[str, ...]
    entries: tuple[str, ...]
    logical: int = 1


_1B = ("model.layers=16", "model.width=2048", "model.heads=16", "model.hidden=7168")
_7B = ("model.layers=32", "model.width=4096", "model.heads=32", "model.hidden=11008")
_FOUR_ROWS = ("data.batch_size=32", "strategy.partition=fsdp", "model.attention=splash")

COLUMNS = {
    "1b": Column(
        "1B v5e 4x4, FSDP 16",
        "v5e:4x4",
        ("compile_topology=v5e-16", "per_device_batch_size=4"),
        (*_1B, *_FOUR_ROWS),
    ),
    "1b_tensor_parallel": Column(
        "1B v5e 4x4, FSDP 4 x TP 4",
        "v5e:4x4",
        (
            "compile_topology=v5e-16",
            "per_device_batch_size=4",
            "ici_fsdp_parallelism=4",
            "ici_tensor_parallelism=4",
        ),
        (
            *_1B,
            "data.batch_size=32",
            "strategy.partition=fsdp_tensor_parallel",
            "strategy.logical_devices=4",
            "model.split_residual=true",
            "model.attention=splash",
        ),
        logical=4,
    ),
    "7b": Column(
        "7B v5p 4x4x4, FSDP 64",
        "v5p:4x4x4",
        (
            "compile_topology=v5p-128",
            "model_name=llama2-7b",
            "per_device_batch_size=4",
            "max_target_length=2048",
        ),
        (*_7B, *_FOUR_ROWS),
    ),
    "16b": Column(
        "16B v5e 16x16, FSDP 256",
        "v5e:16x16",
        (
            "compile_topology=v5e-256",
            "global_parameter_scale=16",
            "per_device_batch_size=6",
            "max_target_length=2048",
            "remat_policy=full",
        ),
        ("strategy.partition=fsdp", "model.attention=splash"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """The figures of a compiled step, of one chip. Memory is in MiB, times are in ms."""

    products: float  # TFLOP
    hbm: float  # GB
    sent: dict[str, float]  # GiB, by kind of collective
    expected: float
    work: float
    waits: float
    arguments: float
    temporaries: float
    peak: float
    unknown: tuple[str, ...]


def _compile_maxtext(column: Column, folder: Path) -> None:
    settings = ("enable_checkpointing=false", "log_config=false", "compile_topology_num_slices=1")
    command = [sys.executable, "-m", "tools.maxtext.compile_step", str(folder)]
    environ = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [*command, *settings, *column.maxtext],
            cwd=ROOT,
            env=os.environ | environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )


def _compile_jaxdist(column: Column, folder: Path) -> None:
    job: Any = load_job(CONFIG, column.entries)
    source = _make_source(job, job.rules[0])
    target = make_target(column.topology, column.logical, source.axes, source.communication)
    program = source.lower(target.strategy, source.rows)
    compiled = program.compile()
    used: Any = compiled.executable.memory_analysis()
    found = {
        "arguments": used.argument_size_in_bytes,
        "temporaries": used.temp_size_in_bytes,
        "peak": used.peak_memory_in_bytes,
    }
    (folder / "step.hlo").write_text(compiled.as_text())
    (folder / "memory.json").write_text(json.dumps(found))


def _read(column: Column, folder: Path) -> Step:
    text = (folder / "step.hlo").read_text()
    memory = json.loads((folder / "memory.json").read_text())
    target = make_target(column.topology, column.logical)
    work = hlo.work(text)
    expected = predict_expected(text, target.strategy.layout, target.device)
    sent: dict[str, float] = collections.defaultdict(float)
    for c in hlo.collectives(text):
        sent[c.kind] += c.bytes_sent * (c.times or 1) / 2**30
    return Step(
        work.flops / 1e12,
        work.memory_bytes / 1e9,
        dict(sent),
        expected.seconds * 1e3,
        expected.work * 1e3,
        (expected.inner + expected.outer) * 1e3,
        memory["arguments"] / 2**20,
        memory["temporaries"] / 2**20,
        memory["peak"] / 2**20,
        work.unknown,
    )


def _format(value: float) -> str:
    """Write four digits, and a large number without an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def compare(theirs: Step, ours: Step) -> list[str]:
    """Return a cell for each row of the table: MaxText, jaxdist, and the ratio."""
    both = (theirs, ours)

    def cell(*values: float) -> str:
        left, right = values
        ratio = f", {right / left:.2f}" if left else ""
        return f"{_format(left)}, {_format(right)}{ratio}"

    def list_kinds(kind: str) -> str:
        return ", ".join(f"{step.sent.get(kind, 0):.3g}" for step in both)

    return [
        cell(*(s.products for s in both)),
        cell(*(s.hbm for s in both)),
        cell(*(sum(s.sent.values()) for s in both)),
        *map(list_kinds, _KINDS),
        cell(*(s.expected for s in both)),
        cell(*(s.work for s in both)),
        ", ".join(f"{s.waits:.3g}" for s in both),
        cell(*(s.arguments for s in both)),
        cell(*(s.temporaries for s in both)),
        cell(*(s.peak for s in both)),
    ]


ROWS = (
    "products, TFLOP",
    "HBM, GB",
    "sent over ICI, GiB",
    *(f"... by {kind}" for kind in _KINDS),
    "expected step, ms",
    "... of it work",
    "... of it waits",
    "arguments, MiB",
    "temporaries, MiB",
    "peak, MiB",
)


def make_table(columns: dict[str, list[str]]) -> str:
    """Return the table of columns by their titles."""
    lines = [
        "| of a chip: MaxText, jaxdist, ratio | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    lines += [
        f"| {name} | {' | '.join(cells[number] for cells in columns.values())} |"
        for number, name in enumerate(ROWS)
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile the steps, and write their table into the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.maxtext", description=__doc__)
    parser.add_argument(
        "columns",
        nargs="*",
        choices=[[], *COLUMNS],  # Python 3.12 checks the default, an empty list, as well
        metavar="COLUMN",
        help=f"columns to print, of {', '.join(COLUMNS)}; without any, the page is written",
    )
    parser.add_argument("--keep", action="store_true", help="keep what is compiled already")
    given = parser.parse_args(arguments)
    table = {}
    for name, column in COLUMNS.items():
        if given.columns and name not in given.columns:
            continue
        steps = []
        for library, compile_step in (("maxtext", _compile_maxtext), ("jaxdist", _compile_jaxdist)):
            folder = OUT / name / library
            folder.mkdir(parents=True, exist_ok=True)
            if not (given.keep and (folder / "memory.json").exists()):
                print(f"compiling {column.title} with {library}", flush=True)
                compile_step(column, folder)
            steps.append(_read(column, folder))
            if steps[-1].unknown:
                print(f"not understood in {folder}: {steps[-1].unknown}")
        table[column.title] = compare(*steps)
        print(
            "\n".join(f"{row}: {cell}" for row, cell in zip(ROWS, table[column.title], strict=True))
        )
    if not given.columns:
        page = PAGE.read_text()
        before, after = page.split(_BEGIN)[0], page.split(_END)[1]
        PAGE.write_text(f"{before}{_BEGIN}\n{make_table(table)}\n{_END}{after}")


if __name__ == "__main__":
    main()
