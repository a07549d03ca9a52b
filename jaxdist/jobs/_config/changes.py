"""Compares the configuration of a checkpoint with that of the run that resumes from it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist._buckets import Place
from jaxdist.errors import CheckpointError
from jaxdist.jobs._config.load import LoadedConfig
from jaxdist.jobs._config.schema import Change


@dataclasses.dataclass(frozen=True)
class Changed:
    """An entry whose value differs from the value in the checkpoint.

    Attributes:
        name: `"section.key"`.
        before: Its value in the checkpoint.
        after: Its value now.
        change: Whether a run may resume with another value.
    """

    name: str
    before: Any
    after: Any
    change: Change


def find_changed_entries(saved: Mapping[str, Any], config: Any) -> tuple[Changed, ...]:
    """Return all entries that were saved with another value, relevant or not.

    Entries that only one of the two has are skipped: another version of jaxdist added or removed
    them.

    Example:
        >>> from jaxdist.jobs import DigitsConfig
        >>> saved = {"optimizer": {"learning_rate": 0.1}, "training": {"log_every": 5}}
        >>> for entry in find_changed_entries(saved, DigitsConfig()):
        ...     print(entry.name, entry.before, entry.after, entry.change)
        optimizer.learning_rate 0.1 0.003 knowingly
        training.log_every 5 20 free
    """
    found: list[Changed] = []
    # Convert through JSON, like the saved one: tuples become lists.
    saved, now = (json.loads(json.dumps(c)) for c in (saved, dataclasses.asdict(config)))
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        before = saved.get(name)
        if not dataclasses.is_dataclass(value):
            if name in saved and before != now[name]:
                found.append(Changed(name, before, now[name], "never"))
            continue
        for entry in dataclasses.fields(value):
            old = before.get(entry.name, _MISSING) if isinstance(before, Mapping) else _MISSING
            new = now[name][entry.name]
            if old is _MISSING or _is_same(old, new):
                continue
            change: Change = entry.metadata.get("change", "knowingly")
            # An entry that has no effect in either configuration may change freely.
            if not any(_is_used(entry, c) for c in (saved, now)):
                change = "free"
            found.append(Changed(f"{name}.{entry.name}", old, new, change))
    return tuple(found)


_MISSING = object()


def _is_same(old: Any, new: Any) -> bool:
    """Whether two values are the same: 1 and 1.0 are the same, true and 1 are not."""
    return isinstance(old, bool) == isinstance(new, bool) and bool(old == new)


def _is_used(entry: "dataclasses.Field[Any]", config: Mapping[str, Any]) -> bool:
    """Whether an entry has an effect. Some entries only do with a certain value of another."""
    only_if = entry.metadata.get("only_if")
    if only_if is None:
        return True
    section, _, key = only_if[0].partition(".")
    return bool(config.get(section, {}).get(key) == only_if[1])


def check_same_run(
    directory: Place,
    step: int,
    saved: Mapping[str, Any] | None,
    loaded: LoadedConfig[Any],
    *,
    accept_changes: bool,
) -> tuple[Changed, ...]:
    """Check that a run may resume from a checkpoint with the values of its configuration.

    See Note [What a resumed run checks].

    Returns:
        The changes that were accepted.

    Raises:
        CheckpointError: Relevant entries differ and `accept_changes` is false, or entries differ
            that can never change. The error names each key with its old and new value.
    """
    found = find_changed_entries(saved or {}, loaded.values)
    never = [c for c in found if c.change == "never"]
    knowingly = [c for c in found if c.change == "knowingly"]
    if never or (knowingly and not accept_changes):
        raise _make_refusal(directory, step, [*never, *knowingly], loaded)
    return tuple(knowingly)


def _make_refusal(
    directory: Place, step: int, found: Sequence[Changed], loaded: LoadedConfig[Any]
) -> CheckpointError:
    lines = [
        f"{c.name}: saved {_format_entry(c.before)}, now {_format_entry(c.after)} "
        f"({loaded.origin(c.name)})"
        for c in found
    ]
    fixed = [c.name for c in found if c.change == "never"]
    if fixed:
        rule = (
            f"A run keeps its {' and '.join(fixed)}: shapes, or the examples that are held out, "
            "depend on it."
        )
        on = f"or use the saved {' and '.join(fixed)}."
    else:
        rule = "A run continues with the values that it was trained with."
        on = (
            f"or continue from step {step} with the new values: `jaxdist train` does so with "
            "--accept-changes, train with accept_changes=True. The metrics then name the step at "
            "which the values changed."
        )
    return CheckpointError(
        f"Checkpoint {step} in {directory} was trained with values other than the current ones:"
        "\n" + "\n".join(lines) + f"\n\n{rule}\n\nTrain in other folders, with --set "
        f"checkpoint.directory=... and --set output.directory=..., {on}"
    )


def _format_entry(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else repr(value)
