"""``embodyrl deploy``: runs a policy on a robot, behind the safety filter, and logs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.functional.intervals import format_rate, wilson
from embodyrl.real_robot.commands.deployment import open_deployment
from embodyrl.real_robot.commands.tokens import read_token
from embodyrl.real_robot.connect_robot import ask_at_terminal
from embodyrl.real_robot.control.clocks import PacedClock
from embodyrl.real_robot.control.episode import EndedBy
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.logs.earlier_logs import set_aside
from embodyrl.real_robot.logs.mcap_log import RunLog
from embodyrl.real_robot.operator.device_operator import open_operator
from embodyrl.real_robot.operator.watching import Watching
from embodyrl.real_robot.policy_link.dream_options import NO_DREAM, DreamOptions
from embodyrl.real_robot.policy_link.guidance_options import NO_GUIDANCE, GuidanceOptions
from embodyrl.real_robot.resets.options import (
    NO_RESET,
    OPTION_NAMES,
    ResetOptions,
    check_options,
)
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.folder_lock import locked


def deploy_checkpoint(
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
    episodes: int = 1,
    latency: float = -1.0,
    speed: float = 0.25,
    dry_run: bool = False,
    operator: int | str | None = None,
    hand: str = "",
    record: bool = False,
    out: str = "runs/deploy",
    seed: int = 0,
    detectors: Sequence[str] = (),
    dream: DreamOptions = NO_DREAM,
    guidance: GuidanceOptions = NO_GUIDANCE,
    resets: ResetOptions = NO_RESET,
) -> dict[str, Any]:
    """Runs a policy on a robot: policy server, client, executor, safety filter, robot.

    Args:
        path: a checkpoint, or a run's folder; an exported file; or ``ws://host:port``, where its
            policy is served already.
        overrides: of the config that it was trained with, e.g. ``env.task=reach`` or
            ``policy.start_noise=0``.
        robot: ``"twin"``, the simulated one in this process, whose time stands still while the
            policy infers; or the transport to one in real time: ``"ros2"``, ``"rosbridge"``,
            ``"ros1"``, ``"libfranka"`` or ``"lerobot"``.
        address: of the rosbridge server, or of the arm.
        robot_file: its topics and workspace (``ros.config.load_robot``); empty means those of
            ``embodyrl twin``. For libfranka see ``libfranka.config.load_arm``; empty means
            franka-sim in the checkpoint's task.
        prompt: instruction for the policy where no topic gives one.
        token_file: holds the token of the policy server, and of the page of several arms.
        mode: execution mode, see ``control.executor``.
        execute: actions of a chunk that are executed before the next one is requested; 0 takes as
            many as in training, or in a mode that infers meanwhile half of a chunk that was
            executed whole.
        episodes: number of episodes, one for each initial state of the evaluation split.
        latency: s of the twin's time that an inference takes; below 0 as long as it really took.
        speed: share of the control rate that the policy was trained at. Simulators let the arm
            accelerate harder than a Franka may, so at 1 the arm lags behind the policy.
        dry_run: send no command.
        operator: port of a page for a person beside the robot (0: a free one), or the address of a
            page of several arms, see ``open_operator``; None for no page.
        hand: the device in their hand, see ``operator.devices.open_device``.
        record: also log what the policy sees, so that ``export.export_logs`` can make a data set.
        out: folder of the logs and of ``result.json``; those of an earlier run are moved into a
            folder below it (``earlier_logs.set_aside``).
        seed: of the policy's noise.
        detectors: folders of failure detectors; each asks for a person when it sees an episode fail.
        dream: lets a world model choose among the policy's proposals.
        guidance: how far to move from the policy that training began with; not with the mode rtc.
        resets: who brings the scene back between episodes.

    Returns:
        ``execute`` (actions executed of each chunk) of ``horizon`` (planned), ``episodes``
        (counted), ``ended_by_person`` and ``ended_by_fault`` (not counted),
        ``successes``, ``success_rate`` (None for no counted episode), ``interval``,
        ``stopped_by`` (``"person"`` or ``"fault"``; empty where nothing was amiss), ``resets`` (see
        ``ResetCounts``), and per episode ``results``.

    Raises:
        UserError: the pre-flight check failed, or the policy does not fit the robot.
    """
    if episodes < 1:
        raise UserError("--episodes must be at least 1.")
    check_options(resets, OPTION_NAMES)
    if dry_run and resets.path:
        raise UserError("--dry-run sends no command, and a reset moves the arm: leave out --reset.")
    settings = {
        "checkpoint": str(path),
        "robot": robot,
        "mode": mode,
        "speed": speed,
        "dry_run": dry_run,
        "record": record,
        "detectors": [*detectors],
        "dream": dream.dream,
        "base": guidance.base,
        "guidance": guidance.guidance,
        "reset_by": resets.path,
    }
    results: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with ExitStack() as opened:
        # One process at a time writes there.
        opened.enter_context(locked(Path(out)))
        # 1. Connect to the policy, the robot and the person.
        deployment = open_deployment(
            opened, path, overrides, robot=robot, address=address, robot_file=robot_file,
            prompt=prompt, token_file=token_file, mode=mode, execute=execute, latency=latency,
            speed=speed, seed=seed, detectors=detectors, dream=dream, guidance=guidance,
        )  # fmt: skip
        connected = deployment.connected
        if connected.simulated and (operator is not None or hand):
            connected.clock = PacedClock(connected.clock)
        motors = isinstance(connected.safety, JointSafetyConfig)
        if hand and motors:
            raise UserError(
                f"--hand {hand} moves the hand of an arm whose shape is known. To correct an arm of "
                "LeRobot's, take over with its leader: embodyrl improve --helper lerobot:TYPE."
            )
        person, page = open_operator(
            opened, connected.clock, operator, hand, read_token(token_file)
        )
        if motors and person is not None:
            person = Watching(person)
        connected.person = person
        ask = ask_at_terminal if page is None else page.ask
        # In a dry run an arm that goes home by itself stays where it is.
        if dry_run and motors:
            connected.begin = lambda init: None
        # 2. Check everything before anything moves.
        deployment.require_ready()
        between = deployment.between(
            opened, resets, ask, log=str(Path(out) / "resets"), record=record, operator=person,
            token=read_token(token_file), seed=seed,
        )  # fmt: skip
        if earlier := set_aside(out):
            print(f"  The logs of the run before are now in {earlier}.")
        # 3. Run the episodes.
        for init in range(episodes):
            between.prepare(init, f"Arrange the scene for episode {init + 1}, and go on.")
            file = Path(out) / f"episode_{init:04d}.mcap"
            described = deployment.described(settings, init)
            safety = connected.safety
            log = RunLog(file, described, connected.clock.now(), safety.robot, safety.motors)
            try:
                row = deployment.play(log, dry_run=dry_run, operator=person, record=record)
            finally:
                log.close()
            results.append({"init": init, "log": str(log.path), **row})
            between.state.ended = row["solved"] if row["ended_by"] != EndedBy.FAULT else None
            # 4. Sum up, after every episode: what comes next may be a power cut.
            execution = deployment.execution
            env = str(deployment.client.metadata["env"])
            chunk = {"execute": execution.asks_after, "horizon": execution.horizon}
            result = {"env": env, **settings, **chunk, **_summary(results)}
            result["resets"] = between.summary()
            write_json(Path(out) / "result.json", result)
            text = f"{row['reason']}, {row['seconds']:.1f} s; {score_line(result)}"
            print(f"  episode {init}: {text}", flush=True)
            if row["mode"] in (Mode.ESTOP, Mode.FAULT):
                break
    return result


def score_line(result: dict[str, Any]) -> str:
    """The success rate of a result, and beside it the episodes that it leaves out."""
    rate = format_rate(result["successes"], result["episodes"])
    if result["episodes"]:
        rate += f" (executing {result['execute']} of {result['horizon']} actions)"
    said = [rate]
    left_out = {who: result[f"ended_by_{who}"] for who in (EndedBy.PERSON, EndedBy.FAULT)}
    total = result["episodes"] + sum(left_out.values())
    for who, count in left_out.items():
        if count:
            verb = "were" if count > 1 else "was"
            said.append(f"{count} of {total} {verb} ended by a {who}, not counted")
    resets = result["resets"]
    if resets["resets"]:
        said.append(f"a person was asked for {resets['asked']} of {resets['resets']} resets")
    return "; ".join(said)


def _stopped_by(results: list[dict[str, Any]]) -> str:
    """Who kept the command from playing all its episodes to their end; empty for nobody."""
    if results[-1]["mode"] == Mode.ESTOP:
        return EndedBy.PERSON
    faults = any(row["ended_by"] == EndedBy.FAULT for row in results)
    return EndedBy.FAULT if faults or results[-1]["mode"] == Mode.FAULT else ""


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    counted = [row for row in results if row["ended_by"] == EndedBy.POLICY]
    n = len(counted)
    solved = sum(row["solved"] for row in counted)
    return {
        "episodes": n,
        "ended_by_person": sum(row["ended_by"] == EndedBy.PERSON for row in results),
        "ended_by_fault": sum(row["ended_by"] == EndedBy.FAULT for row in results),
        "successes": solved,
        "success_rate": solved / n if n else None,
        "interval": wilson(solved, n),
        "stopped_by": _stopped_by(results),
        "results": results,
    }
