"""Builds what happens between episodes from settings, and refuses what could not be carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from embodyrl.errors import UserError
from embodyrl.real_robot.connect_robot import ConnectedRobot
from embodyrl.real_robot.control.actions import action_space
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.policy_link.connect_policy import serve_apart, serve_elsewhere, serve_here
from embodyrl.real_robot.policy_link.metadata import FACTS
from embodyrl.real_robot.resets.between import Between
from embodyrl.real_robot.resets.judges import Judge, open_judge
from embodyrl.real_robot.resets.options import ResetOptions
from embodyrl.real_robot.resets.scene_reset import SceneReset
from embodyrl.real_robot.resets.waypoints import read_script
from embodyrl.real_robot.resets.ways import HandOnly, PolicyReturn, ScriptedReturn, Way


def open_between(
    opened: ExitStack,
    connected: ConnectedRobot,
    options: ResetOptions,
    *,
    facts: Mapping[str, Any],
    decoder: Callable[[], Any],
    ask: Callable[[str], None],
    described: Mapping[str, Any],
    log: str = "",
    record: bool = False,
    operator: Operator | None = None,
    token: str = "",
    seed: int = 0,
) -> Between:
    """What happens between the episodes of a robot.

    Args:
        opened: disconnects the policy of a reset in the end.
        connected: the robot.
        options: checked by ``check_options``.
        facts: of the policy of the episodes, see ``policy_link.metadata``.
        decoder: makes a fresh decoder of its actions.
        ask: says what a person must do, and waits until it is done.
        described: what each log of a reset begins with.
        log: folder of these logs; empty for none.
        record: also log what the policy of a reset sees.
        operator: a person who may stop a reset.
        token: of the server of the reset's policy.
        seed: of its noise.

    Raises:
        UserError: the simulated arm has no task that undoes the other, nobody tells whether the
            scene is back, a waypoint is out of bounds, or the policy does not fit.
    """
    if not options.path and not options.practice:
        return Between(connected, None, options, ask)
    _require_home(options, connected)
    undoes = options.practice or not options.scripted
    robot: Any = connected.robot
    if undoes and hasattr(robot, "go_on"):
        from embodyrl.real_robot.twin.mujoco_twin import counterpart_of

        counterpart_of(getattr(robot, "twin", robot).config)  # refuses a task that has none
        _refuse_prompt(options)
    judge = open_judge(connected, options.reflector, simulated=undoes)
    if undoes:
        _require_judge(judge, options, operator)
    way = _open_way(opened, connected, options, facts, token, seed)
    reset = SceneReset(
        connected,
        way,
        decoder,
        # In practice the episodes are judged, and the hand that goes home needs no judge.
        None if options.practice else judge,
        options.home,
        options.seconds,
        options.tries,
        options.prompt,
        log,
        described,
        record,
        operator,
    )
    return Between(connected, reset, options, ask, judge if options.practice else None)


def _require_home(options: ResetOptions, connected: ConnectedRobot) -> None:
    safety = connected.safety
    if isinstance(safety, JointSafetyConfig):
        raise UserError(
            "A reset moves the hand through places in the base's frame, and of an arm of LeRobot's "
            "only the motors are known. Arrange the scene by hand: leave out --reset and --practice."
        )
    for at, low, high in zip(options.home, safety.box_low, safety.box_high, strict=True):
        if not low <= at <= high:
            raise UserError(
                f"The hand's home {options.home} lies outside the workspace from {safety.box_low} to "
                f"{safety.box_high} (m, in the base's frame). Give another one."
            )


def _refuse_prompt(options: ResetOptions) -> None:
    if options.prompt:
        raise UserError(
            "The simulated arm says its own instructions: leave out the instruction of the task that "
            "undoes the other."
        )


def _require_judge(judge: Judge | None, options: ResetOptions, operator: Operator | None) -> None:
    """Refuses a task that undoes the other where nobody tells whether it is solved.

    Raises:
        UserError: saying who could.
    """
    if judge is None and operator is None:
        what = "practice" if options.practice else "a policy that brings the scene back"
        raise UserError(
            f"Nobody tells whether the scene is back, which {what} needs. Give a reflector for it, "
            "or the topic scene_ready in the robot's file, or have a person at the page."
        )


def _open_way(
    opened: ExitStack,
    connected: ConnectedRobot,
    options: ResetOptions,
    facts: Mapping[str, Any],
    token: str,
    seed: int,
) -> Way:
    if options.practice:
        return HandOnly()
    if options.scripted:
        safety = connected.safety
        assert isinstance(safety, SafetyConfig)  # see _require_home
        return ScriptedReturn(read_script(options.path, safety.box_low, safety.box_high))
    # The policy: served already, or beside an arm in real time in a process of its own, so that its
    # Python code never delays the control loop.
    if options.path.startswith("ws://"):
        client = opened.enter_context(serve_elsewhere(options.path, token))
    elif connected.simulated:
        from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy

        client = opened.enter_context(serve_here(CheckpointPolicy(options.path, seed=seed)))
    else:
        client = opened.enter_context(serve_apart(options.path, seed=seed))
    theirs = client.metadata
    action_space(theirs)  # refuses other conventions than a robot's
    for name in ("cameras", *FACTS):
        # How long an episode may be is the reset's own bound.
        if name != "max_episode_steps" and theirs[name] != facts[name]:
            raise UserError(
                f"The policy {options.path} was trained with {name} {theirs[name]!r}, and that of the "
                f"episodes with {facts[name]!r}: the arm's actions and pictures must be the same."
            )
    return PolicyReturn(client.infer, int(theirs["execute"]))
