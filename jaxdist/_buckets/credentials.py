"""Finds the credentials of AWS in the environment and in the files of AWS's tools."""

import configparser
import contextlib
import os
from pathlib import Path

from jaxdist.errors import BucketError

# Note [Credentials of AWS]
# AWS's tools look at the environment, then at the profile in ~/.aws, then at the role of the
# machine. tensorstore 0.1.86 should do the same, but its search does not find profiles: only one
# whose name and files are given is read. It also prints errors if ~/.aws does not exist. So the
# first two are looked up here, and tensorstore finds the role of the machine. It does so only if no
# profile is named, as AWS's tools: the role may be another identity than the one that is wanted.
# tensorstore does not read a login by SSO, so a profile with one is an error.

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
# A profile without any of them has no credentials, such as one with only a region.
_OF_PROFILES = ("aws_access_key_id", "role_arn", "credential_process")
_OF_SSO = ("sso_session", "sso_start_url")
_VARIABLES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")


def find_credentials() -> dict[str, str] | None:
    """Return tensorstore's description of the credentials; None to let it search.

    See Note [Credentials of AWS].

    Raises:
        BucketError: The profile that a variable names has no credentials, or one has those of SSO.
    """
    if all(os.environ.get(name) for name in _KEYS):
        return {"type": "environment"}
    variable = next((name for name in _VARIABLES if os.environ.get(name)), None)
    name = os.environ[variable] if variable else "default"
    credentials = _find_file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    config = _find_file("AWS_CONFIG_FILE", "config")
    of_config = [f"profile {name}", *(["default"] if name == "default" else [])]
    sections = [*_read_sections(credentials, [name]), *_read_sections(config, of_config)]
    found = {option for section in sections for option in section}
    if found.isdisjoint(_OF_PROFILES):
        has_sso = not found.isdisjoint(_OF_SSO)
        if variable is None and not has_sso:
            return None
        raise _make_error(variable, name, sorted(found) if sections else None, has_sso)
    return {
        "type": "profile",
        "profile": name,
        "credentials_file": credentials,
        "config_file": config,
    }


def _make_error(
    variable: str | None, name: str, found: list[str] | None, has_sso: bool
) -> BucketError:
    if found is None:
        what = "is in none of AWS's files that can be read"
    else:
        what = f"has no credentials that jaxdist can use, but {', '.join(found) or 'no values'}"
    given = f"{variable}={name}" if variable else "the environment without AWS_PROFILE"
    remedy = (
        "Correct the name (`aws configure list-profiles` lists them) or the profile, or unset "
        f"{variable} to use the role of the machine."
    )
    if has_sso:
        export = f"aws configure export-credentials --profile {name} --format env"
        remedy = (
            "A login by SSO is not supported. Set the variables that this command prints, for "
            f'instance by eval "$({export})".'
        )
    return BucketError(
        f"No credentials for s3:// were found: with {given}, the profile {name!r} {what}.\n\n"
        f"A profile has one of {', '.join(_OF_PROFILES)}. The role of the machine is used only "
        "where no profile is named, since it may be another identity.\n\n"
        f"{remedy}"
    )


def _find_file(variable: str, name: str) -> str:
    """Return the path of a file; if it does not exist, of an empty one."""
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / name).expanduser()
    return str(path) if path.is_file() else os.devnull


def _read_sections(file: str, names: list[str]) -> list[list[str]]:
    """Return the names of the values in each of these sections that exists."""
    read = configparser.RawConfigParser(strict=False, default_section="", allow_no_value=True)
    # What cannot be read is left to tensorstore.
    with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
        read.read_string(Path(file).read_text())
    return [read.options(name) for name in names if read.has_section(name)]
