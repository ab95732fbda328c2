"""The whole way from policy to simulated arm: success, faults, and what the log says of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodyrl.real_robot.control import actions, kinematics, limits
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.episode import RobotEpisode
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import VirtualInference
from embodyrl.real_robot.control.joint_tracking import Stopper
from embodyrl.real_robot.control.messages import Command, Mode, RobotState
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.ticker import INTERRUPTED, drive
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.policy_link.real_time_chunking import (
    GUIDED_STEPS,
    rtc_weights,
    sample_guided,
)
from embodyrl.real_robot.policy_link.server import PolicyServer
from embodyrl.real_robot.ros.robot import stop_points
from embodyrl.real_robot.twin.mujoco_twin import BOX, MujocoTwin
from embodyrl.sims.mujoco import env as mujoco_env

H, HZ = 8, 25.0
SPACE = SPACES["mujoco", "ee_delta_pos"]


@pytest.fixture(scope="module")
def twin() -> Iterator[MujocoTwin]:
    twin = MujocoTwin(mujoco_env.MujocoConfig(task="reach", renderer="none", cameras=()))
    yield twin
    twin.close()


def reach(observation: dict[str, Any]) -> dict[str, Any]:
    """Goes straight to the ball, whose place is in the privileged part of the proprio."""
    seen = observation["proprio"]
    start, goal = seen[3:6], seen[:3] + seen[25:28]
    chunk = np.zeros((H, 4), np.float32)
    for k in range(H):
        chunk[k, :3] = np.clip((goal - start) / SPACE.metres, -0.5, 0.5)
        start = start + SPACE.metres * chunk[k, :3]
    return {"actions": chunk}


class Trial:
    """An episode of the reach task with a fault in it.

    Attributes:
        asked: requests so far.
    """

    def __init__(
        self,
        twin: MujocoTwin,
        folder: Path,
        mode: str = "naive",
        latency: float = 0.1,
        **config: Any,
    ) -> None:
        self.twin, self.asked, self.path = twin, 0, folder / "run.mcap"
        self.policy: Callable[[dict[str, Any]], dict[str, Any]] = reach
        self.latency: Callable[[int], float] = lambda asked: latency
        safety = SafetyConfig(**BOX, robot="panda", max_force=None, **config)  # type: ignore[arg-type]
        self.guard = SafetyFilter(safety)
        self.executor = Executor(
            ExecutorConfig(H, 4, HZ, mode),
            VirtualInference(self.infer, lambda _: self.latency(self.asked)),
            lambda now, text: self.log.event(now, "problem", text),
        )

    def infer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        return self.policy(
            {k: v for k, v in request.items() if k not in ("previous", "delay", "execute")}
        )

    def run(self, init: int = 0, **options: Any) -> RobotEpisode:
        self.twin.reflex = ""
        self.twin.begin(init)
        decoder = DeltaDecoder(SPACE, HZ, **BOX)
        self.log = RunLog(self.path, {"test": True}, self.twin.now())
        try:
            return drive(
                self.twin,
                self.twin,
                self.guard,
                self.executor,
                decoder,
                self.log,
                seconds=4.0,
                **options,
            )
        finally:
            self.log.close()
            self.messages = read(self.path)

    @property
    def texts(self) -> str:
        return " | ".join(m["text"] for m in self.messages["/event"])


@pytest.mark.parametrize(
    ("mode", "latency"), [("sync", 0.2), ("naive", 0.1), ("ensemble", 0.1), ("rtc", 0.2)]
)
def test_the_task_is_solved_through_the_filter(
    twin: MujocoTwin, tmp_path: Path, mode: str, latency: float
) -> None:
    for init in (0, 1):
        episode = Trial(twin, tmp_path, mode, latency, max_target_age=0.3).run(init)
        assert episode.solved and episode.mode == Mode.HOLD and max(episode.peak.values()) <= 1.0, (
            episode
        )


def test_the_log_holds_what_happened(twin: MujocoTwin, tmp_path: Path) -> None:
    trial = Trial(twin, tmp_path)
    episode = trial.run()
    commands, states = trial.messages["/command"], trial.messages["/state"]
    assert len(commands) == len(states) > 20 and commands[-1]["mode"] == "hold"
    np.testing.assert_allclose(commands[-1]["q"], states[-1]["q"], atol=0.05)
    assert np.diff([c["stamp"] for c in commands]) == pytest.approx(0.01, abs=1e-5)
    assert "hold -> run: told to run" in trial.texts and "run -> hold: solved" in trial.texts
    assert trial.messages["/run"][0]["settings"] == {"test": True}
    assert len(trial.messages["/action"]) == pytest.approx(episode.seconds * HZ, abs=4)


def gone(trial: Trial) -> None:
    def fail(observation: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionError("gone")

    trial.policy = fail


def nan(trial: Trial) -> None:
    trial.policy = lambda o: {"actions": np.full((H, 4), np.nan, np.float32)}


def shape(trial: Trial) -> None:
    trial.policy = lambda o: {"actions": np.zeros((H, 3), np.float32)}


def horizon(trial: Trial) -> None:
    trial.policy = lambda o: {"actions": np.zeros((H + 1, 4), np.float32)}


def hang(trial: Trial) -> None:
    trial.latency = lambda asked: 1e9


def spike(trial: Trial) -> None:
    trial.latency = lambda asked: 1.0


def reflex(trial: Trial) -> None:
    trial.twin.reflex = "cartesian_reflex"


@pytest.mark.parametrize(
    ("fault", "mode", "told"),
    [
        (gone, Mode.HOLD, "inference failed: gone"),
        (nan, Mode.HOLD, "not finite"),
        (shape, Mode.HOLD, "of shape (8, 3), not (8, 4)"),
        (horizon, Mode.HOLD, "of shape (9, 4), not (8, 4)"),
        (hang, Mode.HOLD, "stale: no fresh target"),
        (spike, Mode.HOLD, "stale: no fresh target"),
        (reflex, Mode.FAULT, "reflex: cartesian_reflex"),
    ],
)
def test_a_fault_in_mid_run_ends_at_rest_and_in_the_log(
    twin: MujocoTwin, tmp_path: Path, fault: Callable[[Trial], None], mode: Mode, told: str
) -> None:
    trial = Trial(twin, tmp_path)
    # A target that is never reached, so that the arm is moving when it happens.
    far = np.tile(np.array([0.1, 0.35, 0.2, 1.0], np.float32), (H, 1))

    def policy(observation: dict[str, Any]) -> dict[str, Any]:
        if trial.asked == 2:
            fault(trial)
        return {"actions": far}

    trial.policy = policy
    episode = trial.run()
    assert (episode.mode, episode.solved) == (mode, False), episode
    assert episode.ended_by == "fault"  # it says nothing about the policy
    assert told in trial.texts and max(episode.peak.values()) <= 1.0
    commands = trial.messages["/command"]
    moving = [max(map(abs, c["dq"])) > 1e-6 for c in commands]
    stopping = [c["mode"] != "run" for c in commands]
    assert max(max(map(abs, c["dq"])) for c in commands) > 0.2
    assert (
        0 < sum(m and s for m, s in zip(moving, stopping, strict=True)) * 0.01 < 0.3
    )  # time to stop
    assert not moving[-1]


def test_a_spike_goes_on_by_itself_if_told_so(twin: MujocoTwin, tmp_path: Path) -> None:
    trial = Trial(twin, tmp_path, resume="fresh_target")
    trial.latency = lambda asked: 1.0 if asked == 3 else 0.1
    episode = trial.run(3)
    assert (
        episode.solved
        and "hold -> run: fresh target" in trial.texts
        and max(episode.peak.values()) <= 1.0
    )


def test_a_cold_start_waits_at_rest_and_a_dead_policy_is_given_up(
    twin: MujocoTwin, tmp_path: Path
) -> None:
    trial = Trial(twin, tmp_path)
    trial.latency = lambda asked: 2.0 if asked == 1 else 0.1
    episode = trial.run()
    assert episode.solved and not any(any(c["dq"]) for c in trial.messages["/command"][:200])
    dead = Trial(twin, tmp_path)
    gone(dead)
    episode = dead.run(first_wait=1.0)
    assert (episode.mode, episode.reason) == (Mode.HOLD, "the policy sent no first chunk in time")
    assert episode.ended_by == "fault"


def test_a_dry_run_moves_nothing(twin: MujocoTwin, tmp_path: Path) -> None:
    sent: list[Command] = []

    class Watched(MujocoTwin):
        def send(self, command: Command, tick: float = 0.01) -> None:
            sent.append(command)

    watched = Watched(twin.config)
    trial = Trial(watched, tmp_path)
    episode = trial.run(dry_run=True)
    watched.close()
    assert not sent and not episode.solved
    assert (
        np.ptp([c["q"] for c in trial.messages["/command"]], axis=0).max() > 0.05
    )  # what would have been sent


def test_through_a_real_server(twin: MujocoTwin, tmp_path: Path) -> None:
    metadata = {"cameras": {}, "proprio_dim": twin.spec.proprio_dim, "horizon": H, "action_dim": 4}
    server = PolicyServer(reach, metadata, port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = PolicyClient(f"127.0.0.1:{server.port}")
    trial = Trial(twin, tmp_path)
    trial.policy = client.infer
    try:
        assert trial.run().solved
    finally:
        client.close()
        server.close()
        thread.join(timeout=10)


class Person:
    """Beside the arm, and says a word at each time of a plan."""

    def __init__(self, twin: MujocoTwin, plan: dict[float, str]) -> None:
        self.twin, self.plan = twin, plan
        self.shown: list[tuple[str, str]] = []

    def wishes(self) -> list[str]:
        due = [t for t in self.plan if t <= self.twin.now()]
        return [self.plan.pop(t) for t in due]

    def alive(self, now: float) -> bool:
        return True

    def action(self, dims: int) -> np.ndarray:
        return np.zeros(dims, np.float32)

    def show(self, status: dict[str, Any], images: dict[str, Any]) -> None:
        self.shown.append((status["mode"], status["reason"]))


def forwards(observation: dict[str, Any]) -> dict[str, Any]:
    return {"actions": np.tile(np.array([0.25, 0.1, 0.0, 1.0], np.float32), (H, 1))}


def test_a_person_has_the_arm_go_back_the_way_it_came(twin: MujocoTwin, tmp_path: Path) -> None:
    trial = Trial(twin, tmp_path)
    trial.policy = forwards
    episode = trial.run(
        operator=Person(twin, {1.2: "rewind", 2.4: "hold", 2.7: "rewind", 9.0: "failure"})
    )
    assert episode.reason == "a person said failure" and max(episode.peak.values()) <= 1.0
    assert episode.seconds < 1.5  # going back and waiting is not the policy's time
    times = np.array([m["stamp"] for m in trial.messages["/command"]])
    hand = np.array([kinematics.tip(m["q"]) for m in trial.messages["/command"]])
    times -= times[0]
    there, half, back = (hand[np.searchsorted(times, t)] for t in (1.2, 2.6, 8.5))
    assert there[0] > hand[0, 0] + 0.08 and hand[0, 0] + 0.02 < half[0] < there[0] - 0.02
    assert np.linalg.norm(back - hand[0]) < 0.02
    way = hand[times < 1.3]
    assert (
        max(np.linalg.norm(way - p, axis=1).min() for p in hand[times > 1.3]) < 0.02
    )  # it had to brake first
    assert trial.texts.count("human -> hold: gone back to the beginning") == 1


def test_the_policys_side_asks_for_a_person(twin: MujocoTwin, tmp_path: Path) -> None:
    def policy(observation: dict[str, Any]) -> dict[str, Any]:
        said = {"ask": "the hand is empty"} if trial.asked == 3 else {}
        return forwards(observation) | said

    trial = Trial(twin, tmp_path)
    trial.policy = policy
    episode = trial.run()
    told = "the policy's side asks for a person: the hand is empty"
    assert (episode.mode, episode.reason) == (Mode.HOLD, told) and episode.seconds < 2.0
    assert episode.ended_by == "policy"
    trial = Trial(twin, tmp_path)
    trial.policy = policy
    person = Person(twin, {2.5: "takeover", 3.0: "hold", 3.2: "run", 3.8: "success"})
    episode = trial.run(operator=person)
    assert episode.solved and episode.human > 3 and ("hold", told) in person.shown
    assert episode.ended_by == "person"  # who solved part of it
    assert [str(e.after) for e in episode.events][1:6] == ["run", "hold", "human", "hold", "run"]


@pytest.mark.parametrize(
    ("plan", "by", "solved"),
    [
        ({1.5: "success"}, "policy", True),
        ({1.5: "failure"}, "policy", False),
        ({1.5: "hold", 2.0: "failure"}, "policy", False),
        ({1.5: "estop", 2.0: "failure"}, "person", False),
        ({1.5: "takeover", 2.0: "failure"}, "person", False),
    ],
)
def test_a_label_counts_and_a_persons_own_way_does_not(
    twin: MujocoTwin, tmp_path: Path, plan: dict[float, str], by: str, solved: bool
) -> None:
    trial = Trial(twin, tmp_path)
    trial.policy = forwards
    episode = trial.run(operator=Person(twin, plan))
    assert (episode.ended_by, episode.solved) == (by, solved), episode
    assert trial.messages["/episode"][-1]["ended_by"] == by


@pytest.mark.parametrize("first", ["estop", "reflex"])
def test_ctrl_c_ends_the_program_also_after_a_stop_or_a_fault(
    twin: MujocoTwin, tmp_path: Path, first: str
) -> None:
    trial = Trial(twin, tmp_path)
    trial.policy = forwards

    class Stopped(Person):
        def show(self, status: dict[str, Any], images: dict[str, Any]) -> None:
            super().show(status, images)
            if first == "reflex" and twin.now() > 1.5:
                twin.reflex = "cartesian_reflex"
            if twin.now() > 2.5:
                trial.guard.estop(INTERRUPTED)  # as the signal's handler does

    person = Stopped(twin, {9.0: "failure"} | ({1.5: "estop"} if first == "estop" else {}))
    episode = trial.run(operator=person)
    twin.reflex = ""
    assert (episode.mode, episode.reason) == (Mode.ESTOP, INTERRUPTED), episode
    assert episode.ended_by == "person" and twin.now() < 3.0


def test_an_answer_that_comes_after_a_takeover_is_not_obeyed(
    twin: MujocoTwin, tmp_path: Path
) -> None:
    """A person takes over during inference; the late chunk would throw the arm the other way."""

    def policy(observation: dict[str, Any]) -> dict[str, Any]:
        chunk = forwards(observation)
        return {"actions": -4.0 * chunk["actions"]} if trial.asked == 3 else chunk

    trial = Trial(twin, tmp_path)
    trial.policy, trial.latency = policy, lambda asked: 0.6 if asked == 3 else 0.05
    person = Person(twin, {0.5: "takeover", 0.7: "hold", 0.75: "run", 2.5: "failure"})
    episode = trial.run(operator=person)
    assert max(episode.peak.values()) <= 1.0 and episode.human > 1
    assert [str(e.after) for e in episode.events][1:5] == ["run", "human", "hold", "run"]
    taken = [m["action"] for m in trial.messages["/action"] if not m["human"]]
    assert len(taken) > 10 and all(action[0] == 0.25 for action in taken)


def test_poses_and_proprio_are_those_of_the_env(twin: MujocoTwin) -> None:
    assert SPACE.metres == mujoco_env.POS_SCALE and SPACE.max_lead == mujoco_env.MAX_LEAD
    assert SPACES["mujoco", "ee_delta_pose"].radians == mujoco_env.ROT_SCALE
    assert {mode: space.dims for (_, mode), space in SPACES.items()} == mujoco_env.CONTROL_DIMS
    twin.begin(0)
    decoder = DeltaDecoder(SPACE, HZ, **BOX)
    decoder.start(0.0, twin.state())
    for k in range(20):  # the same actions in the env, and decoded
        decoder.act(0.04 * k, np.array([0.5, -0.3, 0.1, 1.0], np.float32), twin.state())
        twin.sleep_until(twin.now() + 0.04)
        seen = twin.observe(decoder)["proprio"]
        np.testing.assert_allclose(
            actions.proprio(SPACE, twin.state(), decoder), seen[:7], atol=1e-5
        )


def test_decoder_leads_the_hand_by_no_more_than_in_the_env() -> None:
    decoder = DeltaDecoder(SPACE, HZ, **BOX)
    state = RobotState(0.0, kinematics.HOME, np.zeros(7), 0.08)
    decoder.start(0.0, state)
    for k in range(30):
        decoder.act(0.04 * k, np.array([1.0, 1.0, 0.0, -1.0], np.float32), state)
    lead = decoder.position - np.array(kinematics.tip(kinematics.HOME.tolist()))
    np.testing.assert_allclose(lead, [0.08, 0.08, 0.0], atol=1e-9)
    half = decoder.target(0.04 * 29 + 0.02, fresh=False)
    assert half.stamp == 0.0 and half.width == 0.0
    turning = DeltaDecoder(SPACES["mujoco", "ee_delta_pose"], HZ, **BOX)
    turning.start(0.0, state)
    turning.act(0.0, np.array([0, 0, 0, 0, 0, 1.0, 1.0], np.float32), state)
    assert kinematics.rotation_vector(turning.rotation @ kinematics.DOWN.T)[2] == pytest.approx(
        0.15, abs=1e-6
    )


def test_rtc_weights_are_those_of_the_paper() -> None:
    weights = rtc_weights(horizon=10, delay=3, execute=4)
    assert (weights[:3] == 1).all() and (weights[6:] == 0).all()
    c = (6 - 4) / (10 - 4 - 3 + 1)
    assert weights[4] == pytest.approx(c * math.expm1(c) / (math.e - 1))
    assert (weights.diff() <= 0).all()


@pytest.mark.parametrize("steps", [4, 10])
def test_rtc_continues_the_previous_chunk_where_naive_jumps(steps: int) -> None:
    """An untrained flow policy is as multimodal as can be: each noise leads elsewhere."""
    from embodyrl.policies.flow_vla import FlowVLA, FlowVLAConfig
    from embodyrl.types import EnvSpec, Obs

    spec = EnvSpec("mujoco/reach", 1, 4, 7, "ee_delta_pos", 25.0, 25, {}, privileged_dim=3)
    torch.manual_seed(0)
    policy = FlowVLA(FlowVLAConfig(horizon=8, action_patch=4, num_denoise_steps=steps), spec).eval()
    obs = Obs({}, torch.zeros(16, 7), ["go"] * 16)
    generator = torch.Generator().manual_seed(0)
    previous = policy.sample(obs, generator=generator, mode="eval").actions * 0.8
    other = policy.sample(obs, generator=generator, mode="eval").actions
    guided = sample_guided(policy, obs, previous, rtc_weights(8, 3, 2), generator)[:, 0]
    assert guided.shape == previous.shape and guided.abs().max() <= 1.0
    naive, rtc = ((x - previous)[:, 2:4].abs().mean() for x in (other, guided))
    assert rtc < 0.05 * naive, (rtc, naive)
    if steps < GUIDED_STEPS:
        return
    free = sample_guided(policy, obs, previous, torch.zeros(8), torch.Generator().manual_seed(5))
    plain = policy.sample(obs, generator=torch.Generator().manual_seed(5), mode="eval").actions
    torch.testing.assert_close(free[:, 0], plain)  # without weights it is the policy's own sampler


def test_the_robots_side_imports_no_torch() -> None:
    import subprocess
    import sys

    rooms = ("control", "operator", "ros", "libfranka", "policy_link.server", "policy_link.client")
    modules = [f"embodyrl.real_robot.{room}" for room in (*rooms, "logs.mcap_log", "cli")]
    modules += [
        f"embodyrl.real_robot.control.{name}" for name in ("ticker", "step_driver", "preflight")
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_arm_that_hears_no_more_brakes_along_the_stop_it_was_sent(twin: MujocoTwin) -> None:
    """As ``ros.robot`` sends it: it brakes far less hard than an arm that keeps its last place."""
    safe = limits.PANDA.inside()
    peaks = []
    for with_stop in (True, False):
        twin.begin(0)
        guard, decoder = (
            SafetyFilter(SafetyConfig(**BOX, robot="panda", max_force=None)),
            DeltaDecoder(SPACE, HZ, **BOX),
        )  # type: ignore[arg-type]
        guard.start(0.0, twin.state())
        decoder.start(0.0, twin.state())
        guard.run(0.0)
        for k in range(40):
            now, state = twin.now(), twin.state()
            if k % 4 == 0:
                decoder.act(now, np.array([0.0, 0.6, 0.0, 1.0], np.float32), state)
            command = guard.tick(now, state, decoder.target(now, True))
            times, q, dq = stop_points(Stopper(safe), command, 0.01)
            twin.follow(times, q, dq) if with_stop else twin.send(command)
            twin.sleep_until(now + 0.01)
        speeds = []
        for _ in range(100):
            speeds.append(twin.state().dq)
            twin.sleep_until(twin.now() + 0.005)
        assert np.abs(speeds[0]).max() > 0.8 and np.abs(speeds[-1]).max() < 0.01
        peaks.append(np.abs(np.diff(speeds, axis=0)).max() / 0.005)
    assert peaks[0] < 0.3 * peaks[1], peaks


def test_state_of_the_twin_is_a_copy(twin: MujocoTwin) -> None:
    twin.begin(0)
    state = twin.state()
    before = state.q.copy()
    twin.sleep_until(twin.now() + 0.1)
    np.testing.assert_array_equal(state.q, before)
