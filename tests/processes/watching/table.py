"""Generated tables of what one process sees of all."""

from hypothesis import strategies as st

from jaxdist._processes.watching.observer import ProcessState, Seen

# Texts that name processes themselves, as a user's error may.
_TEXTS = st.sampled_from(["", "ValueError: process 0 is bad", "signal SIGKILL", "reduce (call 3)"])


@st.composite
def seen_of(draw: st.DrawFn, index: int, count: int) -> Seen:
    """What is seen of one process."""
    blames = st.lists(st.integers(0, count - 1), unique=True).map(tuple)
    state = ProcessState(
        index=index,
        place=draw(_TEXTS),
        line=draw(st.sampled_from(["train.py:31 (main)", "process 1.py:3 (f)", ""])),
        step=draw(st.none() | st.integers(0, 3)),
        in_wait=draw(st.booleans()),
        stack=draw(_TEXTS),
        blames=draw(st.none() | blames),
        raised=draw(_TEXTS),
    )
    return Seen(
        state=draw(st.none() | st.just(state)),
        silent_seconds=draw(st.sampled_from([0.0, 1.0, 4.0, 60.0])),
        is_stopped=draw(st.booleans()),
        ended=draw(st.none() | _TEXTS),
        held=draw(_TEXTS),
    )


@st.composite
def tables(draw: st.DrawFn) -> dict[int, Seen]:
    """A table of 1 to 5 processes; process 0 reads it."""
    count = draw(st.integers(1, 5))
    return {index: draw(seen_of(index, count)) for index in range(count)}
