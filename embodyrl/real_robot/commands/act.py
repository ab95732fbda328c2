"""``embodyrl act``, and its other end, ``embodyrl train --launcher robot``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from embodyrl.errors import UserError
from embodyrl.real_robot.commands.signals import sigterm_is_ctrl_c
from embodyrl.real_robot.commands.tokens import read_token


def act_for(address: str, token_file: str, overrides: Sequence[str], device: str) -> None:
    """Plays on this computer's robot until the learner's run is over.

    Args:
        address: of the learner, ``ws://HOST:PORT``.
        token_file: holds the learner's token.
        overrides: ``env.key=value``, which robot this is.
        device: of the policy.
    """
    from embodyrl.real_robot.remote.remote_actor import act

    sigterm_is_ctrl_c()
    played = act(address, read_token(token_file), list(overrides), device)
    print(f"The learner's run is over; {played} chunks were played for it.")


def remote_actor(config: Any, listen: str, token_file: str) -> Callable[[], Any]:
    """What ``training.runner.train`` takes as ``rollouts``, so that ``embodyrl act`` plays.

    Args:
        config: of the run.
        listen: ``HOST:PORT`` at which the learner waits for the actor.
        token_file: holds the token that the actor must send.

    Raises:
        UserError: ``listen`` is not HOST:PORT, or the token file is empty.
    """
    from embodyrl.real_robot.remote.learner import RemoteActors

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--listen is {listen!r}; write HOST:PORT, for example 0.0.0.0:8001.")
    return partial(RemoteActors, config, host, int(port), read_token(token_file))
