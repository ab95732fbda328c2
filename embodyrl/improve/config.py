"""Settings of ``embodyrl improve``, and what it refuses before anything moves."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from embodyrl.data.lerobot_write import NO_LEROBOT
from embodyrl.errors import MissingDependencyError, UserError, did_you_mean
from embodyrl.improve.learn import METHODS, learner_config
from embodyrl.improve.scripted_helper import HelperConfig
from embodyrl.policies.chooser import ChooserConfig
from embodyrl.ranges import Choice, Count, NotNegative, Range, Seed, check_config
from embodyrl.real_robot.connect_robot import check_robot
from embodyrl.real_robot.control.executor import MODES
from embodyrl.real_robot.record.teleop import LEROBOT, TELEOPS
from embodyrl.real_robot.resets.options import (
    NO_RESET,
    OPTION_NAMES,
    ResetOptions,
    check_options,
)
from embodyrl.real_robot.twin.config import twin_config
from embodyrl.storage import checkpoint
from embodyrl.storage.config_section import build_section
from embodyrl.storage.paths import machine_setting, path_setting
from embodyrl.storage.preset_files import apply_overrides

WATCHES = ("float", "nearest", "stac", "clock")
"""Kinds of detectors that are fitted anew in each round."""
MAY_CHANGE = (
    *("out", "address", "page", "robot_file", "latency", "helper", "scripted", "seconds"),
    *("rounds", "episodes", "person_seconds", "look", "detector", "false_alarms", "resets"),
)
"""Settings that may differ when a folder goes on."""
_ROBOT = ("env", "policy")
_LEARNER = ("algorithm", "data", "run")


@dataclass(frozen=True)
class ImproveConfig:
    """Settings of ``run_rounds``.

    Attributes:
        policy: the checkpoint or run to be improved.
        out: folder of everything.
        robot: see ``connect_robot.ROBOTS``.
        address: of the rosbridge server, or of the arm.
        robot_file: its topics and its workspace.
        prompt: instruction for the policy, where no topic gives one.
        deployed: overrides of the policy's config where it acts (``env.`` and ``policy.``).
        helper: who helps, and with what: see ``record.teleop.TELEOPS``.
        scripted: what a scripted helper is like.
        page: port of the person's page; 0 takes a free one.
        method: how it learns, one of ``learn.METHODS``.
        learner: overrides of that (``policy.``, ``algorithm.``, ``data.`` and ``run.``).
        demos: data sets that it learns from beside the rounds' own.
        rounds: how many.
        episodes: helped ones in a round.
        person_seconds: a round's helped episodes end once a person has spent so many; 0 for no
            bound.
        look: unaided episodes of each of two policies that decide which is served next.
        detector: kind of failure detector that asks for the person; empty for none.
        false_alarms: share of successes about which it may ask.
        speed: share of the trained control rate.
        mode: of execution, see ``control.executor``.
        latency: s of simulated time per inference; below 0 as long as it really took.
        seconds: that a person has at least from a takeover on.
        resets: who brings the scene back between episodes, and whether the policy practises two
            tasks in turn.
        seed: of everything.
    """

    policy: str = path_setting()
    out: str = "runs/improve"
    robot: str = "twin"
    address: str = machine_setting("")
    robot_file: str = machine_setting("")
    prompt: str = ""
    deployed: tuple[str, ...] = ()
    helper: str = "page"
    scripted: HelperConfig = field(default_factory=HelperConfig)
    page: Annotated[int, Range(0, 65535)] = machine_setting(0)
    method: Annotated[str, Choice(*METHODS)] = "imitate"
    learner: tuple[str, ...] = ()
    demos: tuple[str, ...] = path_setting(())
    rounds: Count = 3
    episodes: Count = 20
    person_seconds: NotNegative = 0.0
    look: Count = 20
    detector: str = ""
    false_alarms: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    speed: Annotated[float, Range(0, 1, open_low=True)] = 0.25
    mode: Annotated[str, Choice(*MODES)] = "rtc"
    latency: float = -1.0
    seconds: Annotated[float, Range(0, 3600, open_low=True)] = 60.0
    resets: ResetOptions = NO_RESET
    seed: Seed = 0

    @property
    def tries(self) -> int:
        """The most helped episodes of a round: with a bound on the person's time, many."""
        return 10 * self.episodes if self.person_seconds else self.episodes


def read_improve(overrides: Sequence[str], **given: Any) -> ImproveConfig:
    """The settings of a command, checked.

    Args:
        overrides: ``env.`` where the policy acts; ``policy.`` there and of the learner;
            ``algorithm.``, ``data.``, ``run.`` of the learner; ``helper.`` of a scripted helper.
        given: fields of ``ImproveConfig``.

    Raises:
        UserError: something that cannot be, before anything moves.
    """
    _check_names(given)
    sections = {"helper", *_ROBOT, *_LEARNER}
    # Each override belongs to one of them.
    for word in overrides:
        section = word.partition("=")[0].partition(".")[0]
        if "=" not in word or section not in sections:
            raise UserError(
                f"{word} is no setting of embodyrl improve: write SECTION.key=value with one of "
                f"the sections {', '.join(sorted(sections))}. {did_you_mean(section, sections)}"
            )
    of = lambda *names: tuple(o for o in overrides if o.partition(".")[0] in names)  # noqa: E731
    person = of("helper")
    if person and given["helper"] != "scripted":
        raise UserError(
            f"{person[0]} says what a scripted person is like, and --helper is "
            f"{given['helper']}. Leave it out, or give --helper scripted."
        )
    scripted = build_section(
        "helper", HelperConfig, apply_overrides({}, person).get("helper") or {}
    )
    # A chooser is learned in the rounds: the first policy need not have one.
    chooser = {f"policy.{f.name}" for f in fields(ChooserConfig)}
    deployed = tuple(o for o in of(*_ROBOT) if o.partition("=")[0] not in chooser)
    learner = of("policy", *_LEARNER)
    config = ImproveConfig(**given, scripted=scripted, deployed=deployed, learner=learner)
    check_config("improve", config)
    _check(config)
    return config


def _check_names(given: dict[str, Any]) -> None:
    """Refuses a robot or a helper that there is not, and what the robot does not read.

    Raises:
        UserError: with the nearest name.
    """
    helper = given["helper"]
    if helper not in TELEOPS and not helper.startswith(("/", LEROBOT)):
        raise UserError(f"There is no --helper {helper!r}. {did_you_mean(helper, TELEOPS)}")
    # The twin reads the file for a leader alone.
    leads = given["robot"] == "twin" and helper.startswith(("leader", LEROBOT))
    file = "" if leads else given["robot_file"]
    check_robot(given["robot"], address=given["address"], robot_file=file, prompt=given["prompt"])


def _check(c: ImproveConfig) -> None:
    """Refuses what could not be carried out.

    Raises:
        UserError: naming it.
    """
    if c.policy.startswith("ws://"):
        raise UserError(
            f"{c.policy} serves a policy, and to improve it its weights are needed: give the "
            "checkpoint, or the run's folder."
        )
    if c.helper == "scripted" and c.robot != "twin":
        raise UserError(
            "--helper scripted reads the simulator's state, so it works with --robot twin alone. "
            "Beside a real arm there must be a person."
        )
    if c.detector and c.detector not in WATCHES:
        raise UserError(
            f"There is no detector {c.detector!r} that is fitted in rounds. "
            f"{did_you_mean(c.detector, WATCHES)}"
        )
    if not c.detector and c.false_alarms != ImproveConfig.false_alarms:
        raise UserError(
            f"--false-alarms {c.false_alarms:g} is of a detector, and there is none: give "
            f"--detector ({', '.join(WATCHES)}), or leave it out."
        )
    if c.robot != "twin" and c.latency >= 0:
        raise UserError("--latency is simulated time; a real robot has its own.")
    if importlib.util.find_spec("lerobot") is None:
        raise MissingDependencyError(NO_LEROBOT)
    check_options(c.resets, OPTION_NAMES)
    # The policy, what it learns from, and how.
    checkpoint.find(c.policy)
    for path in c.demos:
        if not Path(path).exists():
            raise UserError(f"There is no data set {path} (--demos).")
    if c.robot == "twin":
        twin_config(c.policy, c.deployed)
    learner_config(c.policy, c.method, c.learner, [], Path(c.out), c.seed)
