"""`--restarts`: all processes start again, at another service and other ports."""

import json
import pathlib
import re

from tests.launching.launcher import QUICK, check_nobody_is_left, run_launcher, write_script

TELL = """
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
attempt = int(os.environ["JAXDIST_ATTEMPT"])
print("given", json.dumps([attempt, [*cluster, os.environ["JAXDIST_SERVICE"]]]), flush=True)
"""


def test_a_job_that_fails_once_starts_again_with_other_ports(tmp_path: pathlib.Path) -> None:
    script = write_script(
        tmp_path,
        TELL + "if attempt == 1:\n    if index == 1:\n        raise ValueError('planted')\n"
        "    time.sleep(100)",
    )
    outcome = run_launcher("-n", "2", *QUICK, "--restarts", "3", script)
    assert outcome.exit_code == 0
    given = [json.loads(t) for t in re.findall(r"^\[\d\] given (.*)$", outcome.stdout, re.M)]
    assert sorted(attempt for attempt, _ in given) == [1, 1, 2, 2]
    ports = {attempt: set(addresses) for attempt, addresses in given}
    assert len(ports[1] | ports[2]) == 6
    assert (
        "attempt 1 failed because of process 1. Restart 1 of 3: all start again" in outcome.stderr
    )
    assert outcome.stderr.index("ValueError: planted\njaxdist launch: attempt 1") > 0
    check_nobody_is_left(outcome, 4)


def test_after_the_last_restart_the_code_is_that_of_the_last_cause(tmp_path: pathlib.Path) -> None:
    script = write_script(tmp_path, TELL + "sys.exit(10 + attempt)")
    outcome = run_launcher("-n", "2", *QUICK, "--restarts", "1", script)
    assert outcome.exit_code == 12
    assert outcome.stderr.count("all start again") == 1
    assert "with exit code 12" in outcome.stderr.splitlines()[-1]
