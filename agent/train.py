"""Train: `python -m agent.train --task memory_maze_9x9 --core s3m`. The same command resumes."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any

from configs import process


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when done or stopped on request, 2 for a wrong command, 1 for a failure."""
    argv = sys.argv[1:] if argv is None else argv
    first = os.environ.get("RANK", "0") == "0"  # of several ranks one speaks

    def refuse(error: object, alone: bool = False) -> int:
        if first or alone:
            print(f"error: {error}", file=sys.stderr)
        return 2

    from configs.load import ConfigError, explicit, help_text, resolve

    if "--help" in argv or "-h" in argv:
        print(help_text())
        return 0
    try:
        config, given = resolve(argv), explicit(argv)
        # A folder alone says what is resumed.
        resumed = "task" not in given and os.path.exists(f"{config.logdir}/config.yaml")
        if not resumed:
            from envs.make import check_task

            check_task(config.task)
    except (ConfigError, ValueError) as error:
        return refuse(error)
    if first:
        what = config.logdir if resumed else f"{config.task}, core {config.core}"
        print(f"{what}: starting ...", flush=True)
    from agent.checks import MachineError, RunError
    from agent.ranks import RankLost
    from agent.run import run
    from envs.pool import PoolFailed

    try:
        return run(config, given)
    except RunError as error:
        return refuse(error, alone=isinstance(error, MachineError))
    except (RankLost, PoolFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = error.strerror or ""
        if not reason.startswith("disk full"):
            reason = f"disk full: {error}; free space and run the same command to resume"
        print(f"error: {reason}", file=sys.stderr)  # of this rank: the others see it end only
        return 1


def leave(number: int, frame: Any) -> None:
    """A notice while modules are still imported; `agent.notice` takes over."""
    name = signal.Signals(number).name
    print(f"stopped by {name} before its first step; nothing was to be saved", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    # Spawned environment workers import this module again, under another name: only the run's
    # own process is prepared, before anything imports torch.
    process.prepare()
    if {"-h", "--help"} & set(sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` is no failure
    if "RANK" not in os.environ:  # of several ranks none can leave alone
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, leave)
    status = main()
    if "RANK" in os.environ:
        # All is saved and closed; threads of Gloo have aborted an interpreter that shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
