"""Functions of higher rooms that a lower room calls."""

import importlib

import pytest

from jaxdist import _hooks
from jaxdist._hooks import Hook
from tests import test_layers as layers

HOOKS = {name: hook for name, hook in vars(_hooks).items() if isinstance(hook, Hook)}


def test_a_hook_imports_its_room_at_the_first_call() -> None:
    hook = Hook("math", "sqrt")
    call = hook.call
    assert hook.call(9) == 3
    assert hook.call.__name__ == "sqrt"
    assert call(16) == 4, "a caller may have kept the function of the hook before its first call"


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_hook_names_a_function_of_a_room_above_all_that_call_it(name: str) -> None:
    hook = HOOKS[name]
    assert callable(getattr(importlib.import_module(hook.room), hook.name))
    level = {room: number for number, rooms in enumerate(layers.ROWS) for room in rooms}
    files = layers._files()
    users = [
        file.split(".")[0]
        for file, source in files.items()
        if (f"jaxdist._hooks.{name}", False) in layers._imports(source)
    ]
    assert users
    assert all(level[user] < level[hook.room.removeprefix("jaxdist.")] for user in users)
