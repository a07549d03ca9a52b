"""Callbacks that a lower room calls and a higher room installs."""

from jaxdist._hooks import Hook
from jaxdist.errors import ContextError
from tests.strategies.oracle import refused


def test_a_callback_that_nobody_has_installed_names_its_provider() -> None:
    hook = Hook("jaxdist.provider")
    with refused(ContextError, "jaxdist.provider was not imported", "import jaxdist"):
        hook.call(1)
    hook.set(lambda x: x + 1)
    assert hook.call(1) == 2
