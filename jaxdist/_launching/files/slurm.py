"""Writes a Slurm batch script for the job of a command."""

import os
import pathlib
import shlex
import sys

from jaxdist._launching.files.request import Request, TaskRequest

# How long Slurm waits after one task has ended. The others first save what they have, then end.
_WAIT_SECONDS = 300
FOREIGN = (
    "TF_CONFIG",
    "JAXDIST_SERVICE",
    "JAXDIST_LAUNCHER",
    "JAXDIST_DEVICES_PER_PROCESS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
)


def make_slurm_script(request: Request) -> str:
    """Return the script, for `sbatch`.

    Raises:
        LaunchError: An option has no use in Slurm.
    """
    _refuse_foreign(request)
    variables = {"JAXDIST_CLUSTER": "slurm", **request.list_variables(os.environ)}
    step = ["srun", "--label", "--kill-on-bad-exit=0", f"--wait={_WAIT_SECONDS}"]
    step += _list_step_options(request)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in _list_job_options(request, request)),
        f"# {request.count} processes of one job. Start it with: sbatch FILE",
        "",
        "# Variables of the shell that called sbatch would be taken for those of the job.",
        f"unset {' '.join(FOREIGN)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        "",
        f"for attempt in $(seq 1 {request.restarts + 1}); do",
        "    export JAXDIST_ATTEMPT=$attempt",
        f"    if {shlex.join([*step, sys.executable, *request.arguments])}; then",
        "        exit 0",
        "    else",
        "        code=$?",
        "    fi",
        '    echo "attempt $attempt ended with exit code $code" >&2',
        "done",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _refuse_foreign(request: Request) -> None:
    """Raise if an option was given that has no use in Slurm.

    Raises:
        LaunchError: Such an option was given.
    """
    request.refuse_options(
        "slurm",
        install="The job uses the Python of this command.\n\nLeave out --install.",
        image=(
            "Slurm runs programs of the machine itself, unless a plugin for containers is "
            "installed.\n\nLeave out --image; add the option of your plugin to `srun` in the file."
        ),
    )


def _list_job_options(job: Request, first: Request) -> list[str]:
    """Return the options of sbatch for a job, and for the resources of its first component."""
    return [
        f"--job-name={job.job_name}",
        *_list_options(first),
        f"--chdir={os.getcwd()}",
        f"--output={job.job_name}-%j.log",
    ]


def _list_options(request: Request) -> list[str]:
    """Return the options of sbatch for the resources of the processes."""
    options = [f"--ntasks={request.count}"]
    if request.hosts is not None:
        options += [f"--nodes={request.hosts}", f"--ntasks-per-node={request.processes_of_host}"]
    if request.cpus is not None:
        options.append(f"--cpus-per-task={request.cpus}")
    if request.memory is not None and request.hosts is not None:
        options.append(f"--mem={request.memory * request.processes_of_host}G")
    elif request.memory is not None:
        # In MiB, rounded up.
        options.append(f"--mem-per-cpu={-(-request.memory * 1024 // (request.cpus or 1))}M")
    if request.gpu is not None:
        kind = "" if request.gpu == "any" else f"{request.gpu}:"
        options.append(f"--gpus-per-task={kind}{request.devices_of_each}")
    if request.partition is not None:
        options.append(f"--partition={request.partition}")
    if request.time is not None:
        options.append(f"--time={request.time}")
    return options


def _list_step_options(request: Request) -> list[str]:
    """Return the options of srun for the resources of the processes."""
    # srun does not inherit this option from sbatch.
    options = [] if request.cpus is None else [f"--cpus-per-task={request.cpus}"]
    if request.gpu not in (None, "any"):
        # Without this, Slurm 22.05 gives each process its own GPUs only if the job requests no
        # kind of GPU.
        options.append(f"--gpu-bind=per_task:{request.devices_of_each}")
    return options


# Each task runs `bash -c "$run_task" bash JOB PORT COMMAND ...`.
_RUN_TASK = r"""
job=$1 port=$2
shift 2
index=$SLURM_PROCID
exec 3>&1
exec > >(trap "" TERM; exec sed -u "s/^/[$job $index] /" >&3) 2>&1
writer=$!
trap 'exec 1>&- 2>&-; wait "$writer"' EXIT
# Each task tells the others where it is, by a file that all of them see.
echo "$SLURMD_NODENAME:$((port + index))" >"$job_folder/$job.$index.part"
mv "$job_folder/$job.$index.part" "$job_folder/$job.$index"
cluster=
for entry in $job_tasks; do
    name=${entry%:*} addresses=
    for ((other = 0; other < ${entry#*:}; other++)); do
        until [ -e "$job_folder/$name.$other" ]; do
            # This makes a network file system look again.
            ls "$job_folder" >/dev/null
            sleep 0.2
        done
        addresses+="${addresses:+, }\"$(cat "$job_folder/$name.$other")\""
    done
    cluster+="${cluster:+, }\"$name\": [$addresses]"
done
export TF_CONFIG="{\"cluster\": {$cluster}, \"task\": {\"type\": \"$job\", \"index\": $index}}"
soon=0
while true; do
    began=$SECONDS is_asked=
    "$@" &
    process=$!
    while kill -0 "$process" 2>/dev/null; do
        if [ -z "$is_asked" ] && [ -e "$job_folder/end" ]; then
            kill -TERM "$process"
            is_asked=1
        fi
        sleep 0.2
    done
    wait "$process"
    code=$?
    # The script below starts the chief again.
    if [ "$job" = chief ] || [ -e "$job_folder/end" ]; then
        exit "$code"
    fi
    soon=$((SECONDS - began < 10 ? soon + 1 : 0))
    if [ "$code" -le 128 ] || [ "$soon" -ge 5 ]; then
        echo "ended with exit code $code while the chief ran"
        if [ "$code" -eq 0 ]; then
            echo "Let the script call jaxdist.Server(...).join() in this task."
            code=1
        fi
        # The code of srun is that of tasks which it ended because of this one.
        echo "$code" >"$job_folder/code.$job.$index"
        mv -n "$job_folder/code.$job.$index" "$job_folder/code"
        exit "$code"
    fi
    echo "was ended by signal $((code - 128)), and is started again"
done
"""
_END = """
# Workers and parameter servers end, and these write a last snapshot.
touch "$job_folder/end"
for _ in $(seq 60); do
    [ -z "$(jobs -pr)" ] && break
    sleep 1
done
rm -rf "$job_folder"
exit "$code"
"""


def make_task_script(request: TaskRequest) -> str:
    """Return the script, for `sbatch`.

    It is a heterogeneous job: the chief, the parameter servers and the workers are one component
    each, so only workers get GPUs. A task that is killed starts again on the same node. The folder
    of the script must be on a file system that all nodes share.

    Raises:
        LaunchError: An option has no use in Slurm.
    """
    base = request.request
    _refuse_foreign(base)
    parts = {job: request.make_part(job) for job in request.counts}
    components = [_list_job_options(base, parts["chief"])]
    components += [["hetjob", *_list_options(parts[job])] for job in ("ps", "worker")]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {shlex.quote(option)}" for own in components for option in own]
    tasks = " ".join(f"{job}:{count}" for job, count in request.counts.items())
    kept = '"$job_folder/snapshots"'
    if request.snapshot_directory is not None:
        kept = shlex.quote(str(pathlib.Path(request.snapshot_directory).absolute()))
    lines += [
        f"# {base.count} tasks of one job. Start it with: sbatch FILE",
        "",
        "# Variables of the shell that called sbatch would be taken for those of the job.",
        f"unset {' '.join(FOREIGN)} JAXDIST_CLUSTER JAXDIST_ADDRESSES JAXDIST_SECRET",
        f'export job_folder="$PWD/.{base.job_name}-$SLURM_JOB_ID" job_tasks={shlex.quote(tasks)}',
        'mkdir -p -m 700 "$job_folder"',
        'rm -f "$job_folder"/{chief,ps,worker,code}.* "$job_folder"/{code,end}',
        f"export JAXDIST_SNAPSHOT_DIRECTORY={kept} JAXDIST_ATTEMPT=1",
        *_make_secret(),
        "port=$((10240 + SLURM_JOB_ID * 7 % 320 * 64))",
        f"run_task=$(cat <<'END'{_RUN_TASK}END",
        ")",
        "",
    ]
    place = 1
    for group, job in enumerate(("ps", "worker"), start=1):
        lines += [f"{_write_step(request, job, group, place)} &", f"{job}=$!"]
        place += request.counts[job]
    lines += [
        f"for attempt in $(seq 1 {base.restarts + 1}); do",
        "    export JAXDIST_ATTEMPT=$attempt",
        f"    {_write_step(request, 'chief', 0, 0)} &",
        "    chief=$!",
        '    wait -n "$chief" "$ps" "$worker"',
        "    code=$?",
        '    if kill -0 "$chief" 2>/dev/null; then',
        "        # A task has ended by itself, and has said so; or Slurm has lost one.",
        '        [ "$code" -ne 0 ] || code=1',
        '        [ -e "$job_folder/code" ] && code=$(cat "$job_folder/code")',
        '        echo "the job ends with the exit code $code of a server or a worker" >&2',
        "        break",
        "    fi",
        '    [ "$code" -eq 0 ] && break',
        '    echo "attempt $attempt of the chief ended with exit code $code" >&2',
        "done",
    ]
    return "\n".join(lines) + "\n" + _END.lstrip()


def _make_secret() -> list[str]:
    """Return the lines that give the tasks the secret by which they recognize each other."""
    given = os.environ.get("JAXDIST_SECRET_FILE")
    if given:
        return [f"export JAXDIST_SECRET_FILE={shlex.quote(str(pathlib.Path(given).absolute()))}"]
    make = shlex.join([sys.executable, "-c", "import secrets; print(secrets.token_urlsafe())"])
    return [
        'export JAXDIST_SECRET_FILE="$job_folder/secret"',
        f'(umask 077; {make} >"$JAXDIST_SECRET_FILE")',
    ]


def _write_step(request: TaskRequest, job: str, group: int, place: int) -> str:
    """Return the command that runs the tasks of a job.

    Args:
        request: The request.
        job: `chief`, `ps` or `worker`.
        group: Number of its component.
        place: Number of tasks whose ports come before its ports.
    """
    part = request.make_part(job)
    variables = part.list_variables(os.environ)
    step = ["srun", f"--het-group={group}", f"--ntasks={part.count}", "--kill-on-bad-exit=1"]
    step += _list_step_options(part)
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    command = shlex.join([sys.executable, *part.arguments])
    task = f'bash -c "$run_task" bash {job} $((port + {place}))'
    return f"{settings} {shlex.join(step)} {task} {command}"
