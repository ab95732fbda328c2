"""Episodes of a policy on the arm, helped or alone; each is on the disk as soon as it is over."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.improve.config import ImproveConfig
from embodyrl.improve.person import Person, open_person
from embodyrl.interrupt import INTERRUPTED as STATUS_INTERRUPTED
from embodyrl.real_robot.commands.deployment import Deployment, open_deployment
from embodyrl.real_robot.control.episode import EndedBy
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.ticker import INTERRUPTED
from embodyrl.real_robot.logs.mcap_log import outcome, read
from embodyrl.real_robot.record.episode_logs import EpisodeLogs, logs_folder
from embodyrl.real_robot.resets.between import Between
from embodyrl.real_robot.resets.in_turn import InTurn
from embodyrl.real_robot.resets.options import NO_RESET
from embodyrl.storage import checkpoint
from embodyrl.storage.paths import fingerprint

Row = dict[str, Any]
"""How an episode ended, as its log says (``/episode``), with ``init``."""


class ArmFaultError(UserError):
    """A fault ended the rounds: the arm has to be looked at."""

    status = 2


class StoppedError(UserError):
    """A person stopped the arm."""

    status = STATUS_INTERRUPTED


@dataclass(frozen=True)
class Episodes:
    """Episodes of one policy.

    Attributes:
        out: the logs go to ``OUT.logs``.
        policy: run or checkpoint that acts.
        inits: initial states in order.
        helped: whether a person may take over.
        detector: folder of the failure detector that asks for them; empty for none.
    """

    out: Path
    policy: str
    inits: Sequence[int]
    helped: bool
    detector: str = ""


def counts(row: Row) -> bool:
    """Whether an episode came to an end of its own; a fault or a stop is none."""
    return row["ended_by"] != EndedBy.FAULT and row["mode"] != Mode.ESTOP


def play_stage(config: ImproveConfig, stage: Episodes) -> list[Row]:
    """Plays what is missing of a stage.

    An episode that a fault or a stop ended is no failure: it is played again.

    Returns:
        The episodes that came to an end, in order.

    Raises:
        ArmFaultError: a fault ended an episode.
        StoppedError: a person stopped the arm.
        UserError: the policy does not fit the robot, or the pre-flight check failed.
    """
    acting = fingerprint(checkpoint.find(stage.policy))
    logs = EpisodeLogs(stage.out, {"checkpoint": acting, "helped": stage.helped})
    rows = [row for kept in logs.kept if counts(row := outcome(kept.path))]
    done = {row["init"] for row in rows}
    missing = [init for init in stage.inits if init not in done]
    if not missing or _budget_spent(config, stage, rows):
        return rows
    split = ["env.split=train"] if stage.helped and config.robot == "twin" else []
    # The twin has no file; a leader that helps on it has.
    file = "" if config.robot == "twin" else config.robot_file
    with ExitStack() as opened:
        deployment = open_deployment(
            opened, stage.policy, [*split, *config.deployed], robot=config.robot,
            address=config.address, robot_file=file, prompt=config.prompt,
            mode=config.mode, latency=config.latency, speed=config.speed, seed=config.seed,
            detectors=[stage.detector] if stage.detector else [],
        )  # fmt: skip
        person = open_person(opened, config, deployment, stage.helped)
        between = _between(opened, config, stage, deployment, person)
        deployment.require_ready()
        broken = ""
        for init in missing:
            between.prepare(init, _arrange(stage, init), broken)
            row = _play_one(config, stage, logs, deployment, person, between, init, len(rows))
            between.state.ended = row["solved"]
            # Only a simulated arm goes on after it was driven against something.
            broken = row["reason"] if row["mode"] == Mode.FAULT else ""
            rows.append(row)
            if _budget_spent(config, stage, rows):
                break
    return rows


def _between(
    opened: ExitStack,
    config: ImproveConfig,
    stage: Episodes,
    deployment: Deployment,
    person: Person,
) -> Between:
    """What happens between the episodes of a stage.

    A simulated arm arranges the initial states of a look, the same for both policies.
    """
    connected = deployment.connected
    options = config.resets if stage.helped or config.robot != "twin" else NO_RESET
    between = deployment.between(
        opened, options, person.ask, log=str(logs_folder(stage.out) / "resets"), record=True,
        operator=person.operator, seed=config.seed,
    )  # fmt: skip
    if options.practice and not hasattr(connected.robot, "go_on"):
        connected.robot = InTurn(connected.robot, between, options.prompt)
    return between


def _arrange(stage: Episodes, init: int) -> str:
    """What a person must do before an episode."""
    same = "" if stage.helped else ", the same for both policies"
    return f"Arrange scene {stage.inits.index(init) + 1}{same}."


def _budget_spent(config: ImproveConfig, stage: Episodes, rows: Sequence[Row]) -> bool:
    spent = sum(row["help"]["seconds"] for row in rows)
    return stage.helped and 0 < config.person_seconds <= spent


def _play_one(
    config: ImproveConfig,
    stage: Episodes,
    logs: EpisodeLogs,
    deployment: Deployment,
    person: Person,
    between: Between,
    init: int,
    number: int,
) -> Row:
    """Plays one episode, and keeps it unless it was interrupted."""
    connected = deployment.connected
    # 1. The episode.
    settings: dict[str, Any] = {"checkpoint": stage.policy, "robot": config.robot}
    settings |= {"speed": config.speed}
    settings |= {"split": "train" if stage.helped else "eval"}
    settings |= {"back": between.state.back, "asked": between.state.asked}
    described = deployment.described(settings, init)
    safety = connected.safety
    log = logs.start(described, connected.clock.now(), safety.robot, safety.motors)
    decoder = deployment.decoder()
    person.begin(decoder)
    row = deployment.play(
        log, operator=person.operator, record=True, decoder=decoder,
        help_seconds=config.seconds if stage.helped else 0.0,
    )  # fmt: skip
    if row["reason"] == INTERRUPTED:
        logs.discard()
        raise StoppedError(
            f"{INTERRUPTED}: the arm is at rest, and the episode that was going on is not kept. The same "
            "command goes on."
        )
    # 2. Keep it.
    kept = logs.finish(row["solved"])
    found = outcome(kept.path)
    said = f"{found['reason']}, {found['duration']:.1f} s"
    if found["help"]["times"]:
        said += f", a person {found['help']['seconds']:.1f} s"
    print(f"  episode {number}: {said}", flush=True)
    _require_arm(row, connected.simulated, kept.path)
    return found


def _require_arm(row: Row, simulated: bool, log: Path) -> None:
    """Ends the rounds where the arm may not simply go on.

    A simulated arm that was driven against something is put back by the next episode.

    Args:
        row: of the episode.
        simulated: whether the arm is.
        log: of the episode, which has the cause.

    Raises:
        ArmFaultError: a fault.
        StoppedError: a person stopped it.
    """
    if row["mode"] == Mode.ESTOP:
        raise StoppedError(f"The arm was stopped: {row['reason']}. The same command goes on.")
    by_policy = row["ended_by"] == EndedBy.POLICY
    if row["ended_by"] == EndedBy.FAULT or (
        row["mode"] == Mode.FAULT and not (simulated and by_policy)
    ):
        # A label after the fault ended the episode; what comes before it is the cause.
        events = [e["text"] for e in read(log)["/event"] if e["kind"] == "mode"]
        faults = [text for text in events if f"-> {Mode.FAULT}" in text]
        raise ArmFaultError(
            f"The arm stopped: {faults[-1] if faults else row['reason']} ({log}). Look at it and "
            "mend the cause; the same command goes on."
        )
