"""Lines of the processes, each with the number of its process."""

import io
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist._launching import output, write_to
from jaxdist._launching.output import PrefixedOutput
from tests.launching.launcher import run_launcher, write_script


@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\x00", b"\n"))))
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
