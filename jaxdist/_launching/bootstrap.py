"""First program of each process of a job: makes it end with the launcher, then runs the command.

It is run as a file, with the pid of the launcher and the command, and imports nothing of jaxdist: a
process that has imported JAX reads some of its environment too late. On Linux, the setting that
kills the process when the launcher ends survives `exec`. On other systems the heartbeat ends it.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Replace this process by the command in `sys.argv`."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        # The launcher may have ended before the call above.
        if os.getppid() != launcher:
            os._exit(1)
    # Ray blocks signals in its processes, and the command would inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
