"""Lines of the processes, each with the number of its process."""

import io
import pathlib
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist._launching import connect_to_ray, output, write_to
from jaxdist._launching.output import PrefixedOutput
from tests.launching.launcher import run_launcher, write_script

# No line is noise: hypothesis also draws the constants of the code that finds it.
_BYTES = st.binary(max_size=12).map(lambda b: b.replace(b"\x00", b"\n").replace(b"[", b"("))


@given(st.lists(_BYTES))
def test_lines_are_those_of_the_process_however_they_arrive(chunks: list[bytes]) -> None:
    written: list[bytes] = []
    lines = PrefixedOutput(3, written.append)
    for chunk in chunks:
        lines.feed(chunk)
    lines.finish()
    whole = b"".join(chunks)
    expected = whole.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert b"".join(written) == b"".join(b"[3] " + line + b"\n" for line in expected)
    assert lines.read_tail() == whole.decode(errors="replace")


_CONNECTED = b" is connected to "
_PEERS = b" peer ranks. "
_EXPECTED = b"Expected number of connected peer ranks is : "
_RANK = b"[Gloo] Rank "
_MESSAGE = _RANK + b"%d" + _CONNECTED + b"1" + _PEERS + _EXPECTED + b"1"
_SERVICE = b"W1127 14:06:41.95   22191 coordination_service.cc:185] [10648150923690693913] "
_RECOVERABLE = _SERVICE + b"Using experimental recoverable task feature. The default shutdown ..."
_DIED = b"E1127 14:06:41.95   22191 coordination_service.cc:185] Task 1 has died."
# Two threads at once: the second line is the end of one of the messages.
_BOTH = _RANK + _RANK + b"1" + _CONNECTED + b"03" + _CONNECTED + _PEERS + b"3" + _EXPECTED + b"3"
_REST = _CONNECTED + b"3" + _PEERS + _EXPECTED + b"3"


@pytest.mark.parametrize(
    ("given_lines", "kept"),
    [
        ([_MESSAGE % 0, b"loss 1.0", _MESSAGE % 1], [b"loss 1.0"]),
        ([_BOTH, b"", b"", b"3"], [b"", b"3"]),
        ([_RANK + b"0" + _MESSAGE % 1, _REST, b""], [b""]),
        ([_RECOVERABLE, _DIED], [_DIED]),
        ([b"12", b"", b" peer", b"[Gloo] Rank 0 failed"], None),
        ([b"I see " + _MESSAGE % 0, b"Using experimental"], None),
    ],
)
def test_lines_that_mean_nothing_are_left_out_and_no_others(
    given_lines: list[bytes], kept: list[bytes] | None
) -> None:
    written: list[bytes] = []
    lines = PrefixedOutput(0, written.append)
    for line in given_lines:
        lines.feed(line + b"\n")
    lines.finish()
    kept = given_lines if kept is None else kept
    assert b"".join(written) == b"".join(b"[0] " + line + b"\n" for line in kept)


def test_a_job_of_two_processes_prints_its_own_lines_only(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import jaxdist\n"
        "strategy = jaxdist.MultiWorkerMirroredStrategy()\n"
        "def step():\n"
        "    return jaxdist.get_replica_context().all_reduce('sum', 1.0)\n"
        "total = strategy.run(step)\n"
        "print('sum', float(strategy.experimental_local_results(total)[0]))\n"
    )
    env: dict[str, str | None] = {"JAX_PLATFORMS": "cpu"}
    outcome = run_launcher("-n", "2", "--devices-per-process", "2", str(script), env=env)
    assert outcome.exit_code == 0, outcome.describe()
    assert sorted(outcome.stdout.splitlines()) == ["[0] sum 4.0", "[1] sum 4.0"]
    assert outcome.stderr == ""


def test_lines_of_ray_itself_are_no_output_of_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = types.ModuleType("ray")
    monkeypatch.setattr(ray, "init", lambda **_: print("started"), raising=False)
    monkeypatch.setattr(ray, "shutdown", lambda: print("ended"), raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with connect_to_ray():
        print("loss 1.0")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("loss 1.0\n", "started\nended\n")


def test_a_line_without_an_end_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MOST_BYTES_OF_A_LINE", 10)
    written: list[bytes] = []
    lines = PrefixedOutput(0, written.append)
    for _ in range(5):
        lines.feed(b"x" * 6)
    lines.finish()
    assert written == [b"[0] " + b"x" * 12 + b"\n"] * 2 + [b"[0] " + b"x" * 6 + b"\n"]


def test_a_stream_that_takes_text_only_gets_text() -> None:
    stream = io.StringIO()
    write_to(stream)(b"[0] \xff\n")
    assert stream.getvalue() == "[0] \ufffd\n"


def test_each_line_of_each_stream_has_the_number_of_its_process(tmp_path: pathlib.Path) -> None:
    script = write_script(
        tmp_path,
        """
        print("x" * 300_000)
        print("error", index, file=sys.stderr)
        sys.stdout.buffer.write(b"\\xff\\xfe bytes\\n")
        print("no end", end="")
        """,
    )
    outcome = run_launcher("-n", "2", script)
    for index in range(2):
        lines = outcome.stdout.splitlines()
        assert f"[{index}] {'x' * 300_000}" in lines
        assert f"[{index}] \ufffd\ufffd bytes" in lines
        assert f"[{index}] no end" in lines
    assert sorted(outcome.stderr.splitlines()) == ["[0] error 0", "[1] error 1"]
