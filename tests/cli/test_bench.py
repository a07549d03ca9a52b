"""`jaxdist bench collectives`: its output, its files, and its errors."""

import pathlib

import jax
import pytest

import jaxdist
from jaxdist import cost
from jaxdist._mesh import ReplicaMesh
from jaxdist.cli import _measure, main
from jaxdist.cli._bench import describe_faster_sizes, parse_size
from jaxdist.cli._measure import measure
from jaxdist.errors import ArgumentError


@pytest.fixture(autouse=True)
def _jax_has_started() -> None:
    """Or `--devices 2` would leave two devices to all tests after it."""
    assert len(jax.devices()) == 8


def test_it_prints_what_was_fitted_and_saves_what_is_read_again(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "links.json"
    arguments = ["--devices", "2", "--sizes", "64", "16KiB", "--rounds", "2", "--save", str(path)]
    assert main(["bench", "collectives", *arguments]) == 0
    out = capsys.readouterr().out
    for words in ("Link cpu-threads, 2 devices", "latency of a message", "bytes/s", "packed below"):
        assert words in out
    for name in ("xring", "rechd", "psgpu", "pscpu"):
        assert name in out
    [link] = cost.load_links(path)
    assert link.name == "cpu-threads"
    assert "measured by jaxdist bench collectives: 2 x cpu" in link.source
    assert link.memory_bytes_per_second > 0
    try:
        assert jaxdist.config.links(path) == (link,)
    finally:
        jaxdist.config.links(None)


def test_the_copy_is_so_large_that_the_time_of_a_call_is_a_small_part_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied: list[int] = []

    def note_size(layout: ReplicaMesh, size: int) -> object:
        copied.append(size)
        return make_copy(layout, size)

    make_copy = _measure._make_copy
    monkeypatch.setattr(_measure, "_make_copy", note_size)
    for sizes in (["64", "1KiB"], ["1KiB", "8MiB"]):
        command = ["bench", "collectives", "--devices", "2", "--rounds", "1", "--sizes", *sizes]
        assert main(command) == 0
    assert "memory bytes/s" in capsys.readouterr().out
    assert copied == [4 << 20, 8 << 20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "1KiB"], "two sizes or more"),
        (["--sizes", "1024", "1KiB"], "two sizes or more"),
        (["--sizes", "1KB", "2KiB"], "'1KB' is not a number of bytes"),
        (["--sizes", "0", "8"], "'0' is not a number of bytes"),
        (["--rounds", "0"], "from 1 up"),
        (["--devices", "1"], "2 devices or more"),
        (["--devices", "-3"], "2 devices or more"),
        (["--devices", "99"], "99"),
        (["--devices", "8", "--sizes", "1KiB", "1GiB"], "up to 67,108,864 bytes"),
        (["--devices", "8", "--sizes", "32MiB", "64MiB"], "the smallest up to 4,194,304"),
        (["--save", "/no/such/folder/x.json"], "the folder '/no/such/folder' does not exist"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "collectives", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_one_device_of_the_machine_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: here[:1])
    assert main(["bench", "collectives"]) == 2
    told = capsys.readouterr().err
    assert "--devices 2: this machine has 1 CPU device(s)" in told
    assert "JAX_PLATFORMS=cpu" in told


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "collective"], ["bench", "--sizes"]])
def test_what_is_not_understood_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("medium", list(cost.Medium))
def test_arrays_are_measured_at_once_or_one_after_the_other(medium: cost.Medium) -> None:
    """Over wires each array is an all-reduce of its own: XLA sends those of one as one message."""
    layout = jaxdist.MirroredStrategy(["cpu:0", "cpu:1"]).layout
    steps: list[tuple[str, int]] = []
    found = measure(layout, [64, 4096], 1, medium, lambda what, of: steps.append((what, of)))
    assert [(s.count, s.num_bytes) for s in found.samples] == [
        (1, 64),
        (16, 64),
        (1, 4096),
        (16, 4096),
    ]
    assert all(s.seconds > 0 for s in found.samples)
    assert found.memory_bytes_per_second > 0
    assert {total for _, total in steps} == {len(steps)}, "the bar ends where it is full"


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("4096B", 4096), ("64KiB", 65536), ("1mib", 1 << 20), ("2 GiB", 2 << 30)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_sizes_are_whole_numbers() -> None:
    for text in ("1.5KiB", "-8", "KiB", ""):
        with pytest.raises(ArgumentError):
            parse_size(text)


def test_crossover_is_the_size_at_which_the_faster_one_changes() -> None:
    links = cost.Links(cost.TABLE["ethernet-10"])
    words = describe_faster_sizes("psgpu", "xring", 8, links)
    assert words.startswith("below ")
    number, unit = words.removeprefix("below ").split()
    size = float(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]
    for factor, faster in ((0.98, "psgpu"), (1.02, "xring")):
        pair = cost.cheapest(8, int(size * factor), links, algorithms=("psgpu", "xring"))
        assert pair[0][0] == faster
    assert describe_faster_sizes("xring", "psgpu", 8, links).startswith("from ")
    assert describe_faster_sizes("xring", "xla", 8, links) == "never, up to 1 GiB"
    assert describe_faster_sizes("xla", "psgpu", 8, links) == "always"
