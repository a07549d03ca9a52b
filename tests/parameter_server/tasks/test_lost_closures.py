"""Which closures are lost when servers are started again: against a model of their histories."""

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist._parameter_server.protocol import Restored, ServerInfo
from jaxdist._parameter_server.server.state import CountedClosures, Restore, State, make_incarnation
from jaxdist._parameter_server.strategy.losses import AcknowledgedClosures


def _restart(saved: State) -> State:
    made = copy.deepcopy(saved)
    counted = made.counted.to_json()
    made.incarnation = make_incarnation(saved.incarnation)
    made.restores.append(Restore(made.incarnation, counted))
    return made


def _say(state: State) -> ServerInfo:
    found = [Restored(r.incarnation, **r.counted.get("c", {})) for r in state.restores]
    return ServerInfo(task="ps:0", incarnation=state.incarnation, restores=found)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["count", "count", "count", "save", "kill"]), max_size=40))
def test_a_closure_is_lost_exactly_if_the_server_does_not_have_it(events: list[str]) -> None:
    state = saved = State()
    state.counted = CountedClosures()
    has: set[int] = set()
    has_saved: set[int] = set()
    is_saved, number = False, 0
    acknowledged = AcknowledgedClosures()
    for event in events:
        if event == "count":
            number += 1
            state.counted.forget_below("c", number)
            state.counted.count("c", number)
            has.add(number)
            acknowledged.note(number, {0: state.incarnation})
        elif event == "save":
            saved, has_saved, is_saved = copy.deepcopy(state), set(has), True
        else:
            state = _restart(saved) if is_saved else State()
            has = set(has_saved)
    expected = set(range(1, number + 1)) - has
    assert acknowledged.find_lost({0: _say(state)}) == expected
