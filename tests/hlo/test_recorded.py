"""Readers of compiled programs, on texts that compilers of CPU, TPU and GPU wrote.

What a program asks of a device is counted from its trace, and stands in each recorded text.
"""

import collections
import re
from typing import Any

import pytest

from jaxdist import hlo
from jaxdist.hlo import _text
from tests.hlo.programs import PROGRAMS
from tests.hlo.record import Text, recorded
from tests.tables import sampled

TEXTS = list(recorded())
MOST = {p.name: p.most_products for p in PROGRAMS}
# What a compiler makes of other kinds of collectives, or in other dtypes, than were asked for.
OTHERWISE = {
    # By GSPMD, and in a while loop: the trace does not say how often or what.
    "fsdp": {"cpu", "tpu", "gpu"},
    "branches": {"cpu", "tpu", "gpu"},
    # Sums of bfloat16 are made in float32; TPUs have no reduce-scatter of so little.
    "reduce_scatter": {"cpu", "tpu"},
    "ppermute": {"cpu"},
    # It pads rows to whole tiles, and moves some of them to the next device afterwards.
    "scattered": {"tpu"},
}


def test_texts_of_all_platforms_were_recorded_by_both_versions() -> None:
    found = collections.Counter((t.platform, t.version) for t in TEXTS)
    assert {platform for platform, _ in found} == {"cpu", "gpu", "tpu"}
    assert len(found) == 6
    for (platform, _), count in found.items():
        assert count == sum(platform in p.platforms for p in PROGRAMS) * (1 + (platform == "gpu"))


@pytest.mark.parametrize("text", sampled(TEXTS, 10))
def test_nothing_of_a_recorded_text_is_unknown(text: Text) -> None:
    assert hlo.unknown(text.text) == ()
    # Solvers are known and not counted.
    assert hlo.work(text.text).unknown == () or text.program == "solvers"


# A product is in a branch or in a kernel, or made of an FFT or of a solver.
NOT_IN_TRACE = ("branches", "fft", "solvers", "splash")


@pytest.mark.parametrize("text", sampled([t for t in TEXTS if t.program not in NOT_IN_TRACE], 10))
def test_products_are_those_of_the_trace(text: Text) -> None:
    asked = text.asked.get("flops", 0)
    assert asked <= hlo.work(text.text).flops <= MOST[text.program] * asked


def test_splash_attention_counts_in_full_and_its_loops_as_often_as_they_run() -> None:
    layers, rows, positions, width, heads, dims = 3, 2, 256, 256, 2, 128
    # Queries and results; again in the backward pass, where results are not needed; two gradients
    # of each product.
    dense = (2 + 1 + 4) * 2 * rows * positions * width * heads * dims
    # The forward pass twice, gradients of keys and values, gradients of queries.
    kernels = (2 + 2 + 4 + 3) * 2 * rows * heads * positions * positions * dims
    texts = [t for t in TEXTS if t.program == "splash"]
    assert len(texts) == 2
    for text in texts:
        assert "kernel_metadata={\n" in text.text, "this text shows it no more"
        found = hlo.work(text.text)
        assert (found.flops, found.unknown_loops) == (layers * (dense + kernels), 0)


def test_a_reduce_scatter_that_is_a_fusion_has_its_bytes_and_its_time() -> None:
    texts = [t for t in TEXTS if t.program == "scattered"]
    assert len(texts) == 2
    for text in texts:
        assert "calls=%all-reduce-scatter" in text.text, "this text shows it no more"
        scattered, moved = hlo.collectives(text.text)
        # 1,024 rows are padded to 4 x 264.
        sent = 3 * 264 * 4096 * 2
        assert (scattered.kind, scattered.bytes_sent) == ("reduce-scatter", sent)
        assert moved.kind == "collective-permute"
        made = hlo.schedule(text.text, lambda c: (c.kind, c.bytes_sent), lambda work: 0.0)
        assert made.waits["reduce-scatter"] == sent


AS_ASKED = [t for t in TEXTS if t.platform not in OTHERWISE.get(t.program, ())]


@pytest.mark.parametrize("text", sampled(AS_ASKED, 10))
def test_bytes_of_collectives_are_those_of_the_trace(text: Text) -> None:
    found: collections.Counter[str] = collections.Counter()
    for c in hlo.collectives(text.text):
        assert c.times is not None
        found[c.kind] += c.bytes_per_device * c.times
    asked = {kind: n for kind, n in text.asked.items() if kind != "flops"}
    assert dict(found) == asked


def _is_done_of(i: _text.Instruction, start: _text.Instruction) -> bool:
    return i.operands[:1] == (start.name,) and i.opcode == f"{start.opcode[: -len('-start')]}-done"


@pytest.mark.parametrize("text", sampled([t for t in TEXTS if t.platform != "cpu"], 10))
def test_a_start_gives_what_its_done_gives(text: Text) -> None:
    count = 0
    for computation in _text.read(text.text).computations.values():
        for start in computation.values():
            if not start.opcode.endswith("-start") or start.opcode == "copy-start":
                continue
            [done] = [i for i in computation.values() if _is_done_of(i, start)]
            given = re.sub(r"\{[^{}]*\}", "", _text.resolve_start(start).shape)
            assert given == re.sub(r"\{[^{}]*\}", "", done.shape), start
            count += 1
    assert count == len(re.findall(r"(?<!copy)-done\(", text.text))


def _communicated(text: Text) -> Any:
    rows: collections.Counter[Any] = collections.Counter()
    for c in hlo.collectives(text.text):
        groups = frozenset(map(frozenset, c.groups))
        rows[c.kind, groups, c.times] += c.bytes_per_device
    return rows


def test_both_versions_of_a_compiler_are_read_alike() -> None:
    by_program = collections.defaultdict(list)
    for text in TEXTS:
        by_program[text.program, text.platform, text.topology].append(text)
    for (program, *_), texts in by_program.items():
        one, other = texts
        assert _communicated(one) == _communicated(other), f"{one} and {other}"
        if program != "fft":
            assert hlo.work(one.text).flops == hlo.work(other.text).flops, f"{one} and {other}"


def test_work_of_a_step_is_the_same_on_one_machine_and_on_four() -> None:
    """Data parallel: each device has its own rows, however many there are."""
    for text in TEXTS:
        if text.topology == "4x1x8" and text.program.startswith(("data_parallel", "transformer")):
            [same] = [
                t
                for t in TEXTS
                if (t.program, t.version, t.topology) == (text.program, text.version, "1x1x8")
            ]
            assert hlo.work(text.text) == hlo.work(same.text)


def test_a_collective_that_is_laid_over_other_work_counts_once() -> None:
    """On TPUs the text has it in each fusion that it is laid over."""
    for text in TEXTS:
        if (text.program, text.platform) == ("fsdp", "tpu"):
            assert text.text.count(" all-gather(") > 2, "this text shows it no more"
            gathers = [c for c in hlo.collectives(text.text) if c.kind == "all-gather"]
            assert [(c.bytes_per_device, c.times) for c in gathers] == [(131072, 1)] * 2


def test_room_that_a_library_works_in_is_no_traffic() -> None:
    """The same program by cuBLAS and by Triton: at most its operands and results differ."""
    rooms = 0
    for text in TEXTS:
        if text.program == "data_parallel_gemm":
            rooms += sum(map(int, re.findall(r"s8\[(\d+)\]\{0\}\) custom-call", text.text)))
            assert hlo.work(text.text).memory_bytes < 11e6
    assert rooms > 100e6
