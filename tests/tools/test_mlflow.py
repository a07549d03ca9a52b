"""What MLflow keeps is what `fit` has measured; a resumed training continues its run."""

import pathlib

from tests.tools.programs import run_with

_LINES = """
import json
before = history.history["loss"]
history = model.fit(
    x, y, epochs=5, initial_epoch=3, validation_split=0.2, callbacks=[log], verbose=0
)
(run,) = mlflow.search_runs(output_format="list")
points = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
found = [[point.step, point.value] for point in points]
def fail(epoch, logs):
    raise RuntimeError
try:
    broken = jaxdist.fit.LambdaCallback(on_epoch_end=fail)
    model.fit(x, y, callbacks=[log, broken], verbose=0)
except RuntimeError:
    (run,) = mlflow.search_runs(output_format="list")
print(json.dumps([found, before + history.history["loss"], run.info.status]))
"""


def test_the_run_has_the_values_of_all_epochs(tmp_path: pathlib.Path) -> None:
    found, wanted, status = run_with("mlflow", 0, _LINES, tmp_path)
    assert found == [[epoch, value] for epoch, value in enumerate(wanted)]
    assert len(wanted) == 5
    assert status == "FAILED"
