"""The part of the pre-flight check that times a policy: are its chunks in time, and used as in training?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control.executor import ExecutorConfig

WARM_UP = 2
"""Inferences before the timed ones: the first compiles, the second is the first guided one."""


def chunk_report(
    infer: Callable[..., Any],
    observation: dict[str, Any],
    execution: ExecutorConfig,
    metadata: Mapping[str, Any],
    trials: int,
    charged: Callable[[float], float],
) -> str:
    """How long a chunk takes.

    Args:
        infer: a request to an answer.
        observation: that it is asked about.
        execution: how chunks are carried out.
        metadata: of the policy.
        trials: number of timed inferences, after ``WARM_UP``.
        charged: maps the s that an inference took to the s that it counts for.

    Raises:
        UserError: it is no chunk, or too slow for the mode or for the training.
    """
    took: list[float] = []
    for _ in range(trials + WARM_UP):
        began = time.monotonic()
        actions = infer(observation)["actions"]
        took.append(charged(time.monotonic() - began))
        if (
            actions.shape != (execution.horizon, execution.action_dim)
            or not np.isfinite(actions).all()
        ):
            raise UserError(
                f"The policy's actions {actions.shape} are not the finite chunk that its metadata "
                "promises."
            )
        # In rtc mode all requests but the first are guided. That is other code, with a cold start
        # of its own, so it is what must be timed.
        if execution.mode == "rtc":
            execute = execution.asks_after
            guided = {
                "previous": actions,
                "delay": min(execution.delay, execution.horizon - execute),
                "execute": execute,
            }
            observation = {**observation, **guided}
    first = max(took[:WARM_UP])
    timed = took[WARM_UP:]
    worst = max(timed)
    # The chunk must arrive before the actions of the previous one are used up.
    ahead = (execution.horizon - execution.asks_after) / execution.control_hz
    found = (
        f"{np.median(timed) * 1e3:.0f} ms per chunk, slowest {worst * 1e3:.0f}, "
        f"the first one {first * 1e3:.0f}"
    )
    if execution.mode != "sync" and not worst <= ahead:
        raise UserError(
            f"{found}: slower than the {ahead * 1e3:.0f} ms of actions that are left when a chunk "
            "is requested. Use a smaller --execute, a faster machine, or --mode sync."
        )
    return found + _beside_training(execution, metadata, worst)


def _beside_training(execution: ExecutorConfig, metadata: Mapping[str, Any], worst: float) -> str:
    """Where the chunks are used in another way than in training.

    Args:
        execution: how chunks are carried out.
        metadata: ``execute``, how many actions of a chunk were executed in training; and
            ``max_prefix``, the longest delay in actions that the policy was trained to continue
            after, where it was trained so.
        worst: s, the longest inference.

    Raises:
        UserError: in rtc mode the delay is longer than in training.
    """
    found = ""
    trained = int(metadata["execute"])
    if execution.asks_after > trained:
        found = f"; {execution.asks_after} actions of a chunk are executed, in training {trained}"
    longest = metadata.get("max_prefix", 0)
    delay = math.ceil(worst * execution.control_hz)
    if execution.mode == "rtc" and longest:
        if delay > longest:
            raise UserError(
                f"A chunk takes up to {worst * 1e3:.0f} ms, in which {delay} actions are taken, "
                f"and the policy was trained to continue after at most {longest} "
                "(policy.max_prefix). Use a lower --speed or a faster machine, or serve it with "
                "policy.max_prefix=0: then its chunks are guided."
            )
        found += f"; a delay of {delay} actions, in training up to {longest}"
    return found
