"""What would make a step fit into memory, with the numbers."""

from collections.abc import Callable, Iterator

from jaxdist._planning.needs import Needs
from jaxdist.explain import Memory, SlicePlan, size

# Batches that a search for the largest one may try. The compiler refuses one that does not fit
# before it writes code, which is nearly all of the time: those that fit are few.
_MOST_TRIES, _MOST_FITTING = 6, 3
# What a batch is to take of the memory beside the state, and what is enough of it.
_AIM, _ENOUGH = 0.95, 0.8


def make_advice(
    made: SlicePlan,
    needs: Needs,
    needs_with: Callable[[int], Needs] | None,
    report: Callable[[str], None],
) -> tuple[str, ...]:
    """Remedies for a step that does not fit: each with what it saves, and whether that is enough.

    Args:
        made: The plan that does not fit.
        needs: What it was made from.
        needs_with: What the step needs with so many rows for each replica; None looks for none.
        report: Told what is being done.
    """
    m, replicas = made.memory, made.num_replicas
    found = []
    if needs.kept_state:
        found.append(
            "Donating the state, RunOptions(donate_argnums=...), gives its memory to the new one: "
            + _format_verdict(m, needs.kept_state)
        )
    if replicas > 1 and not made.rules.startswith("fsdp"):
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
            f"on each replica, in place of 1/{replicas // made.num_slices}, and gathers parameters "
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
    """The largest batch that fits, found by compiling."""
    rows = made.rows_per_replica
    if rows is None or rows < 2:
        return
    low, high, fitting = 0, rows, 0  # rows that fit, rows that do not, how many fitted
    m = made.memory
    state = m.arguments - m.batch
    aim, enough = (int(state + part * (m.limit - state)) for part in (_AIM, _ENOUGH))
    peaks: dict[int, int | None] = {0: state, rows: m.peak}
    for left in range(_MOST_TRIES, 0, -1):
        # Whether any batch fits is known from the smallest.
        candidate = 1 if left == 1 and not low else _choose_rows(low, high, peaks, aim)
        if candidate - low <= low // 8 or candidate >= high:
            break
        report(f"looking for a batch that fits: {candidate:,} rows a replica")
        memory = needs_with(candidate).memory
        peaks[candidate] = memory.peak
        low, high = (candidate, high) if memory.fits else (low, candidate)
        fitting += memory.fits
        if fitting == _MOST_FITTING or (memory.fits and (memory.peak or 0) > enough):
            break
    if low:
        needed = peaks[low]
        yield (
            f"A batch of {low:,} rows a replica ({low * made.num_replicas:,} in all) in place of "
            f"{rows:,}" + (f" needs {size(needed)}, and fits." if needed else " fits.")
        )
    else:
        yield f"A smaller batch alone does not help: {high:,} rows a replica do not fit either."


def _choose_rows(low: int, high: int, peaks: dict[int, int | None], aim: int) -> int:
    """Rows to try: where memory, which grows with the rows, would reach the aim.

    No more than `low` where nothing between the two is worth a try.
    """
    known = sorted((rows, peak) for rows, peak in peaks.items() if peak is not None)
    guess = (low + high) // 2
    # From the two that are nearest: the compiler does with less where there is less. Of nothing
    # that ran, only the state is known; two refused batches say more.
    near = [row for row in known if row[0] >= low and (low or row[0] or len(known) < 3)][:2]
    if len(near) == 2 and near[1][1] > near[0][1]:
        (r0, p0), (r1, p1) = near
        guess = int(r0 + (aim - p0) * (r1 - r0) / (p1 - p0))
    guess = min(guess, high - 1)
    # A number that is easy to share.
    guess -= guess % (1 << max(0, guess.bit_length() - 4))
    return guess if low else max(guess, 1)
