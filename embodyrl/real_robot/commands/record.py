"""``embodyrl record``: a person demonstrates on a robot, and a LeRobotDataset comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from embodyrl.data.collect import shuffled_states
from embodyrl.data.lerobot_write import require_free, require_recordable
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.real_robot.commands.signals import interrupt_is_estop
from embodyrl.real_robot.connect_robot import ConnectedRobot, check_robot
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.any_safety import Decoder, decoder_for
from embodyrl.real_robot.control.episode import RobotEpisode
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import Answer, Inference, Request
from embodyrl.real_robot.control.preflight import print_checks, robot_checks
from embodyrl.real_robot.control.robot import HasDevices
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import INTERRUPTED, drive
from embodyrl.real_robot.logs.export import export_logs
from embodyrl.real_robot.policy_link.metadata import policy_facts
from embodyrl.real_robot.record.clear_scene import go_home, wait_for_rest
from embodyrl.real_robot.record.connect import connect_robot_for, scene_of
from embodyrl.real_robot.record.episode_logs import (
    EpisodeLogs,
    episode_bytes,
    logs_folder,
    require_room,
    size_in_words,
)
from embodyrl.real_robot.record.recorder import Progress, Recorder
from embodyrl.real_robot.record.teleop import LEROBOT, Teleop, open_teleop
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.storage.folder_lock import locked
from embodyrl.storage.paths import settings_of
from embodyrl.types import EnvSpec

MOST_TRIES = 10
"""Episodes per one that is wanted after which a scripted session gives up."""


class _NoPolicy(Inference):
    """Nobody but the person acts in a session."""

    def submit(self, request: Request, now: float) -> None:
        """See ``Inference``; nobody answers."""

    def poll(self, now: float) -> Answer | None:
        """See ``Inference``."""
        return None

    def close(self) -> None:
        """See ``Inference``."""


@dataclass
class _Session:
    """What all episodes of a session have in common.

    Attributes:
        connected: the robot.
        teleop: the person's device.
        logs: of the episodes so far.
        spec: of the env that the data are for.
        settings: of every episode.
        wanted: number of episodes.
        keep_failures: whether failed ones count.
        speed: share of the control rate of training at which actions are carried out.
        seconds: longest episode, in the arm's time.
        home: (3,) m, where the hand goes between episodes that a person arranges.
    """

    connected: ConnectedRobot
    teleop: Teleop
    logs: EpisodeLogs
    spec: EnvSpec
    settings: dict[str, Any]
    wanted: int
    keep_failures: bool
    speed: float
    seconds: float
    home: tuple[float, float, float]

    @property
    def done(self) -> int:
        """Episodes that count."""
        return sum(kept.solved or self.keep_failures for kept in self.logs.kept)

    @property
    def rate(self) -> float:
        """Actions per second of the arm's time."""
        return self.spec.control_hz * self.speed

    @property
    def largest(self) -> float:
        """Bytes of an episode that takes all its time."""
        frames = self.seconds * self.rate
        tick = self.connected.safety.tick
        robot = self.connected.robot
        cameras = robot.cameras() if isinstance(robot, HasDevices) else {}
        depth = [name for name, camera in cameras.items() if camera.has_depth]
        return episode_bytes(self.spec.cameras, frames, self.seconds, tick, depth)

    @property
    def expected(self) -> float:
        """Bytes of the next episode: the mean so far, or those of the largest."""
        kept = self.logs.kept
        return sum(one.size for one in kept) / len(kept) if kept else self.largest

    def progress(self) -> Progress:
        """What the person is shown besides the state of the arm."""
        free = self.logs.free()
        room = f"{size_in_words(free)} left, for about {int(free // self.expected)} episodes"
        return Progress(f"{self.done + 1} of {self.wanted}", room)


def record_demonstrations(
    config: EnvConfig,
    out: str,
    *,
    robot: str = "twin",
    address: str = "",
    robot_file: str = "",
    teleop: str = "page",
    task: str = "",
    episodes: int = 50,
    seconds: float = 60.0,
    speed: float = 0.25,
    keep_failures: bool = False,
    page: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Records demonstrations by teleoperation into a LeRobotDataset v3.

    Every episode is on the disk (``OUT.logs``) as soon as it has its label. However a session
    ended, the same call goes on from there. When there are enough, the data set is made of the
    logs, which stay.

    Args:
        config: of the env that the data are for: its cameras, its actions, and for the twin its
            task.
        out: the data set's folder.
        robot: see ``connect_robot.ROBOTS``.
        address: of the rosbridge server, or of the arm.
        robot_file: its topics, its workspace and its leader arm.
        teleop: what the person moves it with, see ``record.teleop``.
        task: the instruction, where neither a topic nor the twin gives one.
        episodes: how many are wanted, with those that are there.
        seconds: longest episode, in the arm's time without pauses.
        speed: share of the control rate at which the arm moves.
        keep_failures: whether failed episodes count, and belong into the data set.
        page: port of the page; 0 takes a free one.
        seed: of the order of the twin's initial states.

    Returns:
        What ``export_logs`` returns, with ``logs``, their folder; without the numbers of the data
        set where the session was ended before it was complete, but with ``recorded`` and
        ``stopped``.

    Raises:
        UserError: a setting that cannot be, a robot that is not ready, or a disk that is too small.
    """
    # Refuse what cannot be, before anything is opened.
    # The twin reads the file for a leader alone.
    leads = teleop.startswith(("leader", LEROBOT))
    file = "" if robot == "twin" and leads else robot_file
    check_robot(robot, address=address, robot_file=file)
    for name, value, most in (("speed", speed, 1.0), ("seconds", seconds, 3600.0)):
        if not 0.0 < value <= most:
            raise UserError(f"--{name} is {value:g}; it must be above 0 and at most {most:g}.")
    if episodes < 1:
        raise UserError("--episodes must be at least 1.")
    _require_more(out)
    require_free(out)
    with ExitStack() as opened:
        # 1. One process at a time, from the first look at the logs to the last byte.
        opened.enter_context(locked(logs_folder(out)))
        connected, spec, home = connect_robot_for(opened, config, robot, address, robot_file, task)
        require_recordable(out, spec)
        facts = {"policy": policy_facts(spec), "robot": robot, "speed": speed}
        own = {k: v for k, v in asdict(config).items() if k not in settings_of(config, "machine")}
        logs = EpisodeLogs(out, {**facts, "env_config": own, "task": task})
        person = open_teleop(opened, teleop, connected, page, robot_file)
        settings = {**facts, "teleop": teleop, "split": config.split, "spec": spec_to_json(spec)}
        # A world model that learns from the data scores policies in this env: never on an arm.
        if robot == "twin":
            settings["env_config"] = asdict(scene_of(config))
        session = _Session(
            connected, person, logs, spec, settings, episodes, keep_failures, speed, seconds, home
        )
        # 2. Check everything before anything moves.
        left = max(0, episodes - session.done)
        require_room(logs.free(), session.expected, left, logs.folder)
        # 3. Record what is missing.
        if left:
            print(f"  {left} of {episodes} episodes to record; {session.progress().disk}.")
            connected.begin(0)
            _require_checks(session)
        try:
            stopped = not _record_all(session, _states(spec, robot, seed))
        except KeyboardInterrupt:
            stopped = True
        if stopped:
            return {"logs": str(logs.folder), "recorded": session.done, "stopped": True}
        # 4. Make the data set.
        print(f"  Writing {out} ...", flush=True)
        written = export_logs(logs.folder, out, keep_failures=keep_failures, most=episodes)
    return {**written, "logs": str(logs.folder), "recorded": session.done, "stopped": False}


def _require_more(out: str) -> None:
    """Refuses a session that is over: its data set is there.

    Raises:
        UserError: saying how to record more.
    """
    logs = logs_folder(out)
    if Path(out).exists() and logs.exists():
        raise UserError(
            f"{out} is written, from the episodes in {logs}. To record more, move {out} away and give "
            "the same command with more --episodes; or choose another --out."
        )


def _require_checks(session: _Session) -> None:
    """Runs the pre-flight check, and prints its table.

    Raises:
        UserError: something is wrong.
    """
    connected = session.connected
    checks = robot_checks(
        connected.robot, session.settings["policy"], connected.safety, session.rate, session.rate
    )
    print_checks(checks)
    if not all(check.ok for check in checks):
        raise UserError(
            "The pre-flight check failed, so nothing was moved. The lines marked FAILS say what "
            "is wrong."
        )
    if not connected.robot.prompt():
        raise UserError(
            "No topic of this robot says what its task is: give the instruction, such as --task "
            '"pick up the red block".'
        )


def _states(spec: EnvSpec, robot: str, seed: int) -> Iterator[int]:
    """The initial states in the order in which they are played."""
    return shuffled_states(spec, seed, repeat=True) if robot == "twin" else count()


def _record_all(session: _Session, states: Iterator[int]) -> bool:
    """Records until there are enough episodes; False if the person ended the session."""
    # Go on behind the initial states that were played.
    for _ in session.logs.kept:
        next(states)
    init = next(states)
    while session.done < session.wanted:
        # A disk that has become full since the start is noticed before the episode, not in it.
        require_room(session.logs.free(), session.largest, 1, session.logs.folder)
        number = session.done
        episode, frames = _record_one(session, init)
        if episode.reason == INTERRUPTED:
            session.logs.discard()
            print("  Stopped: the episode that was going on is not kept.", flush=True)
            return False
        # A log that could not be written ends the session, with the reason.
        if session.logs.failed:
            session.logs.finish(solved=False)
        # Not kept: the same initial state again.
        if not frames or episode.reason == "a person said discard":
            why = "discarded" if frames else "not one frame was recorded"
            session.logs.discard()
            print(f"  episode {number}: {why}; it begins again", flush=True)
            continue
        # Kept, whatever its label: it is data, and the person's time.
        kept = session.logs.finish(episode.solved)
        init = next(states)
        word = "kept" if episode.solved or session.keep_failures else "not counted"
        print(
            f"  episode {number}: {episode.reason}, {episode.seconds:.1f} s, {frames} frames; "
            f"{word} ({session.done} of {session.wanted}; {session.progress().disk}): {kept.path}",
            flush=True,
        )
        if not session.teleop.person and len(session.logs.kept) >= MOST_TRIES * session.wanted:
            raise UserError(
                f"Of {len(session.logs.kept)} scripted episodes {session.done} were solved; "
                f"{session.wanted} are out of reach. Give them more --seconds."
            )
    return True


def _record_one(session: _Session, init: int) -> tuple[RobotEpisode, int]:
    """One episode: its result, and how many frames were recorded. Its log stays open."""
    connected = session.connected
    safety = connected.safety
    robot = connected.robot
    logs = session.logs
    recorder = Recorder(session.teleop, robot, session.progress(), lambda: logs.failed)
    # 1. Clear the scene, and wait for the person, who arranges it. The commands of the episode before
    # have come to rest, and the arm follows them a moment later.
    if not connected.simulated:
        wait_for_rest(connected)
    decoder = _decoder(session)
    if not connected.arranges and logs.kept and isinstance(decoder, DeltaDecoder):
        go_home(connected, decoder, session.home, recorder)
    connected.person = recorder
    connected.begin(init)
    if session.teleop.person:
        arrange = "" if connected.arranges else "Arrange the scene. "
        number = f"episode {session.done + 1} of {session.wanted}"
        recorder.wait_for_start(f"{arrange}Press Start (t) to record {number}.")
    # 2. The control loop, in which the person has the arm from the first tick on.
    decoder = _decoder(session)
    guard = SafetyFilter(safety)
    described = {**session.settings, "init": init, "safety": asdict(safety), "record": True}
    log = logs.start(described, connected.clock.now(), safety.robot, safety.motors)
    no_policy = ExecutorConfig(1, session.spec.action_dim, session.rate, "sync")
    session.teleop.begin(decoder)
    with interrupt_is_estop(guard):
        episode = drive(
            robot, connected.clock, guard, Executor(no_policy, _NoPolicy()), decoder, log,
            seconds=session.seconds, operator=recorder, record=True,
        )  # fmt: skip
    return episode, episode.human


def _decoder(session: _Session) -> Decoder:
    return decoder_for(session.settings["policy"], session.rate, session.connected.safety)


def session_line(result: dict[str, Any], out: str) -> str:
    """What a session comes to, for its user."""
    if result["stopped"]:
        return (
            f"{result['recorded']} episodes are recorded, in {result['logs']}. The same command "
            "goes on."
        )
    return (
        f"Wrote {result['episodes']} episodes, {result['frames']} frames, to {out}; the logs stay "
        f"in {result['logs']}."
    )
