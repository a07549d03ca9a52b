"""Predictions of runs that others published: `python -m tools.published`.

It compiles the models of `configs/published` for one slice and for two, with the compiler for TPUs,
and writes the table of `docs/machines/published.md`. Programs for two slices and for more differ
only in the groups of the collectives between slices, so the times of the others follow from that
for two; `--compile-all` compiles every row instead. Every compilation takes half a minute or more.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist._mesh import ReplicaMesh
from jaxdist._planning import make_target, predict_expected
from jaxdist._reports import Expected
from jaxdist.cost import CHIPS, Chip
from jaxdist.jobs import load_job
from jaxdist.jobs._plan import _make_source
from jaxdist.jobs.topics_lm import ModelConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "machines" / "published.md"
CONFIGS = ROOT / "configs" / "published"
_BEGIN, _END = "<!-- table: python -m tools.published -->", "<!-- end of the table -->"


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run: a configuration, its slices, and TFLOP/s and utilisation of a chip."""

    config: str
    topology: str
    slices: int
    tflops: float
    utilisation: float  # in percent
    fitted: bool = False


def _of_slices(config: str, *published: tuple[int, float, float]) -> list[Run]:
    return [
        Run(config, "v5e:16x16", n, tflops, part, fitted=n == 1) for n, tflops, part in published
    ]


# MaxText, configs/v5e/README.md and configs/v5p/README.md.
RUNS: tuple[Run, ...] = (
    *_of_slices(
        "v5e_16b",
        (1, 120, 61.10),
        (2, 117, 59.37),
        (4, 117, 59.14),
        (8, 115, 58.27),
        (16, 111, 56.56),
        (32, 108, 54.65),
    ),
    *_of_slices(
        "v5e_64b",
        (1, 118, 59.90),
        (2, 112, 56.66),
        (4, 110, 55.85),
        (8, 108, 54.96),
        (16, 105, 53.29),
        (32, 99, 50.18),
    ),
    Run("v5p_64b", "v5p:4x4x4", 1, 323, 70.31),
    Run("v5p_64b", "v5p:4x4x4", 2, 309, 67.26),
    Run("v5p_512b", "v5p:8x8x8", 1, 294, 63.99),
)


def count_model_flops(model: ModelConfig, rows: int, length: int) -> int:
    """Return the operations of a step as the published figures count them.

    That is 6 for each parameter of a matrix and token, and attention in full, without anything that
    is computed again. The embedding is a lookup, and its matrix counts as the output does.
    """
    inner = model.heads * model.dims_of_a_head
    products = 4 * model.width * inner + (3 if model.mlp == "gated" else 2) * (
        model.width * model.hidden
    )
    matrices = model.layers * products + model.width * model.vocabulary
    attention = 12 * rows * length**2 * inner * model.layers
    return 6 * rows * length * matrices + attention


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program that was compiled for TPUs which are only described."""

    text: str
    layout: ReplicaMesh
    device: Chip
    model_flops: float  # of one chip


@functools.cache
def compile_run(config: str, topology: str) -> Compiled:
    """Compile the train step of a configuration."""
    job: Any = load_job(CONFIGS / f"{config}.toml")
    source = _make_source(job, job.rules[0])
    logical = job.config.strategy.logical_devices
    target = make_target(topology, logical, source.axes, source.communication)
    program = source.lower(target.strategy, source.rows)
    flops = count_model_flops(
        job.config.model, job.rows_per_replica, job.config.data.sequence_length
    )
    per_chip = flops / target.strategy.layout.num_logical * target.devices_per_chip
    return Compiled(program.compile().as_text(), program.layout, target.device, per_chip)


def predict(run: Run, *, compile_all: bool = False) -> tuple[Expected, float]:
    """Return the expected time of a run, and its TFLOP/s of a chip."""
    slices = run.slices if compile_all else min(run.slices, 2)
    name = run.topology + (f"*{slices}" if slices > 1 else "")
    made = compile_run(run.config, name)
    several = run.slices if run.slices > 1 else None
    expected = predict_expected(made.text, made.layout, made.device, num_slices=several)
    return expected, made.model_flops / expected.seconds / 1e12


def format_row(run: Run, expected: Expected, tflops: float) -> str:
    """Return a row of the table."""
    error = tflops / run.tflops - 1
    peak = CHIPS[run.topology.split(":")[0]].flops / 1e12
    how = "fitted" if run.fitted else f"{error:+.1%}"
    waits = f"{expected.inner:.2f} s ICI" + (
        f", {expected.outer:.2f} s DCN" if run.slices > 1 else ""
    )
    return (
        f"| {run.config} | {run.slices} x {run.topology} | {run.tflops:g} | {tflops:.1f} | {how} | "
        f"{run.utilisation:.1f} % | {100 * tflops / peak:.1f} % | {expected.seconds:.2f} s | "
        f"{waits} |"
    )


def make_table(rows: Sequence[str]) -> str:
    """Return the table."""
    head = (
        "| configuration | slices | TFLOP/s a chip, published | predicted | error | "
        "utilisation, published | predicted | step | of it waits for |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|---|---|---|", *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict the runs, and write their table into the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.published", description=__doc__)
    parser.add_argument("--compile-all", action="store_true", help="compile for every row")
    parser.add_argument("--only", default="", help="the runs of one configuration; only printed")
    given = parser.parse_args(arguments)
    rows = []
    for run in RUNS:
        if run.config.startswith(given.only):
            rows.append(format_row(run, *predict(run, compile_all=given.compile_all)))
            print(rows[-1], flush=True)
    if not given.only:
        page = PAGE.read_text()
        before, after = page.split(_BEGIN)[0], page.split(_END)[1]
        PAGE.write_text(f"{before}{_BEGIN}\n{make_table(rows)}\n{_END}{after}")


if __name__ == "__main__":
    main()
