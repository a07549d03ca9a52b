"""Freed memory of a task is used again, where the user has not said otherwise."""

import ctypes

import pytest

from jaxdist._parameter_server.tasks import server as memory


class _Library:
    """A C library that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def mallopt(self, option: int, value: int) -> int:
        self.told.append((option, value))
        return 1


def _set_up(monkeypatch: pytest.MonkeyPatch, library: object) -> None:
    for name in memory._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)


def test_memory_is_kept_by_two_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library()
    _set_up(monkeypatch, library)
    monkeypatch.setattr("sys.platform", "linux")
    memory.keep_freed_memory()
    assert library.told == [(-3, 4 * 2**20), (-1, 16 * 2**20)]


@pytest.mark.parametrize("name", memory._VARIABLES)
def test_a_variable_of_the_user_wins(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    library = _Library()
    _set_up(monkeypatch, library)
    monkeypatch.setenv(name, "1000000")
    memory.keep_freed_memory()
    assert not library.told


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_up(monkeypatch, object())
    memory.keep_freed_memory()
