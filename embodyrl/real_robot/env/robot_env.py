"""``RobotEnv``: a robot as a ``VecEnv`` of one, so that evaluation and learning run on it unchanged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick
from embodyrl.real_robot.connect import (
    Rig,
    ask_at_terminal,
    libfranka_robot,
    ros_robot,
    simulated_robot,
)
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder, proprio_dim
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.observe import Sight
from embodyrl.real_robot.control.pilot import Pilot
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import Operator
from embodyrl.real_robot.control.transports import NotReadyError, PacedClock
from embodyrl.real_robot.env.config import Config, check, policy_facts, reflector_judge, task_config
from embodyrl.real_robot.env.reflect import Witness
from embodyrl.real_robot.logs.mcap_log import RunLog
from embodyrl.real_robot.operator.devices import operator_of
from embodyrl.types import EnvSpec, Obs, Step

Judge = Callable[[dict[str, Any]], tuple[float, bool]]
"""What the policy sees (``Robot.observe``) -> reward, and whether the task is solved."""
PATIENCE = 0.5
"""s that a picture may be late before the chunk is given up."""
_moving: dict[tuple[str, str], RobotEnv] = {}
"""Robot and address -> who moves it. Training and evaluation have an env each, but there is one arm."""


class RobotEnv(SteppedVecEnv):
    """One episode at a time, on a robot behind the safety filter.

    An action takes 1 / (control_hz * speed) s. Between chunks the arm is held, however long its
    owner thinks. After a fault the chunk is masked, as for a simulator that broke, unless the arm
    was driven against something: then the episode is over and failed. Either way ``reset`` asks for
    a person, as it does to have a scene arranged where no topic can. There is no privileged state:
    a critic must share what the policy sees.

    A person who takes over moves the arm from the next action on; ``Step.human`` and ``Step.taken``
    then say what was executed. Who lets go does so at the end of the chunk, for the rest of the
    policy's plan was about another place.

    Args:
        config: see there.
        judge: gives reward and success after each action; by default the config's reflector, or
            else the robot's own success. A person's label counts above it: success is a reward of
            1, failure of 0; both end the episode.
        ask: called with a sentence when a person is needed, returns when it is done; by default at
            the operator's page or the terminal.
        operator: who may take over; by default the page, if there is one.

    Raises:
        UserError: a setting that cannot be, or no such robot.
    """

    Config: ClassVar = Config

    def __init__(
        self,
        config: Config,
        judge: Judge | None = None,
        ask: Callable[[str], None] | None = None,
        operator: Operator | None = None,
    ) -> None:
        check(config)
        self.config = config
        self._space = SPACES["robot", config.control_mode]
        self._judge = judge or reflector_judge(config)
        self._ask = ask or ask_at_terminal
        self._operator = operator
        self._letting_go = False
        self._arm = (config.robot, config.address)
        self._open = ExitStack()
        self._rig: Rig
        cameras = {name: (config.image_size, config.image_size) for name in config.cameras}
        where = (config.address, config.robot_file, self._space, cameras, config.prompt)
        if config.robot == "twin":
            opened = simulated_robot(task_config(config))
        elif config.robot == "libfranka":
            opened = libfranka_robot(*where, None if config.robot_file else task_config(config))
        else:
            opened = ros_robot(config.robot, *where)
        self._rig = self._open.enter_context(opened)
        task = getattr(self._rig.robot, "spec", None)  # of a simulated one
        dims = task.proprio_dim if task is not None else proprio_dim(self._space)
        if config.corrector and operator is None:
            # Imported here because the expert brings MuJoCo, which a real arm does not need.
            from embodyrl.real_robot.env.scripted_operator import ScriptedOperator

            self._operator = ScriptedOperator(
                self.twin, config.corrector, elapsed=lambda: self.elapsed, look=self.look
            )
        elif (config.operator >= 0 or config.hand) and operator is None:
            if self._rig.simulated:
                self._rig.clock = PacedClock(self._rig.clock)
            port = config.operator if config.operator >= 0 else None
            self._operator, page = operator_of(self._open, self._rig.clock, port, config.hand)
            self._ask = ask or (page.ask if page is not None else ask_at_terminal)
        self._pilot: Pilot | None = None
        self._log: RunLog | None = None
        self._seen: dict[str, Any] | None = None
        self._episodes = 0
        spec = EnvSpec(
            name=f"robot/{config.task if config.robot == 'twin' else config.robot}",
            num_envs=1,
            action_dim=self._space.dims,
            proprio_dim=dims,
            control_mode=config.control_mode,
            control_hz=config.control_hz,
            max_episode_steps=config.max_episode_steps,
            cameras=cameras,
        )
        super().__init__(spec, config)

    @property
    def twin(self) -> Any:
        """The simulated arm."""
        return self._rig.robot

    @property
    def elapsed(self) -> int:
        """Actions of the episode before this one."""
        return int(self._elapsed[0])

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        rig = self._rig
        why = self._end_episode()
        if why and not rig.simulated:
            self._ask(f"The arm stopped: {why}. Look at it, mend the cause, and go on.")
        if not rig.arranges:
            if self._episodes:
                self._begin_episode(inits[0])
                self._go_home()
                self._end_episode()
            self._ask(
                f"Arrange the scene for episode {self._episodes + 1} (initial state {inits[0]}), "
                "and go on."
            )
        rig.begin(inits[0])
        self._begin_episode(inits[0])
        self._episodes += 1
        self._seen = None

    def _begin_episode(self, init: int) -> None:
        rig = self._rig
        config = self.config
        if not rig.simulated:
            if (other := _moving.get(self._arm)) not in (None, self):
                other._end_episode()
            _moving[self._arm] = self
        decoder = DeltaDecoder(
            self._space, config.control_hz * config.speed, rig.safety.box_low, rig.safety.box_high
        )
        if config.log:
            path = Path(config.log) / f"episode_{self._episodes:06d}.mcap"
            said = {"init": init, "config": asdict(config), "policy": policy_facts(self.spec)}
            self._log = RunLog(path, said, rig.clock.now(), rig.safety.robot)
        # The next action ends a hold that thinking caused.
        guard = SafetyFilter(replace(rig.safety, resume="fresh_target"))
        self._sight = Sight(rig.robot)
        self._pilot = Pilot(rig.robot, rig.clock, guard, decoder, not rig.simulated, self._log)
        if isinstance(self._judge, Witness):
            self._judge.begin()
        self._letting_go = False
        self._outcome = {"solved": False, "reason": ""}
        self._pilot.start()

    def _end_episode(self) -> str:
        """Brings the arm to rest; why it could take no more actions, if so."""
        pilot = self._pilot
        self._pilot = None
        if pilot is not None:
            pilot.stop()
        if self._log is not None:
            outcome = self._outcome | (
                {"reason": pilot.broken} if pilot is not None and pilot.broken else {}
            )
            self._log.put("/episode", self._rig.clock.now(), outcome)
            self._log.close()
            self._log = None
        return pilot.broken if pilot is not None else ""

    def _go_home(self) -> None:
        """To ``home`` with open fingers, by actions like the policy's."""
        pilot = self._pilot
        assert pilot is not None
        pilot.decoder.rotation = kinematics.DOWN
        action = np.zeros(self._space.dims, np.float32)
        action[-1] = 1.0
        for _ in range(200):
            way = (np.array(self.config.home) - pilot.decoder.position) / self._space.metres
            if np.abs(way).max() < 0.1 or pilot.broken:
                return
            action[:3] = np.clip(way, -0.5, 0.5)
            pilot.wait_until(pilot.act(action))

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        if self._letting_go and self._pilot is not None:
            self._pilot.hand_over(False)
            self._letting_go = False
        return super().step(actions)

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        pilot = self._pilot
        assert pilot is not None
        person = self._operator if pilot.person else None
        action = actions[0].cpu().numpy()
        if person is not None and person.alive(pilot.clock.now()):
            action = np.clip(person.action(self._space.dims), -1.0, 1.0)
        elif person is not None:
            pilot.hold("the person who moved the arm does not answer")
            action = np.zeros(self._space.dims, np.float32)
            action[-1] = 1.0 if pilot.decoder.width > 0.0 else -1.0
        pilot.wait_until(
            pilot.act(action, self.look() if self._log is not None and self.config.record else None)
        )
        label = self._attend(pilot)
        reward = float(label == "success")
        solved = label == "success"
        fault = bool(pilot.broken) and not pilot.pressed
        if not pilot.broken and not label:
            try:
                reward, solved = self._judged()
            except NotReadyError as error:
                pilot.hold(f"stale: {error}")
                fault = True
        over = solved or bool(label) or pilot.pressed
        self._outcome = {"solved": solved, "reason": label or ("solved" if solved else "")}
        row = [torch.tensor([x], device=self.device) for x in (over, solved, fault)]
        tick = Tick(torch.tensor([reward], device=self.device), *row)
        if self._operator is not None:
            tick.human = torch.tensor([person is not None])
            tick.taken = torch.from_numpy(action)[None]
        return tick

    def _attend(self, pilot: Pilot) -> str:
        """What the person says of the episode, if anything; waits for as long as they hold the arm."""
        person = self._operator
        label = ""
        held = pilot.person and pilot.guard.mode == Mode.HOLD
        while person is not None:
            for wish in person.wishes():
                if wish == "estop":
                    pilot.guard.estop("a person pressed stop")
                    pilot.wait_until(pilot.clock.now() + 2 * pilot.guard.config.tick)
                elif wish in ("success", "failure"):
                    label = wish
                elif wish == "hold":
                    pilot.hold("a person said hold")
                    held = True
                elif wish == "takeover":
                    pilot.hand_over(True)
                    self._letting_go = held = False
                elif wish == "run" and held:
                    pilot.hand_over(False)
                    held = False
                elif wish in ("release", "run") and pilot.person:
                    self._letting_go = True
            person.show(pilot.status(), self._rig.robot.pictures())
            if not held or label or pilot.broken:
                break
            pilot.wait_until(pilot.clock.now() + 0.1)
        return label

    def _judged(self) -> tuple[float, bool]:
        if self._judge is not None:
            reward, solved = self._judge(self.look())
            return float(reward), bool(solved)
        solved = self._rig.robot.solved()
        return float(solved), solved

    def look(self) -> dict[str, Any]:
        """What the policy sees now; a late picture is waited for.

        Raises:
            NotReadyError: none came in time.
        """
        pilot = self._pilot
        assert pilot is not None
        end = pilot.clock.now() + PATIENCE
        while True:
            try:
                self._seen = self._sight.observe(pilot.decoder)
                return self._seen
            except NotReadyError:
                if self._rig.simulated or pilot.clock.now() > end:
                    raise
                pilot.clock.sleep_until(pilot.clock.now() + 0.02)

    def _observe(self, env_ids: list[int] | None) -> Obs:
        try:
            seen = self.look()
        except NotReadyError:  # of a chunk that was masked, unless the episode has just begun
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
        """Brings the arm to rest and lets go of it."""
        self._end_episode()
        if _moving.get(self._arm) is self:
            del _moving[self._arm]
        self._open.close()
