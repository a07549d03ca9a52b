"""Every parameter of every public callable, with values that are wrong for it.

A value is refused by an error of jaxdist that names the callable and the argument, or by Python's
own words about signatures; or it is accepted and is one of the reviewed list (`accepted.json`).
Nothing stays behind: no thread, process, strategy or setting, and no file outside of the folder
for temporary ones.
"""

import inspect
import pathlib
import warnings

import pytest

from tests.bad_inputs.attempt import Outcome, attempt, is_about_a_signature, put_back
from tests.bad_inputs.bad_values import BAD_VALUES
from tests.bad_inputs.reviewed import accepted, reasons
from tests.bad_inputs.table import CALLS, rows, users_callables
from tests.tables import sampled

CALLABLES = users_callables()
ACCEPTED = accepted()


def _label(row: tuple[str, str]) -> str:
    return f"{row[0]}({row[1]})"


def _said(outcome: Outcome) -> str:
    return f"{type(outcome.error).__name__}: {outcome.error}"


def test_every_public_callable_has_a_valid_call_in_the_table() -> None:
    missing = {name: str(inspect.signature(CALLABLES[name])) for name in {*CALLABLES} - {*CALLS}}
    assert missing == {}, "add a valid call to the file of its room, tests/bad_inputs/calls_*.py"
    assert {*CALLS} - {*CALLABLES} == set(), "these are no public callables"


@pytest.mark.parametrize("row", sampled(rows(), 60, name=_label))
def test_a_wrong_argument_is_refused_by_name_or_is_reviewed(
    row: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    name, parameter = row
    outcomes = {value: attempt(CALLS[name], parameter, value, tmp_path) for value in BAD_VALUES}
    assert {v: _said(o) for v, o in outcomes.items() if o.is_raw} == {}
    unnamed = {v: o for v, o in outcomes.items() if not o.is_accepted and not o.is_signature}
    assert {v: _said(o) for v, o in unnamed.items() if not o.names(name, parameter)} == {}
    # What was found, the rule, and the remedy.
    named = {v: _said(o) for v, o in outcomes.items() if not o.is_accepted and not o.is_signature}
    assert {v: text for v, text in named.items() if text.count("\n\n") != 2} == {}
    assert {v: o.left for v, o in outcomes.items() if o.left} == {}
    assert [v for v, o in outcomes.items() if o.is_accepted] == ACCEPTED[_label(row)]


@pytest.mark.parametrize("name", sampled(sorted(CALLS), 40))
def test_the_valid_call_is_valid_and_takes_no_unknown_argument(name: str) -> None:
    call = CALLS[name]
    with warnings.catch_warnings():
        # Calls share a strategy, and make a step each.
        warnings.simplefilter("ignore")
        call.use(call.fn()(**call.arguments()))
    put_back()
    kinds = [p.kind for p in inspect.signature(CALLABLES[name]).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        with pytest.raises(TypeError) as error:
            call.fn()(**call.arguments(), no_such_argument=1)
        assert is_about_a_signature(error.value)
    put_back()


def test_every_accepted_value_has_a_reason() -> None:
    assert [name for name, why in reasons().items() if not why] == []


def test_every_parameter_is_reviewed() -> None:
    assert {*ACCEPTED} == {_label(row) for row in rows()}
