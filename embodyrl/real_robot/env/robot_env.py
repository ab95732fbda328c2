"""``RobotEnv``: a robot as a ``VecEnv`` with one env, so evaluation and learning run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick
from embodyrl.errors import UserError
from embodyrl.real_robot.commands.tokens import read_token
from embodyrl.real_robot.connect_robot import (
    ConnectedRobot,
    ask_at_terminal,
    libfranka_robot,
    ros_robot,
    simulated_robot,
)
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder, proprio_dim
from embodyrl.real_robot.control.clocks import PacedClock
from embodyrl.real_robot.control.episode import BROKEN_OFF, EndedBy
from embodyrl.real_robot.control.frozen_camera import FrozenCameraCheck
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.operator import HOLDS, LOST, WISHES, Operator
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.step_driver import StepDriver, patient_look
from embodyrl.real_robot.env.config import (
    RobotConfig,
    check_settings,
    reflector_judge,
    reset_options,
    robot_spec,
    task_config,
)
from embodyrl.real_robot.env.overdue import Overdue
from embodyrl.real_robot.env.reflector_judge import ReflectorJudge
from embodyrl.real_robot.logs.earlier_logs import next_number
from embodyrl.real_robot.logs.mcap_log import RunLog
from embodyrl.real_robot.operator.device_operator import open_operator
from embodyrl.real_robot.policy_link.metadata import policy_facts
from embodyrl.real_robot.record.clear_scene import go_home
from embodyrl.real_robot.resets.between import Between, SceneState
from embodyrl.real_robot.resets.open_resets import open_between
from embodyrl.types import Obs, Step

Judge = Callable[[dict[str, Any]], tuple[float, bool]]
"""What the policy sees (``Robot.observe``) -> reward, and whether the task is solved."""
WITHOUT_HELP = ("estop", "hold", LOST, "run")
"""What the person of an arm may ask for while its policy is evaluated, which nobody helps."""
_people: dict[tuple[str, str], Operator] = {}
"""(robot, address) -> the person at that arm's page, whose stop must reach its evaluation too."""
_active_env: dict[tuple[str, str], RobotEnv] = {}
"""(robot, address) -> the env that moves it: training and evaluation have one each, for one arm."""
_scenes: dict[tuple[str, str], SceneState] = {}
"""(robot, address) -> the scene before that arm."""


class RobotEnv(SteppedVecEnv):
    """One episode at a time, on a robot behind the safety filter.

    An action takes 1 / (control_hz * speed) s. Between chunks the arm is held, for as long as its
    owner needs. There is no privileged state: a critic must share what the policy sees.

    After a fault the chunk is masked, as for a simulator that broke. If the arm was driven against
    something, however, the episode is over and failed. In both cases ``reset`` asks for a person.
    It also does so where only a person can arrange the scene.

    A person who takes over moves the arm from the next action on. ``Step.human`` and ``Step.taken``
    then say what was executed. A person who lets go keeps the arm until the end of the chunk,
    because the rest of the policy's plan was made for another place.

    Args:
        config: settings.
        judge: gives reward and success after each action; by default the config's reflector, or
            else the robot's own success. A person's label overrides it: success is a reward of 1,
            failure of 0, and both end the episode.
        ask: called with a sentence when a person is needed; returns when it is done. By default it
            asks at the operator's page or the terminal.
        operator: who may take over; by default the page, if there is one.

    Raises:
        UserError: a setting that cannot be, or no such robot.
    """

    Config: ClassVar = RobotConfig
    supervised: ClassVar = True  # an error ends the run: an arm is not reset unasked

    def __init__(
        self,
        config: RobotConfig,
        judge: Judge | None = None,
        ask: Callable[[str], None] | None = None,
        operator: Operator | None = None,
    ) -> None:
        check_settings(config)
        if config.robot == "lerobot":
            raise UserError(
                "No algorithm plays on an arm of LeRobot's while it learns. Learn from what "
                "embodyrl record wrote, and improve the policy with embodyrl improve."
            )
        self.config = config
        self._space = SPACES["robot", config.control_mode]
        self._judge = judge or reflector_judge(config)
        self._ask = ask or ask_at_terminal
        self._arm_key = (config.robot, config.address)
        self._open = ExitStack()
        cameras = {name: (config.image_size, config.image_size) for name in config.cameras}
        self._connected = self._open.enter_context(self._connect(cameras))
        self._operator = operator
        if operator is None:
            self._open_operator(ask)
        # The episode: what drives the arm, the log, and what the policy last saw.
        self._driver: StepDriver | None = None
        self._log: RunLog | None = None
        self._seen: dict[str, Any] | None = None
        self._episodes = 0
        # An env that is opened again, such as that of an actor, goes on behind its logs.
        self._first_log = next_number(config.log, "episode") if config.log else 0
        self._overdue = Overdue(config)
        self._releasing = False  # the person lets go at the end of the chunk
        # A simulated robot tells its own proprio, which may hold more.
        task = getattr(self._connected.robot, "spec", None)
        dims = task.proprio_dim if task is not None else proprio_dim(self._space)
        super().__init__(robot_spec(config, dims), config)
        # Between the episodes.
        try:
            self.between = self._open_between()
        except UserError:
            self._open.close()
            raise

    def _connect(
        self, cameras: dict[str, tuple[int, int]]
    ) -> AbstractContextManager[ConnectedRobot]:
        config = self.config
        where = (config.address, config.robot_file, self._space, cameras, config.prompt)
        if config.robot == "twin":
            return simulated_robot(task_config(config))
        if config.robot == "libfranka":
            return libfranka_robot(*where, None if config.robot_file else task_config(config))
        return ros_robot(config.robot, *where)

    def _open_operator(self, ask: Callable[[str], None] | None) -> None:
        """Opens who the config says may take over: a scripted expert, or a person."""
        config = self.config
        connected = self._connected
        if config.corrector:
            # Imported here because the expert brings MuJoCo, which a real arm does not need.
            from embodyrl.real_robot.env.scripted_operator import ScriptedOperator

            self._operator = ScriptedOperator(
                self.twin, config.corrector, elapsed=lambda: self.elapsed, look=self.look
            )
        elif config.operator >= 0 or config.operator_page or config.hand:
            if connected.simulated:
                connected.clock = PacedClock(connected.clock)
            place = config.operator_page or (config.operator if config.operator >= 0 else None)
            token = read_token(config.operator_token)
            self._operator, page = open_operator(
                self._open, connected.clock, place, config.hand, token
            )
            self._ask = ask or (page.ask if page is not None else ask_at_terminal)
            if self._operator is not None:
                _people[self._arm_key] = self._operator

    def _open_between(self) -> Between:
        """What happens between the episodes: who makes the scene ready.

        There is one scene before an arm: the env that scores goes on where the one that trains left
        it.
        """
        config = self.config
        facts = policy_facts(self.spec)
        between = open_between(
            self._open,
            self._connected,
            reset_options(config),
            facts=facts,
            decoder=self._decoder,
            ask=self._ask_to_arrange,
            described={"config": asdict(config), "policy": facts},
            log=str(Path(config.log) / "resets") if config.log else "",
            record=config.record,
            # In an evaluation the person is at the page of the training.
            operator=self._operator or _people.get(self._arm_key),
            seed=config.seed,
        )
        if not self._connected.simulated:
            if self._arm_key not in _scenes:
                _scenes[self._arm_key] = between.state
                self._open.callback(_scenes.pop, self._arm_key)
            between.state = _scenes[self._arm_key]
        return between

    @property
    def twin(self) -> Any:
        """The simulated arm."""
        return self._connected.robot

    @property
    def elapsed(self) -> int:
        """Number of actions of the episode before this one."""
        return int(self._elapsed[0])

    # ---- Episodes.

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        connected = self._connected
        why = self._end_episode()
        if why and not connected.simulated:
            self._ask(f"The arm stopped: {why}. Look at it, mend the cause, and go on.")
        sentence = (
            f"Arrange the scene for episode {self._episodes + 1} (initial state {inits[0]}), "
            "and go on."
        )
        self._take_arm()
        self.between.prepare(inits[0], sentence, why)
        self._begin_episode(inits[0])
        self._episodes += 1
        self._seen = None

    def _take_arm(self) -> None:
        """Ends the episode of another env on this arm: there is one arm."""
        if not self._connected.simulated:
            if (other := _active_env.get(self._arm_key)) not in (None, self):
                other._end_episode()
            _active_env[self._arm_key] = self

    def _ask_to_arrange(self, sentence: str) -> None:
        """Clears the scene for a person, who then arranges it."""
        if self._episodes:
            go_home(self._connected, self._decoder(), self.config.home, self._operator)
        self._ask(sentence)

    def _decoder(self) -> DeltaDecoder:
        """Of the actions of an episode; fresh."""
        safety = self._connected.safety
        assert isinstance(safety, SafetyConfig)
        rate = self.config.control_hz * self.config.speed
        return DeltaDecoder(self._space, rate, safety.box_low, safety.box_high)

    def _begin_episode(self, init: int) -> None:
        connected = self._connected
        config = self.config
        safety = connected.safety
        assert isinstance(safety, SafetyConfig)
        if config.log:
            path = Path(config.log) / f"episode_{self._first_log + self._episodes:06d}.mcap"
            settings = {"init": init, "config": asdict(config), "policy": policy_facts(self.spec)}
            settings |= {"back": self.between.state.back, "asked": self.between.state.asked}
            self._log = RunLog(path, settings, connected.clock.now(), safety.robot)
        # The next action ends a hold that came because the owner took long to infer.
        guard = SafetyFilter(replace(safety, resume="fresh_target"))
        self._cameras = FrozenCameraCheck(connected.robot)
        self._driver = StepDriver(
            connected.robot,
            connected.clock,
            guard,
            self._decoder(),
            not connected.simulated,
            self._log,
        )
        if self.between.state.back and self.between.judge is not None:
            self.between.judge.begin()
        elif isinstance(self._judge, ReflectorJudge):
            self._judge.begin()
        self._overdue.begin()
        self._releasing = False
        # What counts unless the episode comes to an end.
        self._outcome = {"solved": False, "reason": BROKEN_OFF, "ended_by": str(EndedBy.PERSON)}
        self._person_moved = False
        self._driver.start()
        # Where nothing puts the arm back, the hand would lean more from episode to episode: actions
        # of four dimensions cannot turn it.
        if self._space.dims == 4 and self.between.state.counts.resets:
            self._driver.decoder.rotation = kinematics.DOWN

    def _end_episode(self) -> str:
        """Brings the arm to rest; returns why it could take no more actions, or nothing."""
        driver = self._driver
        self._driver = None
        if driver is not None:
            driver.stop()
        broken = driver.broken if driver is not None else ""
        if self._log is not None:
            outcome = self._outcome | ({"reason": broken} if broken else {})
            outcome |= {"mode": str(driver.guard.mode)} if driver is not None else {}
            self._log.put("/episode", self._connected.clock.now(), outcome)
            self._log.close()
            self._log = None
        return broken

    # ---- Actions.

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        if self._releasing and self._driver is not None:
            self._driver.hand_over(False)
            self._releasing = False
        return super().step(actions)

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        driver = self._driver
        assert driver is not None
        # 1. Whose action: the policy's, or the person's.
        person = self._operator if driver.person else None
        action = actions[0].cpu().numpy() if person is None else self._person_action(person, driver)
        # 2. Take it, and wait until it is over.
        seen = self.look() if self._log is not None and self.config.record else None
        driver.wait_until(driver.act(action, seen))
        # 3. Hear the person. Their label counts above the judge's.
        label = self._attend(driver)
        reward = float(label == "success")
        solved = label == "success"
        fault = bool(driver.broken) and not driver.hit_something
        # 4. Judge.
        if not driver.broken and not label:
            try:
                reward, solved = self._judge_step()
            except NotReadyError as error:
                driver.hold(f"stale: {error}")
                fault = True
        over = solved or bool(label) or driver.hit_something
        self._person_moved |= person is not None
        last = over or self.elapsed + 1 >= self.config.max_episode_steps
        if last:
            self.between.state.ended = solved
        if last or fault:
            self._outcome = self._ending(driver, solved, label, fault)
        row = [torch.tensor([x], device=self.device) for x in (over, solved, fault)]
        tick = Tick(torch.tensor([reward], device=self.device), *row)
        if self._operator is not None:
            tick.human = torch.tensor([person is not None])
            tick.taken = torch.from_numpy(action)[None]
        return tick

    def _ending(self, driver: StepDriver, solved: bool, label: str, fault: bool) -> dict[str, Any]:
        """How the episode ends here, for its log."""
        reason = f"a person said {label}" if label else "solved" if solved else "the time is up"
        by = EndedBy.PERSON if self._person_moved else EndedBy.POLICY
        if fault:
            reason = reason if label else driver.guard.reason
            by = EndedBy.PERSON if driver.guard.mode == Mode.ESTOP else EndedBy.FAULT
        return {"solved": solved, "reason": reason, "ended_by": str(by)}

    def _person_action(self, person: Operator, driver: StepDriver) -> NDArray[np.float32]:
        """The person's action (A,); while they do not answer, the arm is held."""
        if person.alive(driver.clock.now()):
            return np.clip(person.action(self._space.dims), -1.0, 1.0)
        driver.hold("the person who moved the arm does not answer")
        still = np.zeros(self._space.dims, np.float32)
        still[-1] = 1.0 if driver.decoder.width > 0.0 else -1.0
        return still

    def _attend(self, driver: StepDriver) -> str:
        """Does what the person asks for, and waits for as long as they hold the arm.

        Returns:
            Their label of the episode, ``"success"`` or ``"failure"``; empty for none.
        """
        person = self._operator
        may = (*WISHES, LOST)
        if person is None and not self._connected.simulated:
            person = _people.get(self._arm_key)
            may = WITHOUT_HELP
        label = ""
        held = driver.person and driver.guard.mode == Mode.HOLD
        if person is not None and (why := self._overdue(self.elapsed + 1, driver.person)):
            driver.hold(why)
            held = True
        while person is not None:
            for wish in [wish for wish in person.wishes() if wish in may]:
                if wish == "estop":
                    driver.guard.estop("a person pressed stop")
                    # Two ticks, so that the mode has changed.
                    driver.wait_until(driver.clock.now() + 2 * driver.guard.config.tick)
                elif wish in ("success", "failure"):
                    label = wish
                elif wish in ("hold", LOST):
                    driver.hold(HOLDS[wish])
                    held = True
                elif wish == "takeover":
                    driver.hand_over(True)
                    self._releasing = False
                    held = False
                elif wish == "run" and held:
                    driver.hand_over(False)
                    held = False
                elif wish in ("release", "run") and driver.person:
                    self._releasing = True
            status = driver.status()
            status["asks"] = status["reason"] if held or driver.broken else ""
            status["can"] = [wish for wish in status["can"] if wish in may]
            person.show(status, self._connected.robot.pictures())
            if not held or label or driver.broken:
                break
            driver.wait_until(driver.clock.now() + 0.1)
        return label

    def _judge_step(self) -> tuple[float, bool]:
        """Reward and success after an action.

        Raises:
            UserError: the judge gave a reward that is no number, or larger than ``max_reward``.
        """
        if self.between.state.back:
            judge = self.between.judge
            solved = judge is not None and judge(self.look)
            return float(solved), solved
        if self._judge is not None:
            reward, solved = self._judge(self.look())
            most = self.config.max_reward
            if not abs(reward) <= most:  # written so that NaN is refused too
                raise UserError(
                    f"The judge gave a reward of {reward}; its size may be {most:g} at most. Mend "
                    "the judge, or raise env.max_reward."
                )
            return float(reward), bool(solved)
        solved = self._connected.robot.solved()
        return float(solved), solved

    # ---- Observations.

    def look(self) -> dict[str, Any]:
        """What the policy sees now; waits a moment for a late image (``patient_look``).

        Raises:
            NotReadyError: no image came in time.
        """
        assert self._driver is not None
        seen = patient_look(self._cameras, self._driver, self._connected.simulated)
        if self.between.state.back and self.config.reset_prompt:
            seen = seen | {"prompt": self.config.reset_prompt}
        self._seen = seen
        return seen

    def _observe(self, env_ids: list[int] | None) -> Obs:
        try:
            seen = self.look()
        except NotReadyError:
            # The chunk is masked then, so the last observation will do, unless there is none.
            if self._seen is None:
                raise
            seen = self._seen
        return Obs(
            images={
                name: torch.tensor(image, device=self.device)[None]
                for name, image in seen["images"].items()
            },
            proprio=torch.tensor(seen["proprio"], device=self.device)[None],
            instruction=[seen["prompt"]],
        )

    def close(self) -> None:
        """Brings the arm to rest and disconnects."""
        self._end_episode()
        if _active_env.get(self._arm_key) is self:
            del _active_env[self._arm_key]
        if self._operator is not None and _people.get(self._arm_key) is self._operator:
            del _people[self._arm_key]
        self._open.close()
