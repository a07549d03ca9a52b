"""Advises on a step that does not fit into memory: remedies, with the bytes that each saves."""

from collections.abc import Callable, Iterator

from jaxdist._planning.needs import Needs
from jaxdist._reports import Memory, SlicePlan, size
from jaxdist.errors import ShapeError

# Limits of the search for the largest batch: compilations in total, and compilations that fit.
# The compiler refuses a batch that does not fit before it generates code. Code generation takes
# nearly all of the time, so only batches that fit are expensive.
_MOST_TRIES, _MOST_FITTING = 6, 3
# The fraction of the memory beside the state that the search aims at, and the one that ends it.
_AIM, _ENOUGH = 0.95, 0.8


def make_advice(
    made: SlicePlan,
    needs: Needs,
    needs_with: Callable[[int], Needs] | None,
    report: Callable[[str], None],
) -> tuple[str, ...]:
    """Return remedies for a step that does not fit: what each saves, and whether that is enough.

    Args:
        made: The plan that does not fit.
        needs: The needs in that plan.
        needs_with: Returns the needs of the step with a given number of rows per replica. None
            skips the search for a batch.
        report: Receives a line of text about the current work.
    """
    m, replicas = made.memory, made.num_replicas
    found = []
    if needs.kept_state:
        found.append(
            "Donating the state, RunOptions(donate_argnums=...), gives its memory to the new one: "
            + _format_verdict(m, needs.kept_state)
        )
    if replicas > 1 and not made.rules.startswith("fsdp"):
        # An estimate: it ignores the temporaries that hold gathered parameters.
        of_optimizer = m.optimizer - m.optimizer // replicas
        of_parameters = m.parameters - m.parameters // replicas
        if made.rules.startswith("sharded"):
            of_optimizer = 0
        if of_optimizer:
            found.append(
                f"sharded_update keeps 1/{replicas} of the optimizer on each replica: "
                + _format_verdict(m, of_optimizer)
            )
        if of_parameters:
            found.append(
                f"FSDP keeps 1/{replicas} of parameters and optimizer on each replica: "
                + _format_verdict(m, of_optimizer + of_parameters)
            )
    if "in_slice" in made.rules and made.num_slices > 1:
        state = m.optimizer + m.parameters
        found.append(
            f"{made.rules.replace('_in_slice', '')} keeps 1/{replicas} of parameters and optimizer "
            f"on each replica, instead of 1/{replicas // made.num_slices}, and gathers parameters "
            "over the network between slices: "
            + _format_verdict(m, state - state // made.num_slices)
        )
    if needs_with is not None:
        found += _search_batch(made, needs_with, report)
    return tuple(found)


def _format_verdict(memory: Memory, saved: int) -> str:
    words = f"{size(saved)} less"
    if memory.peak is None:
        return words
    left = memory.peak - saved
    fits = "fits" if left <= memory.limit else f"still more than {size(memory.limit)}"
    return f"{words}, {size(left)}, {fits}."


def _search_batch(
    made: SlicePlan, needs_with: Callable[[int], Needs], report: Callable[[str], None]
) -> Iterator[str]:
    """Search for the largest batch that fits, by compiling, and yield the advice."""
    rows = made.rows_per_replica
    if rows is None or rows < 2:
        return
    low, high, fitting = 0, rows, 0  # rows that fit, rows that do not, number of tries that fit
    m = made.memory
    state = m.arguments - m.batch
    aim, enough = (int(state + part * (m.limit - state)) for part in (_AIM, _ENOUGH))
    # With 0 rows, the step needs its state. None if the compiler did not report the peak.
    peaks: dict[int, int | None] = {0: state, rows: m.peak}
    for left in range(_MOST_TRIES, 0, -1):
        # If this is the last try and nothing has fitted yet, try 1 row, to see if any batch fits.
        candidate = 1 if left == 1 and not low else _choose_rows(low, high, peaks, aim)
        # A gain of less than an eighth is not worth minutes of compilation.
        if candidate - low <= low // 8 or candidate >= high:
            break
        report(f"looking for a batch that fits: {candidate:,} rows a replica")
        try:
            memory = needs_with(candidate).memory
        except ShapeError:
            # For instance, micro-batches do not divide these rows; nothing is known of fewer rows.
            if not low:
                return
            break
        peaks[candidate] = memory.peak
        low, high = (candidate, high) if memory.fits else (low, candidate)
        fitting += memory.fits
        if fitting == _MOST_FITTING or (memory.fits and (memory.peak or 0) > enough):
            break
    if low:
        needed = peaks[low]
        yield (
            f"A batch of {low:,} rows a replica ({low * made.num_replicas:,} in all) instead of "
            f"{rows:,}" + (f" needs {size(needed)}, and fits." if needed else " fits.")
        )
    else:
        rows_left = "1 row a replica does" if high == 1 else f"{high:,} rows a replica do"
        yield f"A smaller batch alone does not help: {rows_left} not fit either."


def _choose_rows(low: int, high: int, peaks: dict[int, int | None], aim: int) -> int:
    """Return the number of rows to try next, for which the predicted memory reaches `aim`.

    A result of `low` or less means that nothing between `low` and `high` is worth a try.
    """
    known = sorted((rows, peak) for rows, peak in peaks.items() if peak is not None)
    guess = (low + high) // 2
    # Interpolate between the two nearest known peaks. Farther ones mislead: memory is not linear in
    # the rows, since the compiler saves memory when it is short. The point at 0 rows is only an
    # estimate (the state), so two refused batches are preferred to it.
    near = [row for row in known if row[0] >= low and (low or row[0] or len(known) < 3)][:2]
    if len(near) == 2 and near[1][1] > near[0][1]:
        (r0, p0), (r1, p1) = near
        guess = int(r0 + (aim - p0) * (r1 - r0) / (p1 - p0))
    guess = min(guess, high - 1)
    # Keep the 4 highest bits, so that the number is divisible by a power of two.
    guess -= guess % (1 << max(0, guess.bit_length() - 4))
    return guess if low else max(guess, 1)
