"""Random steps over variables give what a model of them in NumPy gives."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist import PerReplica, Variable, VariableAggregation, VariableSynchronization
from tests.tables import examples

NONE, SUM, MEAN, FIRST = VariableAggregation
ON_READ = VariableSynchronization.ON_READ
# Aggregation of the variable, and whether each replica has its own.
MODES = [(SUM, False), (MEAN, False), (FIRST, False), (SUM, True), (NONE, True)]
CALLS = ["assign", "assign_add", "assign_sub"]


class Model:
    """The copies of one variable, and what assignments do to them."""

    def __init__(self, count: int, aggregation: VariableAggregation, *, own: bool) -> None:
        self.copies = np.full(count, 10.0)
        self._aggregation, self._own = aggregation, own

    def change(self, call: str, values: np.ndarray) -> None:
        """All replicas call `call` with their values."""
        if not self._own:
            one = {SUM: values.sum(), MEAN: values.mean(), FIRST: values[0]}[self._aggregation]
            values = np.full_like(values, one)
        before = 0.0 if call == "assign" else self.copies
        self.copies = before + (-values if call == "assign_sub" else values)


@settings(max_examples=examples(25), deadline=None)
@given(
    count=st.integers(1, 4),
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=3),
    data=st.data(),
)
def test_random_assignments_are_those_of_the_model(count: int, modes: Any, data: Any) -> None:
    # With one replica there is one copy, which aggregation does not change.
    strategy = jaxdist.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    variables, models = [], []
    for aggregation, own in modes:
        options: dict[str, Any] = {"synchronization": ON_READ} if own else {}
        with strategy.scope():
            variables.append(Variable(10.0, aggregation=aggregation, **options))
        models.append(Model(count, aggregation, own=own))
    number = st.integers(0, len(modes) - 1)
    script = data.draw(
        st.lists(st.tuples(number, st.sampled_from(CALLS), number), min_size=1, max_size=5)
    )

    def step(x: Any) -> None:
        for target, call, source in script:
            getattr(variables[target], call)(x + variables[source])

    x = np.arange(1.0, count + 1)
    for _ in range(2):
        strategy.run(step, (PerReplica(list(x.astype(np.float32))),))
        for target, call, source in script:
            models[target].change(call, x + models[source].copies)

    for variable, model in zip(variables, models, strict=True):
        found = [float(v) for v in variable.values]
        np.testing.assert_allclose(found, model.copies, rtol=1e-4, atol=1e-3)
