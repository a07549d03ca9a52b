"""Which public call an error names."""

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist._called import call_as, called, name_argument, name_call, refuse
from jaxdist.errors import ArgumentError, ShapeError


def _check(value: int) -> None:
    if value < 0:
        raise refuse(f"value={value}.", "value is at least 0.", "Pass value=0.")


@called("inner")
def _inner(value: int) -> None:
    _check(value)


@called("outer")
def _outer(value: int) -> None:
    _inner(value)


@called("stand_in", replaces="inner")
def _stand_in(value: int) -> None:
    _inner(value)


@called("other", replaces="stand_in")
def _other(value: int) -> None:
    _stand_in(value)


class _Reader:
    name = "a"

    @called(lambda self: f"{type(self).__name__}({self.name!r})")
    def __init__(self, value: int) -> None:
        _check(value)

    @classmethod
    @called("Reader.make")
    def make(cls, value: int) -> "_Reader":
        _check(value)
        return cls(0)

    @property
    @called("Reader.wrong")
    def wrong(self) -> None:
        _check(-1)

    @called(lambda of, self: f"Reader.read({self.name}, {of})")
    def read(self, of: int, value: int) -> None:
        _check(value)


def _name_in(fn: Callable[[], Any]) -> str:
    with pytest.raises(ArgumentError) as error:
        fn()
    return str(error.value).partition(" was given ")[0]


def test_an_error_has_the_name_of_the_innermost_registered_function() -> None:
    assert _name_in(lambda: _inner(-1)) == "inner"
    assert _name_in(lambda: _outer(-1)) == "inner"


def test_a_function_that_replaces_another_one_gives_its_own_name() -> None:
    assert _name_in(lambda: _stand_in(-1)) == "stand_in"
    assert _name_in(lambda: _other(-1)) == "other"


def test_a_name_can_be_made_from_arguments() -> None:
    assert _name_in(lambda: _Reader(-1)) == "_Reader('a')"
    assert _name_in(lambda: _Reader(0).read(3, -1)) == "Reader.read(a, 3)"


def test_methods_of_every_form_are_registered() -> None:
    assert _name_in(lambda: _Reader.make(-1)) == "Reader.make"
    assert _name_in(lambda: _Reader(0).wrong) == "Reader.wrong"


def test_one_call_of_several_can_have_a_name_of_its_own() -> None:
    @called("both")
    def check_both(first: int, second: int) -> None:
        _check(first)
        call_as("both(second=...)", _check, second)

    assert _name_in(lambda: check_both(-1, 0)) == "both"
    assert _name_in(lambda: check_both(0, -1)) == "both(second=...)"


def test_without_a_registered_function_it_is_the_one_that_refuses() -> None:
    assert _name_in(lambda: _check(-1)) == "_check"


def test_a_thread_takes_the_name_along() -> None:
    @called("start")
    def start() -> concurrent.futures.Future[None]:
        caller = name_call()

        def run() -> None:
            call_as(caller, _check, -1)

        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            return threads.submit(run)

    assert _name_in(lambda: start().result()) == "start"


def test_a_generator_has_the_name_of_who_takes_the_next_element() -> None:
    def read() -> Iterator[int]:
        yield 1
        _check(-1)

    @called("first")
    def first(values: Iterator[int]) -> int:
        return next(values)

    @called("second")
    def second(values: Iterator[int]) -> int:
        return next(values)

    values = read()
    first(values)
    assert _name_in(lambda: second(values)) == "second"


def test_a_function_that_jax_traces_is_seen() -> None:
    @called("step")
    def step(x: jax.Array) -> jax.Array:
        _check(-x.ndim)
        return x

    assert _name_in(lambda: jax.jit(step)(jnp.zeros(3))) == "step"


def test_a_registered_function_is_the_function_itself() -> None:
    def fn() -> None: ...

    assert called("fn")(fn) is fn


def test_functions_of_one_definition_have_one_name() -> None:
    def make(name: str) -> Callable[[], None]:
        @called(name)
        def fn() -> None: ...

        return fn

    make("one")
    make("one")
    with pytest.raises(RuntimeError, match="fn is registered as 'one' and 'two'"):
        make("two")


def test_the_name_of_a_closure_can_be_made_from_what_it_holds() -> None:
    def make(name: str) -> Callable[[], None]:
        @called(lambda name: f"the {name}")
        def fn() -> None:
            _check(-len(name))

        return fn

    first, second = make("one"), make("two")
    assert _name_in(first) == "the one"
    assert _name_in(second) == "the two"


def test_functions_with_equal_code_have_their_own_names() -> None:
    # As in two files: code objects are equal where line, name and bytecode are.
    text = "def fn(check):\n    check(-1)\n"
    found: list[str] = []
    for name in ("one", "two"):
        scope: dict[str, Any] = {}
        exec(compile(text, "a file", "exec"), scope)
        called(name)(scope["fn"])
        found.append(_name_in(lambda fn=scope["fn"]: fn(_check)))
    assert found == ["one", "two"]


@given(st.lists(st.sampled_from(["called", "plain"]), max_size=6))
def test_functions_without_a_name_in_between_change_nothing(kinds: list[str]) -> None:
    fn: Callable[[], None] = lambda: _check(-1)  # noqa: E731
    wanted = None
    for number, kind in enumerate(kinds):

        def wrap(inner: Callable[[], None] = fn) -> None:
            inner()

        # Each its own code, as each function of a program has.
        wrap.__code__ = wrap.__code__.replace(co_name=f"wrap_{number}")
        if kind == "called":
            called(f"call {number}")(wrap)
            wanted = wanted or f"call {number}"
        fn = wrap
    assert _name_in(fn) == (wanted or "_check")


def test_an_error_has_three_paragraphs() -> None:
    error = call_as("f", refuse, "x of shape [2].", "x is a scalar.", "Pass x[0].", kind=ShapeError)
    assert type(error) is ShapeError
    assert str(error) == "f was given x of shape [2].\n\nx is a scalar.\n\nPass x[0]."


@called("passes_on", replaces="inner", arguments={"value": "number"})
def _passes_on(number: int) -> None:
    _inner(number)


@called("of_path", replaces="inner", arguments={"value": lambda path: f"file {path!r}: value"})
def _of_path(path: str) -> None:
    _inner(-len(path))


@called(None, replaces="inner", arguments={"value": "size"})
def _shared(size: int) -> None:
    _inner(size)


@called("reads", replaces=("other one", "inner"))
def _reads(size: int) -> None:
    _inner(size)


@called("of_shared")
def _of_shared(size: int) -> None:
    _shared(size)


@called("twice", replaces="passes_on", arguments={"number": "count"})
def _twice(count: int) -> None:
    _passes_on(count)


@pytest.mark.parametrize(
    ("fn", "given", "wanted"),
    [
        (_inner, -1, "inner was given value=-1."),
        (_passes_on, -1, "passes_on was given number=-1."),
        (_twice, -1, "twice was given count=-1."),
        (_of_path, "ab", "of_path was given file 'ab': value=-2."),
        (_of_shared, -1, "of_shared was given size=-1."),
        (_shared, -1, "inner was given size=-1."),
        (_reads, -1, "reads was given value=-1."),
    ],
)
def test_an_argument_has_the_name_that_the_replacing_function_gives_it(
    fn: Callable[[Any], None], given: Any, wanted: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        fn(given)
    assert str(error.value).partition("\n")[0] == wanted


def test_a_path_of_an_argument_is_renamed_outside_of_refuse_too() -> None:
    @called("inner")
    def read(path: str) -> str:
        return name_argument(path)

    @called("outer", replaces="inner", arguments={"args[0]": "model"})
    def outer(path: str) -> str:
        return read(path)

    assert outer("args[0]['w']") == "model['w']"
    assert outer("args[1]['w']") == "args[1]['w']"
    assert read("args[0]['w']") == "args[0]['w']"
