"""Started by tests: a task that says what it was given, and ends as its arguments say.

`tasks_script.py FOLDER CODE [WHO CODE]`: the chief ends with a code when all are there, and WHO has
been started again; WHO first ends with the other code, negative for a signal.
"""

import json
import os
import pathlib
import sys
import time


def main() -> None:
    """Say what this task was given, and end."""
    folder, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    who, how = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("", 0)
    config = json.loads(os.environ["TF_CONFIG"])
    name = f"{config['task']['type']}_{config['task']['index']}"
    starts = len(list(folder.glob(f"{name}.*")))
    secret = pathlib.Path(os.environ["JAXDIST_SECRET_FILE"]).read_text()
    known = {
        "cluster": config["cluster"],
        "secret": secret,
        "snapshots": os.environ["JAXDIST_SNAPSHOT_DIRECTORY"],
        "devices": os.environ.get("JAX_NUM_CPU_DEVICES"),
        "platforms": os.environ.get("JAX_PLATFORMS"),
        "attempt": os.environ.get("JAXDIST_ATTEMPT"),
        "pid": os.getpid(),
    }
    part = folder / f".{name}.{starts}"
    part.write_text(json.dumps(known))
    part.rename(folder / f"{name}.{starts}")
    print("ready", flush=True)
    if name == who and not starts:
        sys.exit(how) if how >= 0 else os.kill(os.getpid(), -how)
    is_chief = name == "chief_0"
    others = [f"{job}_{i}" for job in config["cluster"] for i in range(len(config["cluster"][job]))]
    while not is_chief or not _all_there(folder, others, who):
        time.sleep(0.05)
    sys.exit(code if not starts else 0)


def _all_there(folder: pathlib.Path, names: list[str], again: str) -> bool:
    there = all((folder / f"{name}.0").exists() for name in names)
    return there and (not again or (folder / f"{again}.1").exists())


if __name__ == "__main__":
    main()
