"""A script that trains, and kills itself after a number of steps: `FOLDER STEPS`; 0 is never."""

import json
import os
import pathlib
import signal
import sys
from typing import Any

import jaxdist
from jaxdist import fit
from tests.fit.models import Net, make_data, make_model


class Kill(fit.Callback):
    """Ends this process after a number of steps."""

    def __init__(self, after: int) -> None:
        self._left = after

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, steps: int) -> None:
    """Train for 2 epochs of 3 steps, and write history and weights."""
    jaxdist.testing.virtual_devices(2)
    data = make_data(20)
    model = make_model(jaxdist.MirroredStrategy(), Net(), optimizer="adam")
    save = fit.ModelCheckpoint(f"{folder}/saved", resume=True, save_freq=1)
    history = model.fit(data.x, data.y, 8, 2, callbacks=[save, Kill(steps)])
    result = {"loss": history.history["loss"], "weights": [w.tolist() for w in model.get_weights()]}
    pathlib.Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
