"""A policy that is connected to a robot, for ``embodyrl deploy`` and ``improve``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from embodyrl.errors import UserError
from embodyrl.policies.exported import is_policy_file
from embodyrl.real_robot.commands.signals import interrupt_is_estop
from embodyrl.real_robot.commands.tokens import read_token
from embodyrl.real_robot.connect_robot import (
    ConnectedRobot,
    check_robot,
    lerobot_robot,
    libfranka_robot,
    ros_robot,
    simulated_robot,
)
from embodyrl.real_robot.control.actions import action_space
from embodyrl.real_robot.control.any_safety import Decoder, decoder_for, require_motors
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import Inference, ThreadInference, VirtualInference
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.joint_space import joint_space
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.preflight import Check, preflight, print_checks
from embodyrl.real_robot.control.priority import priority_report
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import RunLog
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.policy_link.connect_policy import serve_apart, serve_elsewhere, serve_here
from embodyrl.real_robot.policy_link.dream_options import NO_DREAM, DreamOptions
from embodyrl.real_robot.policy_link.file_policy import FilePolicy
from embodyrl.real_robot.policy_link.guidance_options import NO_GUIDANCE, GuidanceOptions
from embodyrl.real_robot.policy_link.metadata import camera_sizes
from embodyrl.real_robot.resets.between import Between
from embodyrl.real_robot.resets.open_resets import open_between
from embodyrl.real_robot.resets.options import ResetOptions


@dataclass
class Deployment:
    """A policy and a robot, connected.

    Attributes:
        client: of the policy's server.
        connected: the robot.
        execution: how chunks are executed.
        latency_of: maps the seconds that inference really took to those of a simulated robot.
    """

    client: PolicyClient
    connected: ConnectedRobot
    execution: ExecutorConfig
    latency_of: Callable[[float], float]

    def require_ready(self) -> None:
        """Runs the pre-flight check and prints its table; a simulated arm is put to a start.

        Raises:
            UserError: something is wrong.
        """
        connected = self.connected
        connected.begin(0)
        checks = preflight(
            connected.robot, self.client.infer, self.client.metadata, connected.safety,
            self.execution, charged=self.latency_of,
        )  # fmt: skip
        if not connected.simulated:
            checks.append(Check("control loop", True, priority_report(connected.clock)))
        print_checks(checks)
        if not all(check.ok for check in checks):
            raise UserError(
                "The pre-flight check failed, so nothing was moved. The lines marked FAILS say what "
                "is wrong."
            )

    def decoder(self) -> Decoder:
        """Of the actions of an episode; fresh."""
        rate = self.execution.control_hz
        return decoder_for(self.client.metadata, rate, self.connected.safety)

    def between(
        self,
        opened: ExitStack,
        options: ResetOptions,
        ask: Callable[[str], None],
        *,
        log: str,
        record: bool,
        operator: Operator | None = None,
        token: str = "",
        seed: int = 0,
    ) -> Between:
        """What happens between the episodes; see ``open_resets.open_between``."""
        facts = self.client.metadata
        return open_between(
            opened, self.connected, options, facts=facts, decoder=self.decoder, ask=ask,
            described={"policy": facts}, log=log, record=record, operator=operator, token=token,
            seed=seed,
        )  # fmt: skip

    def described(self, settings: Mapping[str, Any], init: int) -> dict[str, Any]:
        """What the log of an episode begins with: all that is needed to read it later."""
        safety = dataclasses.asdict(self.connected.safety)
        return {**settings, "init": init, "safety": safety, "policy": self.client.metadata}

    def play(
        self,
        log: RunLog,
        *,
        dry_run: bool = False,
        operator: Operator | None = None,
        record: bool = False,
        help_seconds: float = 0.0,
        decoder: Decoder | None = None,
    ) -> dict[str, Any]:
        """Plays and logs one episode, which has begun; Ctrl-C stops the arm first.

        Args:
            log: open; it stays so.
            dry_run: send no command.
            operator: a person who may take over.
            record: also log what the policy sees.
            help_seconds: see ``ticker.drive``.
            decoder: that the operator knows, too; None for a fresh one.

        Returns:
            ``RobotEpisode`` without events, and ``executor.Counts``, as plain data.
        """
        connected = self.connected
        inference: Inference = (
            VirtualInference(self.client.infer, self.latency_of)
            if connected.simulated
            else ThreadInference(self.client.infer)
        )
        guard = SafetyFilter(connected.safety)
        executor = Executor(
            self.execution, inference, lambda now, text: log.event(now, "problem", text)
        )
        # The time limit of training, stretched by the lower speed.
        seconds = self.client.metadata["max_episode_steps"] / self.execution.control_hz
        with interrupt_is_estop(guard):
            try:
                episode = drive(
                    connected.robot, connected.clock, guard, executor, decoder or self.decoder(),
                    log, seconds=seconds, dry_run=dry_run, operator=operator, record=record,
                    help_seconds=help_seconds,
                )  # fmt: skip
            finally:
                inference.close()
        # The changes of mode are in the log already.
        outcome = dataclasses.asdict(dataclasses.replace(episode, events=[]))
        return {**outcome, **dataclasses.asdict(executor.counts)}


def open_deployment(
    opened: ExitStack,
    path: str,
    overrides: Sequence[str] = (),
    *,
    robot: str = "twin",
    address: str = "",
    robot_file: str = "",
    prompt: str = "",
    token_file: str = "",
    mode: str = "rtc",
    execute: int = 0,
    latency: float = -1.0,
    speed: float = 0.25,
    seed: int = 0,
    detectors: Sequence[str] = (),
    dream: DreamOptions = NO_DREAM,
    guidance: GuidanceOptions = NO_GUIDANCE,
) -> Deployment:
    """Connects a policy to a robot; ``opened`` disconnects both in the end.

    The other arguments are those of ``deploy.deploy_checkpoint``.

    Raises:
        UserError: a setting that cannot be, or the policy does not fit the robot.
    """
    _check_arguments(path, robot, robot_file, speed)
    check_robot(robot, address=address, robot_file=robot_file, prompt=prompt)
    of_policy = [o for o in overrides if o.startswith("policy.")]
    watched = [word for folder in detectors for word in ("--detector", folder)]
    given = [*watched[:1], *dream.words[:1], *guidance.words[:1], *of_policy]
    if path.startswith("ws://") and given:
        raise UserError(f"{path} is served already: give {given[0]} to `embodyrl serve` there.")
    if is_policy_file(path):
        if given:
            raise UserError(f"{path} is an exported policy: {given[0]} needs its checkpoint.")
        if mode == "rtc":
            raise UserError(
                "--mode rtc continues the previous chunk, which an exported policy cannot. Give "
                "--mode sync, naive or ensemble."
            )
    if guidance.base and mode == "rtc":
        raise UserError(
            "--base mixes two policies, and --mode rtc continues the chunk of one. Give --mode "
            "sync, naive or ensemble."
        )
    latency_of = (lambda took: latency) if latency >= 0 else float
    if robot == "twin":
        client, connected = _open_twin(opened, path, overrides, seed, detectors, dream, guidance)
    else:
        in_scene = robot == "libfranka" and not robot_file
        others = [o for o in overrides if o not in of_policy]
        _refuse_twin_options(() if in_scene else others, latency)
        words = [*of_policy, *watched, *dream.words, *guidance.words]
        client = _open_policy(opened, path, token_file, seed, words)
        connected = _open_robot(
            opened, robot, address, robot_file, prompt, client.metadata,
            scene=(path, overrides) if in_scene else None,
        )  # fmt: skip
    execution = _execution(client.metadata, mode, execute, speed)
    return Deployment(client, connected, execution, latency_of)


def _check_arguments(path: str, robot: str, robot_file: str, speed: float) -> None:
    if not 0.0 < speed <= 1.0:
        raise UserError(
            f"--speed is {speed}; it is a share of the trained rate, above 0 and at most 1."
        )
    simulated = robot == "twin" or (robot == "libfranka" and not robot_file)
    if (path.startswith("ws://") or is_policy_file(path)) and simulated:
        what = "an exported file" if is_policy_file(path) else "a server"
        raise UserError(
            f"The simulated arm of --robot {robot} plays the task of a checkpoint, but {path} is "
            f"{what}. Give a checkpoint, or another robot."
        )


def _refuse_twin_options(overrides: Sequence[str], latency: float) -> None:
    """Options that only the twin in this process has."""
    if overrides:
        raise UserError(
            f"{overrides[0]} would change a simulated env. Give it to the twin: embodyrl twin RUN "
            f"{overrides[0]}"
        )
    if latency >= 0:
        raise UserError(
            "--latency is charged in the simulated time of --robot twin; another robot has its "
            "own time."
        )


def _open_twin(
    opened: ExitStack,
    path: str,
    overrides: Sequence[str],
    seed: int,
    detectors: Sequence[str],
    dream: DreamOptions,
    guidance: GuidanceOptions,
) -> tuple[PolicyClient, ConnectedRobot]:
    """The policy and the simulated arm, both in this process."""
    from embodyrl import starting  # a robot's computer has neither this module nor torch

    starting.load_torch()
    from embodyrl.build import load_config
    from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
    from embodyrl.real_robot.twin.config import twin_config
    from embodyrl.storage.env_spec import check_compatible

    config = twin_config(path, overrides)
    device = load_config(path, overrides).run.device
    of_policy = [o for o in overrides if o.startswith("policy.")]
    policy = CheckpointPolicy(
        path, device, seed, detectors=detectors, dream=dream, overrides=of_policy,
        guidance=guidance,
    )  # fmt: skip
    connected = opened.enter_context(simulated_robot(config))
    # The overrides may have changed the task into one that the policy does not fit.
    spec = connected.robot.spec  # type: ignore[attr-defined]
    check_compatible(policy.spec, dataclasses.replace(spec, num_envs=policy.spec.num_envs))
    return opened.enter_context(serve_here(policy)), connected


def _open_policy(
    opened: ExitStack, path: str, token_file: str, seed: int, options: Sequence[str]
) -> PolicyClient:
    """The policy on another machine, or in a process of its own."""
    if path.startswith("ws://"):
        return opened.enter_context(serve_elsewhere(path, read_token(token_file)))
    if is_policy_file(path):
        return opened.enter_context(serve_here(FilePolicy(path, seed)))
    return opened.enter_context(serve_apart(path, seed=seed, options=options))


def _open_robot(
    opened: ExitStack, robot: str, address: str, robot_file: str, prompt: str,
    metadata: dict[str, Any], scene: tuple[str, Sequence[str]] | None,
) -> ConnectedRobot:  # fmt: skip
    """An arm in real time; ``scene`` is the checkpoint whose task franka-sim's arm plays in."""
    cameras = camera_sizes(metadata)
    if robot == "lerobot":
        policy = joint_space(metadata)
        connected = opened.enter_context(lerobot_robot(robot_file, cameras, prompt))
        assert isinstance(connected.safety, JointSafetyConfig)
        require_motors(policy, connected.safety.space)
        return connected
    space = action_space(metadata)
    if robot != "libfranka":
        return opened.enter_context(ros_robot(robot, address, robot_file, space, cameras, prompt))
    config = None
    if scene is not None:
        from embodyrl.real_robot.twin.config import twin_config

        config = twin_config(*scene)
    return opened.enter_context(
        libfranka_robot(address, robot_file, space, cameras, prompt, config)
    )


def _execution(metadata: dict[str, Any], mode: str, execute: int, speed: float) -> ExecutorConfig:
    horizon = int(metadata["horizon"])
    # Of a longer plan, as many actions as in training.
    trained = int(metadata["execute"])
    if not execute and trained < horizon:
        execute = trained
    return ExecutorConfig(
        horizon=horizon,
        action_dim=int(metadata["action_dim"]),
        control_hz=metadata["control_hz"] * speed,
        mode=mode,
        execute=execute,
    )
