"""Which process is the first cause, from how each process ended and what it wrote."""

import signal
import textwrap

import pytest

from jaxdist._launching.child import End, Record
from jaxdist._launching.first_cause import find_first_cause, find_last_traceback


def _raised(name: str, message: str, before: str = "", after: str = "") -> str:
    return (
        f"{before}Traceback (most recent call last):\n"
        f'  File "a.py", line 3, in <module>\n    f()\n{name}: {message}\n{after}'
    )


PLAIN = _raised("ValueError", "planted")
GLOO = _raised(
    "jax.errors.JaxRuntimeError",
    "FAILED_PRECONDITION: Gloo all-reduce failed: [...] Connection closed by peer [127.0.0.1]:1",
)
ONE_IS_GONE = _raised("jaxdist.errors.UnavailableError", "process 1 has ended.\n\nIt was killed.")
NEWS = "\nThe above exception was the direct cause of the following exception:\n\n"


def test_no_cause_where_all_ended_well() -> None:
    assert find_first_cause([End(1, 0), End(0, 0)]) is None
    assert find_first_cause([End(1, 0), End(0, -15, was_ended=True)]) is None


@pytest.mark.parametrize(
    ("ends", "index", "code", "part"),
    [
        # In the order of time.
        ([End(2, 1, tail=PLAIN), End(0, 3, tail=PLAIN)], 2, 1, "ValueError: planted"),
        ([End(0, 1, tail=GLOO), End(1, -9)], 1, 137, "ended by signal SIGKILL"),
        ([End(0, 1, tail=GLOO), End(1, 1, tail=PLAIN)], 1, 1, "ValueError: planted"),
        ([End(0, 1, tail=ONE_IS_GONE), End(1, 7)], 1, 7, "It wrote no error"),
        ([End(1, 0), End(0, 1, tail=ONE_IS_GONE)], 1, 1, "in the middle of the job"),
        ([End(1, 0), End(0, 1, tail=GLOO), End(2, 1, tail=GLOO)], 1, 1, "needed it: 0, 2."),
        (
            [End(0, 75, tail=ONE_IS_GONE), End(1, -9, was_ended=True)],
            1,
            75,
            "What process 0 found:\nTraceback",
        ),
        # A process that had ended well is not the cause where the others name another one.
        (
            [End(2, 0), End(0, 1, tail=ONE_IS_GONE), End(1, -9, was_ended=True)],
            1,
            1,
            "did not answer",
        ),
        ([End(0, 1, tail=GLOO), End(1, -15, was_ended=True)], 0, 1, "Gloo all-reduce failed"),
        # It ended after the failure: because the job was over, or for reasons of its own.
        ([End(0, 1, tail=GLOO), End(1, 0)], 0, 1, "Gloo all-reduce failed"),
        # The cause is a process that is not of this job.
        ([End(1, 0), End(0, 1, tail=ONE_IS_GONE.replace("1", "7"))], 0, 1, "process 7 has ended"),
        ([End(0, -6, tail="coordination service died"), End(1, -11)], 1, 139, "SIGSEGV"),
        ([End(0, -6, tail="free(): invalid pointer"), End(1, -11)], 0, 134, "invalid pointer"),
        ([End(0, -64)], 0, 192, "signal "),
        (
            [End(0, 2, record=Record(False, (), "No such file.")), End(1, 1, tail=PLAIN)],
            0,
            2,
            "No such file.",
        ),
        (
            [End(0, 2, record=Record(True, (1,), "process 1")), End(1, 1, tail=PLAIN)],
            1,
            1,
            "planted",
        ),
    ],
)
def test_the_first_cause_is_found(ends: list[End], index: int, code: int, part: str) -> None:
    cause = find_first_cause(ends)
    assert cause is not None
    assert (cause.index, cause.exit_code) == (index, code)
    assert part in cause.text
    assert cause.text.startswith(f"process {index} ")


def test_how_a_process_ended_in_words() -> None:
    assert End(0, 3).describe() == "code 3"
    assert End(0, -signal.SIGKILL).describe() == "signal SIGKILL"


def test_the_last_traceback_has_the_exceptions_that_led_to_it_and_no_more() -> None:
    older = _raised("KeyError", "'caught, and printed'", after="went on\n")
    chained = GLOO + NEWS + ONE_IS_GONE
    late = "W1123 13:43:25.761741    5953 coordination_service.cc:185] Shutting down\n"
    found = find_last_traceback(f"{older}{chained}{late}")
    assert found is not None
    assert found.text == chained.rstrip("\n")
    assert (found.is_about_others, found.processes) == (True, (1,))


def test_an_error_while_another_process_is_reported_follows_from_it() -> None:
    news = "\nDuring handling of the above exception, another exception occurred:\n\n"
    found = find_last_traceback(ONE_IS_GONE + news + PLAIN)
    assert found is not None
    assert found.is_about_others
    assert found.text.endswith("ValueError: planted")


@pytest.mark.parametrize(
    ("message", "processes"),
    [
        ("process 1 has ended.", (1,)),
        ("MultiWorkerMirroredStrategy.run: processes 1, 3 and 12 have not come.", (1, 3, 12)),
        ("somebody has ended.", ()),
    ],
)
def test_the_processes_that_an_error_names_are_read(
    message: str, processes: tuple[int, ...]
) -> None:
    found = find_last_traceback(_raised("jaxdist.errors.DeadlineExceededError", message))
    assert found is not None
    assert found.processes == processes


def test_an_exception_group_is_a_traceback() -> None:
    group = textwrap.dedent(
        """\
          + Exception Group Traceback (most recent call last):
          |   File "a.py", line 1, in <module>
          | ExceptionGroup: two (2 sub-exceptions)
          +-+---------------- 1 ----------------
            | ValueError: one
        """
    )
    found = find_last_traceback("  " + group.lstrip())
    assert found is not None
    assert "ValueError: one" in found.text
    assert not found.is_about_others


@pytest.mark.parametrize(
    ("name", "message", "is_about_others"),
    [
        ("ValueError", "UNKNOWN: Gloo all-reduce failed: [...] Connection closed by peer", True),
        ("jax.errors.JaxRuntimeError", "UNAVAILABLE: Failed to send RPC", True),
        ("jaxlib._jax.XlaRuntimeError", "INTERNAL: NCCL operation ncclAllReduce failed", True),
        ("jax.errors.JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory", False),
        ("ConnectionError", "UNAVAILABLE: my database", False),
        ("jaxdist.errors.ProgramMismatchError", "process 1 runs another program", False),
    ],
)
def test_errors_of_jax_about_other_processes(
    name: str, message: str, is_about_others: bool
) -> None:
    found = find_last_traceback(_raised(name, message))
    assert found is not None
    assert found.is_about_others == is_about_others


def test_text_without_a_traceback_has_none() -> None:
    assert find_last_traceback("it said: Traceback (most recent call last):\n") is None
