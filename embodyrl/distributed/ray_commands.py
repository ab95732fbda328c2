"""Commands side by side on the machines of a Ray cluster: the runs of a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from embodyrl.distributed.ray_pool import join_cluster, require_ray
from embodyrl.errors import UserError
from embodyrl.interrupt import INTERRUPTED


def run_commands(
    commands: dict[str, list[str]],
    out: Path,
    *,
    address: str = "",
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> dict[str, int]:
    """Runs commands, as many at a time as fit; what each prints goes to ``out/NAME.log``.

    Args:
        commands: name -> the command. Each starts in this process's working directory, which all
            machines must have.
        out: a folder that all machines see.
        address: of a cluster; empty starts one here.
        cpus: cores that each reserves; may be a fraction.
        gpus: the same for GPUs.

    Returns:
        The exit status of those that failed. It ends early where a person interrupts.

    Raises:
        MissingDependencyError: no Ray.
        UserError: the cluster cannot be reached, or has no machine that is large enough.
    """
    ray = require_ray()
    join_cluster(address)
    out.mkdir(parents=True, exist_ok=True)
    refs: dict[Any, str] = {}
    try:
        _check_room(ray.cluster_resources(), cpus, gpus)
        start = ray.remote(run_here).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
        log = {name: str(out.resolve() / f"{name}.log") for name in commands}
        path = os.environ.get("PYTHONPATH", "")
        refs |= {
            start.remote(command, log[name], os.getcwd(), path): name
            for name, command in commands.items()
        }
        print(f"{len(refs)} runs started; each prints into {out}/NAME.log", flush=True)
        failed = {}
        # Each is told as it ends.
        waiting = list(refs)
        while waiting:
            ready, waiting = ray.wait(waiting)
            name = refs[ready[0]]
            try:
                status = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                first = str(error).strip().partition("\n")[0]
                print(f"{name}: its machine or process was lost ({first}).", flush=True)
                status = 1
            print(
                f"{name}: {'done' if not status else f'failed ({status}), {log[name]}'}", flush=True
            )
            if status:
                failed[name] = status
        return failed
    except KeyboardInterrupt:
        # Each run is asked to save, and has a minute for it.
        for ref in refs:
            ray.cancel(ref)
        ray.wait(list(refs), num_returns=len(refs), timeout=60)
        return dict.fromkeys(commands, INTERRUPTED)
    finally:
        ray.shutdown()


def run_here(command: list[str], log: str, folder: str, path: str) -> int:
    """The exit status of a command that starts in a folder and prints into a file."""
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            return process.wait()
        except BaseException:  # the sweep was interrupted: the run saves before it ends
            process.send_signal(signal.SIGINT)
            process.wait(50)
            raise


def _check_room(there: dict[str, float], cpus: float, gpus: float) -> None:
    """Refuses runs that would wait for ever for a place."""
    for what, each in (("CPU", cpus), ("GPU", gpus)):
        if each > there.get(what, 0.0):
            raise UserError(
                f"A run with {each:g} {what} does not fit where there are "
                f"{there.get(what, 0.0):g}. Lower --worker-{what.lower()}s, or add machines."
            )
