"""Remedies for state that would differ between replicas, by the role of the state."""

import enum
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


class Role(enum.Enum):
    """The role of a leaf of state, guessed from its name and dtype."""

    PARAMETERS = "parameters"
    STATISTICS = "batch statistics"
    METRICS = "metrics"
    COUNTERS = "counters"
    RANDOM = "random keys"


_REMEDIES = {
    Role.PARAMETERS: (
        "All-reduce the gradients first: grads = jaxdist.get_replica_context().all_reduce('mean', "
        "grads) before the update."
    ),
    Role.STATISTICS: (
        "Average the statistics over the replicas before the step returns them: batch_stats = "
        "jaxdist.get_replica_context().all_reduce('mean', batch_stats)."
    ),
    Role.METRICS: (
        "Add up what each replica saw before you add it to the metric: metric += "
        "jaxdist.get_replica_context().all_reduce('sum', value)."
    ),
    Role.COUNTERS: (
        "Count for all replicas together: count += "
        "jaxdist.get_replica_context().all_reduce('sum', number)."
    ),
    Role.RANDOM: (
        "Return a key that is the same on all replicas, and derive the key of each replica from it "
        "in the step: own = jax.random.fold_in(key, "
        "jaxdist.get_replica_context().replica_id_in_sync_group)."
    ),
}

_PROVED = (
    "Where a value is the same on all replicas for a reason that the trace does not show, say so "
    "with jaxdist.assume_replicated(value)."
)

# Words in a path, in the order of the search. The order matters: the state of an optimizer may
# contain the names of parameters, and statistics may be in a module of any name.
_WORDS = (
    (Role.RANDOM, r"rngs?|rng_?state|keys?|prng\w*|dropout_key"),
    (
        Role.STATISTICS,
        r"batch_?stats?|(running|moving)_?(mean|var\w*|average)|statistics?|stats?",
    ),
    (Role.METRICS, r"metrics?|loss(es)?|accurac(y|ies)|correct|total|hits"),
    (Role.COUNTERS, r"counts?|counters?|seen|steps?|num_\w+|examples"),
)


def role_of(name: str, dtype: Any) -> Role:
    """Return the role of a leaf.

    Args:
        name: The pytree path of the leaf.
        dtype: The dtype of its array.
    """
    words = [w.lower() for w in re.findall(r"\w+", name)]
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return Role.RANDOM
    for role, pattern in _WORDS:
        # A float is not a counter; a dict key named "key" is a random key only if it is uint32.
        fits = role is not Role.COUNTERS or jnp.issubdtype(dtype, jnp.integer)
        fits = fits and (role is not Role.RANDOM or dtype == jnp.uint32)
        if fits and any(re.fullmatch(pattern, w) for w in words):
            return role
    return Role.COUNTERS if jnp.issubdtype(dtype, jnp.integer) else Role.PARAMETERS


def remedy(leaves: Iterable[tuple[str, Role]]) -> str:
    """Return the remedy for these leaves; if their roles differ, one with an example for each."""
    # One example for each role: a model may have thousands of leaves.
    first: dict[Role, str] = {}
    for name, role in leaves:
        first.setdefault(role, name)
    if len(first) == 1:
        (role,) = first
        return f"{_REMEDIES[role]} {_PROVED}"
    lines = [f"{role.value} ({name}): {_REMEDIES[role]}" for role, name in first.items()]
    return "\n".join([*lines, _PROVED])
