"""Finds the credentials of AWS in the environment and in the files of AWS's tools."""

import configparser
import contextlib
import os
from pathlib import Path

# Note [Credentials of AWS]
# AWS's tools look at the environment, then at the profile in ~/.aws, then at the role of the
# machine. tensorstore 0.1.86 should do the same, but its search does not find profiles: only one
# whose name and files are given is read. It also prints errors if ~/.aws does not exist. So the
# first two are looked up here, and tensorstore finds the role of the machine.

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
# A profile without any of them has no credentials, such as one with only a region.
_OF_PROFILES = ("aws_access_key_id", "role_arn", "credential_process")


def find_credentials() -> dict[str, str] | None:
    """Return tensorstore's description of the credentials; None to let it search.

    See Note [Credentials of AWS].
    """
    if all(os.environ.get(name) for name in _KEYS):
        return {"type": "environment"}
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    credentials = _find_file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    config = _find_file("AWS_CONFIG_FILE", "config")
    of_config = [f"profile {name}", *(["default"] if name == "default" else [])]
    if not _has_profile(credentials, [name]) and not _has_profile(config, of_config):
        return None
    return {
        "type": "profile",
        "profile": name,
        "credentials_file": credentials,
        "config_file": config,
    }


def _find_file(variable: str, name: str) -> str:
    """Return the path of a file; if it does not exist, of an empty one."""
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / name).expanduser()
    return str(path) if path.is_file() else os.devnull


def _has_profile(file: str, sections: list[str]) -> bool:
    read = configparser.RawConfigParser(strict=False, default_section="", allow_no_value=True)
    # What cannot be read is left to tensorstore.
    with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
        read.read_string(Path(file).read_text())
    return any(read.has_option(section, key) for section in sections for key in _OF_PROFILES)
