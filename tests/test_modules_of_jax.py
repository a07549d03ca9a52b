"""The list of JAX's modules, while another thread imports."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from jaxdist._compat.tracing import list_modules_of_jax


class _Growing(dict[str, Any]):
    """Modules of which one is imported whenever Python code looks at the next one."""

    def items(self) -> Any:
        def look() -> Iterator[tuple[str, Any]]:
            for n, (name, module) in enumerate(super(_Growing, self).items()):
                yield name, module
                self[f"imported_{n}"] = None

        return look()


def test_a_module_that_is_imported_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax.numpy

    expected = list_modules_of_jax()
    assert jax.numpy in expected
    monkeypatch.setattr(sys, "modules", _Growing(sys.modules))
    with pytest.raises(RuntimeError, match="changed size"):
        list(sys.modules.items())
    assert list_modules_of_jax() == expected
