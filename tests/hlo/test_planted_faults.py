"""Faults that are planted in recorded texts: readers count or name every one of them."""

import dataclasses
import re
from collections.abc import Callable, Iterator

import pytest

from jaxdist import hlo
from tests.hlo.record import Text, recorded
from tests.tables import sampled

GPU = [t for t in recorded() if t.platform == "gpu"]
KIND = (
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)"
)
HALF = re.compile(rf"^ *(?:ROOT )?%(\S+) = (.*) {KIND}(-start|-done|)\((.*)$")


@dataclasses.dataclass(frozen=True)
class Half:
    """A line of a collective: all of it, its start or its done."""

    line: str
    name: str
    shape: str
    kind: str
    half: str
    rest: str

    @property
    def num_bytes(self) -> int:
        """The bytes of its shape, without the readers that are tested."""
        total = 0
        for dtype, dims in re.findall(r"([a-z]+\d+\w*)\[([\d,]*)\]", self.shape):
            size = int(re.findall(r"\d+", dtype)[0]) // 8
            for dim in dims.split(","):
                size *= int(dim or 1)
            total += size
        return total


def _find_halves(text: str) -> Iterator[Half]:
    for line in text.splitlines():
        if found := HALF.match(re.sub(r"/\*.*?\*/", "", line)):
            yield Half(line, *found.groups())


def _get_sizes(text: str) -> list[tuple[str, int]]:
    return sorted((c.kind, c.bytes_per_device) for c in hlo.collectives(text))


@pytest.mark.parametrize("text", sampled(GPU, 12))
def test_each_line_of_a_collective_counts_once_with_the_bytes_of_its_result(text: Text) -> None:
    """By a regular expression over the lines: results are those of a done, or of the whole."""
    lines = [h for h in _find_halves(text.text) if h.half != "-start"]
    assert _get_sizes(text.text) == sorted((h.kind, h.num_bytes) for h in lines)


ASYNC = [t for t in GPU if any(h.half == "-start" for h in _find_halves(t.text))]


def _find_pair(text: str) -> tuple[Half, Half]:
    start = next(h for h in _find_halves(text) if h.half == "-start")
    end = next(
        h
        for h in _find_halves(text)
        if h.half == "-done" and re.search(rf"%{re.escape(start.name)}\b", h.rest)
    )
    return start, end


@pytest.mark.parametrize("text", sampled(ASYNC, 6))
def test_a_second_start_and_done_are_a_second_collective(text: Text) -> None:
    start, end = _find_pair(text.text)
    again = "\n".join(
        h.line.replace(f"%{start.name}", "%second").replace(f"%{end.name}", "%second_done")
        for h in (start, end)
    ).replace("ROOT ", "")
    planted = text.text.replace(start.line, f"{again}\n{start.line}")
    assert sorted([*_get_sizes(text.text), (start.kind, end.num_bytes)]) == _get_sizes(planted)
    assert hlo.unknown(planted) == ()


@pytest.mark.parametrize("text", sampled(ASYNC, 6))
def test_a_second_start_without_a_done_is_named(text: Text) -> None:
    start, _ = _find_pair(text.text)
    again = start.line.replace(f"%{start.name}", "%second")
    planted = text.text.replace(start.line, f"{start.line}\n{again}")
    assert hlo.unknown(planted) == (f"{start.kind}-start without its done",)


@pytest.mark.parametrize("text", sampled(ASYNC, 6))
def test_a_collective_that_lost_its_done_counts_and_is_named(text: Text) -> None:
    start, end = _find_pair(text.text)
    planted = text.text.replace(end.line + "\n", "")
    assert hlo.unknown(planted) == (f"{start.kind}-start without its done",)
    assert _get_sizes(planted) == _get_sizes(text.text)


@pytest.mark.parametrize("text", sampled(ASYNC, 6))
def test_a_done_that_lost_its_start_is_named(text: Text) -> None:
    start, _ = _find_pair(text.text)
    planted = text.text.replace(start.line + "\n", "")
    assert hlo.unknown(planted) == (f"{start.kind}-done without its start",)


def _rename(opcode: str, to: str) -> Callable[[str], str]:
    return lambda text: text.replace(f" {opcode}(", f" {to}(")


# The fault, the programs that have what it changes, and what reports name.
FAULTS = {
    "start": (_rename("all-reduce-start", "all-sum-start"), "transformer", "all-sum"),
    "collective": (_rename("all-gather-start", "gather-all-start"), "groups", "gather-all"),
    "done": (_rename("all-reduce-done", "all-reduce-end"), "transformer", "all-reduce-end"),
    "dot": (_rename("dot", "contract"), "data_parallel", "contract"),
    "fusion": (_rename("fusion", "fission"), "conv_net", "fission"),
    "loop": (_rename("while", "repeat"), "scan", "repeat"),
    "gemm": (lambda t: t.replace("__cublas$lt", "__cublas$x"), "data_parallel_gemm", "__cublas$x"),
    "fp8 gemm": (lambda t: t.replace("__cublas$lt", "__cublas$x"), "fp8_gemm", "__cublas$x"),
    "convolution": (lambda t: t.replace("__cudnn$c", "__cudnn$x"), "conv_net", "__cudnn$xonv"),
    "line": (lambda t: re.sub(r"(%\S+) = (.*) dot\(", r"\1 is \2 dot(", t), "transformer", "line"),
    "body": (lambda t: re.sub(r" body=%", " body=%no_", t), "scan", "'no_"),
    "fused": (lambda t: re.sub(r" calls=%", " calls=%no_", t), "transformer", "'no_"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_new_compiler_could_write_otherwise_is_named(fault: str) -> None:
    plant, program, named = FAULTS[fault]
    for text in GPU:
        if text.program == program:
            planted = plant(text.text)
            if fault not in ("start", "collective", "done"):
                assert planted != text.text, text
                assert [n for n in hlo.work(planted).unknown if named in n], text
            if planted != text.text:
                assert [n for n in hlo.unknown(planted) if named in n], text


@pytest.mark.parametrize("program", ["data_parallel_gemm", "fp8_gemm"])
def test_dims_that_a_library_call_lost_are_named(program: str) -> None:
    for text in GPU:
        if text.program == program:
            planted = text.text.replace("lhs_contracting_dimensions", "lhs_summed_dimensions")
            assert [n for n in hlo.work(planted).unknown if "__cublas$lt$matmul" in n]
