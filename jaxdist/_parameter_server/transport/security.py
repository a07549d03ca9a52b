"""`Security`: who may call a task, and who may read the messages."""

import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping

from jaxdist._called import called, refuse
from jaxdist._processes import is_loopback
from jaxdist.errors import ArgumentError, UnauthenticatedError

_LOG = logging.getLogger("jaxdist")
_VARIABLES = {
    "certificate": "JAXDIST_TLS_CERTIFICATE",
    "key": "JAXDIST_TLS_KEY",
    "authority": "JAXDIST_TLS_AUTHORITY",
}
_SHORTEST_SECRET = 16


@dataclasses.dataclass(frozen=True)
class Security:
    """The secret and the files of TLS of a task. The values of files are PEM.

    Args:
        secret: Callers must know it; None if anybody may call.
        certificate: The certificate of this task.
        key: The private key of the certificate.
        authority: Certificates of those who signed the certificate of the other side. A server
            with it refuses callers without a signed certificate. A caller with it uses TLS, and
            refuses other servers.
    """

    secret: str | None = dataclasses.field(default=None, repr=False)
    certificate: bytes | None = dataclasses.field(default=None, repr=False)
    key: bytes | None = dataclasses.field(default=None, repr=False)
    authority: bytes | None = dataclasses.field(default=None, repr=False)

    @called("Security")
    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given, missing = ("key", "certificate") if self.key else ("certificate", "key")
            raise refuse(
                f"a {given} and no {missing}.",
                "A certificate and its private key belong together.",
                f"Pass {missing}= too, or set {_VARIABLES[missing]}.",
            )
        if self.secret is not None and len(self.secret) < _SHORTEST_SECRET:
            raise refuse(
                f"a secret of {len(self.secret)} characters.",
                f"It has {_SHORTEST_SECRET} or more, so that nobody can guess it.",
                "Make one: python -c 'import secrets; print(secrets.token_urlsafe())'",
            )

    def check_address(self, host: str) -> None:
        """Raise if a server may not be reached at this address, and warn if it could be read.

        Raises:
            UnauthenticatedError: Other machines reach the address, and could call without a secret.
        """
        if is_loopback(host):
            return
        if self.certificate is None and self.secret is None:
            raise UnauthenticatedError(
                f"A server was to listen on {host or 'all addresses'}, without TLS and without a "
                "secret.\n\nAnybody who reaches this address could read and change the variables, "
                "and run programs.\n\nWrite a secret into a file that only you can read, and set "
                "JAXDIST_SECRET_FILE to its path for all tasks; or set JAXDIST_TLS_CERTIFICATE and "
                "JAXDIST_TLS_KEY; or listen on 127.0.0.1."
            )
        if self.certificate is None:
            _LOG.warning(
                "A server listens on %s without TLS: anybody who can read the network can read the "
                "variables and the secret. Set JAXDIST_TLS_CERTIFICATE and JAXDIST_TLS_KEY.",
                host or "all addresses",
            )
        elif self.secret is None and self.authority is None:
            _LOG.warning(
                "A server listens on %s with TLS, and anybody may call it. Set JAXDIST_SECRET_FILE,"
                " or JAXDIST_TLS_AUTHORITY to know callers by their certificates.",
                host or "all addresses",
            )


def read_security(environment: Mapping[str, str] = os.environ) -> Security:
    """Return what the environment variables say.

    `JAXDIST_SECRET_FILE` or `JAXDIST_SECRET` have the secret. `JAXDIST_TLS_CERTIFICATE`,
    `JAXDIST_TLS_KEY` and `JAXDIST_TLS_AUTHORITY` are paths of PEM files.

    Raises:
        ArgumentError: A file cannot be read, or only one of certificate and key is set.
    """
    path = environment.get("JAXDIST_SECRET_FILE")
    secret = environment.get("JAXDIST_SECRET") or None
    if path:
        read = _read("JAXDIST_SECRET_FILE", path)
        try:
            secret = read.decode().strip()
        except UnicodeDecodeError:
            raise ArgumentError(
                f"The environment variable JAXDIST_SECRET_FILE is {path!r}, which is not text.\n\n"
                "A secret is one line of text.\n\n"
                "Make one: python -c 'import secrets; print(secrets.token_urlsafe())'"
            ) from None
    files = {
        name: _read(variable, environment[variable])
        for name, variable in _VARIABLES.items()
        if environment.get(variable)
    }
    return Security(secret=secret, **files)


def _read(variable: str, path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(
            f"The environment variable {variable} is {path!r}, which cannot be read: "
            f"{error.strerror}.\n\nIt is the path of a file.\n\n"
            f"Set {variable} to a file that this user may read, or unset it."
        ) from None
