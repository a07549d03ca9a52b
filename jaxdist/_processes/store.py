"""The key-value store of a job: short strings that its processes write and read."""

import threading
import time
from typing import Any, Protocol

import jax

from jaxdist._compat import get_coordination_client
from jaxdist.errors import UnavailableError

# One request to the coordination service blocks for at most this long, so that the thread notices
# Ctrl-C and a request to stop.
_SLICE_SECONDS = 0.5


class Store(Protocol):
    """Strings by key. Keys are paths such as `jaxdist/here/0`."""

    def set(self, key: str, text: str, *, overwrite: bool = False) -> None:
        """Write a string; without `overwrite`, a key that exists raises `KeyError`."""

    def get(self, key: str) -> str | None:
        """Return the string of a key, or None."""

    def wait_for(self, key: str, seconds: float) -> str | None:
        """Return the string of a key as soon as it is written; None after `seconds`."""

    def list(self, prefix: str) -> dict[str, str]:
        """Return the keys below a prefix, with their strings."""

    def delete(self, key: str) -> None:
        """Remove a key; a key that does not exist is ignored."""


class LocalStore:
    """A store in the memory of one process, for threads and tests."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, text: str, *, overwrite: bool = False) -> None:
        """Write a string."""
        with self._changed:
            if key in self._texts and not overwrite:
                raise KeyError(key)
            self._texts[key] = text
            self._changed.notify_all()

    def get(self, key: str) -> str | None:
        """Return the string of a key, or None."""
        with self._changed:
            return self._texts.get(key)

    def wait_for(self, key: str, seconds: float) -> str | None:
        """Wait for a key."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._texts, seconds)
            return self._texts.get(key)

    def list(self, prefix: str) -> dict[str, str]:
        """Return the keys below a prefix."""
        with self._changed:
            return {k: v for k, v in self._texts.items() if k.startswith(prefix)}

    def delete(self, key: str) -> None:
        """Remove a key."""
        with self._changed:
            self._texts.pop(key, None)


class CoordinationStore:
    """The key-value store of JAX's coordination service.

    Cost:
        About 0.4 ms for each request.

    Args:
        client: JAX's client of the service.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, text: str, *, overwrite: bool = False) -> None:
        """Write a string."""
        try:
            self._client.key_value_set(key, text, allow_overwrite=overwrite)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" in str(error):
                raise KeyError(key) from None
            raise _describe(error) from error

    def get(self, key: str) -> str | None:
        """Return the string of a key, or None."""
        try:
            return str(self._client.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise _describe(error) from error

    def wait_for(self, key: str, seconds: float) -> str | None:
        """Wait for a key."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            try:
                milliseconds = max(1, int(1000 * min(left, _SLICE_SECONDS)))
                return str(self._client.blocking_key_value_get(key, milliseconds))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise _describe(error) from error
            if time.monotonic() >= end:
                return None

    def list(self, prefix: str) -> dict[str, str]:
        """Return the keys below a prefix."""
        try:
            return dict(self._client.key_value_dir_get(prefix))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return {}
            raise _describe(error) from error

    def delete(self, key: str) -> None:
        """Remove a key."""
        try:
            self._client.key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise _describe(error) from error


def get_store() -> Store | None:
    """Return the store of this process's job, or None if it has not joined one."""
    client = get_coordination_client()
    return None if client is None else CoordinationStore(client)


def _describe(error: Exception) -> UnavailableError:
    return UnavailableError(
        "The coordination service of the job cannot be reached: "
        f"{str(error).splitlines()[0]}\n\n"
        "Process 0 hosts the service, or `jaxdist launch` does. Without it the processes cannot "
        "agree on anything.\n\n"
        "Look for the first error in the output of process 0; then start the job again."
    )
