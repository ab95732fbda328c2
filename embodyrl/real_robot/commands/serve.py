"""``embodyrl serve``: offers a checkpoint's policy on a websocket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embodyrl.errors import UserError
from embodyrl.policies.exported import is_policy_file
from embodyrl.real_robot.commands.signals import sigterm_is_ctrl_c
from embodyrl.real_robot.commands.tokens import read_token
from embodyrl.real_robot.policy_link.dream_options import NO_DREAM, DreamOptions
from embodyrl.real_robot.policy_link.file_policy import FilePolicy
from embodyrl.real_robot.policy_link.guidance_options import NO_GUIDANCE, GuidanceOptions
from embodyrl.real_robot.policy_link.server import PolicyServer


def serve_checkpoint(
    path: str,
    host: str,
    port: int,
    token_file: str,
    device: str,
    seed: int,
    monitor: str = "",
    detectors: Sequence[str] = (),
    reflector: str = "",
    overdue: float = 0.7,
    dream: DreamOptions = NO_DREAM,
    overrides: Sequence[str] = (),
    guidance: GuidanceOptions = NO_GUIDANCE,
) -> None:
    """Serves a checkpoint's policy until interrupted.

    Args:
        path: a checkpoint, or a run's folder; or an exported file, which has the policy alone.
        host: address to listen at.
        port: of the server; 0 takes a free one.
        token_file: holds the token that clients must send.
        device: of the policy.
        seed: of the policy's noise.
        monitor: ``MODULE:FUNCTION``, see ``monitors.load_monitor``; empty for none.
        detectors: folders of failure detectors; each asks for a person when it sees an episode fail.
        reflector: a reflector's folder; a person is asked for when it has not seen the task solved
            for too long.
        overdue: share of an episode that is too long.
        dream: lets a world model choose among the policy's proposals.
        overrides: ``policy.key=value``, of the config that it was trained with.
        guidance: how far to move from the policy that training began with.

    Raises:
        UserError: no such checkpoint, an override of something else than the policy, an empty
            token file, or an address that may not be used.
    """
    # An exported file is served as it is.
    if is_policy_file(path):
        given = [*overrides, monitor, *detectors, reflector, dream.dream, guidance.base]
        if unread := [word for word in given if word]:
            raise UserError(
                f"{path} is an exported policy, which {unread[0]} cannot be applied to. Serve its "
                "checkpoint."
            )
        _serve(FilePolicy(path, seed), path, host, port, read_token(token_file))
        return
    # Torch is imported here: on a robot's computer there is none.
    from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
    from embodyrl.real_robot.policy_link.monitors import load_monitor

    if others := [o for o in overrides if not o.startswith("policy.")]:
        raise UserError(
            f"A server has the policy alone, so {others[0]} has no effect. Leave it out."
        )
    token = read_token(token_file)
    monitors = [load_monitor(monitor)] if monitor else []
    policy = CheckpointPolicy(path, device, seed, monitors, detectors, dream, overrides, guidance)
    if reflector:
        from embodyrl.real_robot.env.reflector_judge import OverdueMonitor
        from embodyrl.world_models.reflectors.folder import load_reflector

        max_steps = policy.spec.max_episode_steps
        policy.monitors.append(OverdueMonitor(load_reflector(reflector), max_steps, overdue))
    _serve(policy, path, host, port, token)


def _serve(policy: Any, path: str, host: str, port: int, token: str) -> None:
    """Serves what has ``infer`` and ``metadata``."""
    server = PolicyServer(policy.infer, policy.metadata, host, port, token)
    address = f"ws://{server.host}:{server.port}"
    print(
        f"Serving {path} at {address} ({'with' if token else 'no'} token). Ctrl-C stops.",
        flush=True,
    )
    sigterm_is_ctrl_c()
    try:
        server.serve_forever()
    finally:
        server.close()
