"""Training steps that ran on an H100: their recorded programs, and what was measured.

Each step is of one device with Adam, and ran on one NVIDIA H100 80GB HBM3 with JAX 0.11.2. The text
is that of the program that ran, with the kernels that XLA had chosen by trying them on the GPU.
"""

import dataclasses
import json
import lzma
from pathlib import Path

import pytest

import jaxdist
from jaxdist import cost, hlo
from jaxdist._planning.expected import predict_expected
from tests.hlo.record import MARK

RECORDED = Path(__file__).parent / "recorded" / "h100-jax-0.11.2.txt.xz"


@dataclasses.dataclass(frozen=True)
class Step:
    """A program, and what was measured of it.

    Args:
        measured_us: The time of a step, without a profiler.
        busy_us: The time in which a kernel ran, with a profiler.
        peak_mib: The peak of the memory in use, of a process that ran only this program.
        compiler_mib: What the compiler of the GPU said of its memory.
        planned_mib: What a plan for a described GPU said of it.
    """

    program: str
    measured_us: float
    kernels: int
    busy_us: float
    peak_mib: float
    compiler_mib: float
    planned_mib: float
    text: str

    def __str__(self) -> str:
        return self.program


def _read() -> list[Step]:
    parts = lzma.decompress(RECORDED.read_bytes()).decode().split(MARK)[1:]
    split = (part.partition("\n") for part in parts)
    return [Step(**json.loads(head), text=text) for head, _, text in split]


STEPS = _read()
# By hand: 6 operations for each parameter of a matrix and each token, and the products of attention
# with all scores: 6 for XLA's, and 7 for cuDNN's, whose backward pass computes the scores again. A
# layer that is computed again in the backward pass has its forward products twice.
_GPT = 12 * 12 * 768 * 768 + 768 * 32000, 8 * 1024, 2 * 8 * 12 * 1024 * 1024 * 64 * 12
FLOPS = {
    "gpt-110m": 6 * _GPT[0] * _GPT[1] + 6 * _GPT[2],
    "gpt-110m-cudnn": 6 * _GPT[0] * _GPT[1] + 7 * _GPT[2],
    "mlp": 2 * 256 * (3 * (784 * 512 + 512 * 512 + 512 * 10) - 784 * 512),
}


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_program_of_a_gpu_is_read_whole(step: Step) -> None:
    assert hlo.unknown(step.text) == ()
    found = hlo.work(step.text)
    assert (found.unknown, found.unknown_loops) == ((), 0)


@pytest.mark.parametrize("step", [s for s in STEPS if s.program in FLOPS], ids=str)
def test_the_operations_are_those_by_hand(step: Step) -> None:
    assert hlo.work(step.text).flops == FLOPS[step.program]


def _expect_us(step: Step) -> float:
    layout = jaxdist.MirroredStrategy(["cpu:0"]).layout
    return predict_expected(step.text, layout, cost.CHIPS["h100"]).seconds * 1e6


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_expected_time_is_near_the_measured_one(step: Step) -> None:
    # The host takes longer to start a small step than its kernels run.
    measured = step.busy_us if step.program == "mlp" else step.measured_us
    assert 0.75 < _expect_us(step) / measured < 1.25


PAGE = Path(__file__).parents[3] / "docs" / "machines" / "accelerator.md"


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_page_has_the_figures_of_each_step(step: Step) -> None:
    expected = _expect_us(step)
    busy = f", {step.busy_us / 1e3:.3f}" if step.program == "mlp" else ""
    ratio = f", {expected / step.busy_us:.2f}" if busy else ""
    figures = (
        f"| {step.kernels:,} | {step.measured_us / 1e3:.3f}{busy} | {expected / 1e3:.3f} "
        f"| {expected / step.measured_us:.2f}{ratio} | {step.planned_mib:,.0f} "
        f"| {step.compiler_mib:,.0f} | {step.peak_mib:,.0f} |"
    )
    assert any(line.endswith(figures) for line in PAGE.read_text().splitlines()), figures
