"""Settings of ``RobotEnv``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import Count, CountOrZero, Pixels, Range
from embodyrl.real_robot.connect_robot import ROBOTS
from embodyrl.real_robot.control.actions import SPACES
from embodyrl.real_robot.control.joint_space import CONTROL_MODE, JointSpace
from embodyrl.real_robot.control.safety_config import REACH
from embodyrl.real_robot.env.reflector_judge import ReflectorJudge
from embodyrl.real_robot.resets.options import ResetOptions, check_options
from embodyrl.storage.paths import machine_setting, path_setting
from embodyrl.types import Conventions, EnvSpec

Metres = Annotated[float, Range(-REACH, REACH)]
"""From the robot's base."""


@dataclass(frozen=True)
class RobotConfig(EnvConfig):
    """Settings of ``RobotEnv``.

    Attributes:
        robot: ``"twin"``, the simulated one in this process, or the transport to a robot:
            ``"ros2"``, ``"rosbridge"``, ``"ros1"`` or ``"libfranka"``; ``"lerobot"`` is for
            recorded data alone.
        address: of the rosbridge server, or of the arm.
        robot_file: see ``ros.config.load_robot`` and ``libfranka.config.load_arm``; empty means a
            simulated arm.
        prompt: instruction for the policy, where no topic gives one.
        task: of the simulated robot.
        cameras: that the policy sees; the twin has ``"front"`` and ``"wrist"``.
        image_size: edge of the square images in pixels.
        renderer: of the simulated robot.
        control_mode: what an action means: ``"ee_delta_pos"`` or ``"ee_delta_pose"``.
        control_hz: actions per second that the policy was trained at.
        speed: share of that rate at which actions are carried out (``--speed`` of ``embodyrl deploy``).
        max_episode_steps: number of actions in an episode.
        home: (3,) m, where the hand goes before a person arranges the scene, and after a reset.
        reset: who brings the scene back between episodes: a file of waypoints (``.yaml``), the log
            of an episode that is played again (``.mcap``), or a policy of the task that undoes this
            one (a checkpoint, or ``ws://host:port``). Empty: a person, a topic or the simulator.
        practice: the policy plays this task and the one that undoes it in turn, each beginning
            where the other ended.
        reset_seconds: that one try of a reset may take, by the arm's clock.
        reset_tries: after so many failed tries of a reset in a row, or failed episodes of the task
            that undoes this one, a person is asked.
        ask_after: failed episodes of this task in a row after which a person is asked; 0 for never.
        reset_prompt: instruction of the task that undoes this one, for a real arm.
        reset_reflector: folder of the reflector that tells whether the scene is back; empty means
            the simulator or the topic ``scene_ready``.
        log: folder of the episodes' logs (MCAP), in which those of an evaluation have a folder of
            their own; empty for none.
        record: also log what the policy sees before each action, so that ``embodyrl data
            from-logs`` can make a data set.
        corrector: number of actions after which a scripted expert takes over an episode of the
            simulated arm; 0 for none.
        operator: port of a page on which a person may stop, hold, take over and label (0: a free
            one); -1 for no page.
        operator_page: ``ws://HOST:PORT/NAME`` of a page of several arms (``embodyrl operator``), in
            place of one of its own; without NAME the arm has this computer's name.
        operator_token: file with the token of that page.
        overdue: share of an episode after which the arm holds still and asks for a person, once, if
            it is not solved; 0 never asks.
        hand: the device they take over with: ``spacemouse``, ``gamepad`` or a gamepad's file.
        reflector: folder of the reflector that gives the reward; empty means the robot's own
            success.
        max_reward: largest size of the reward of one action. Success, labels and reflectors give 0
            or 1. Raise it for a judge of your own that gives more. The env refuses larger rewards,
            and a learner refuses them from an actor elsewhere, by its own value of this setting.
    """

    name: str = "robot"
    num_envs: Annotated[int, Range(1, 1)] = machine_setting(1)
    robot: str = "twin"
    address: str = machine_setting("")
    robot_file: str = machine_setting("")
    prompt: str = ""
    task: str = "pick"
    cameras: tuple[str, ...] = ("front",)
    image_size: Pixels = 64
    renderer: str = "warp"
    control_mode: str = "ee_delta_pos"
    control_hz: Annotated[float, Range(1e-3, 1000)] = 25.0
    speed: Annotated[float, Range(0, 1, open_low=True)] = 0.25
    max_episode_steps: Count = 40
    home: tuple[Metres, Metres, Metres] = (0.45, 0.0, 0.25)
    reset: str = path_setting()
    practice: bool = False
    reset_seconds: Annotated[float, Range(0, 3600, open_low=True)] = ResetOptions.seconds
    reset_tries: Count = ResetOptions.tries
    ask_after: CountOrZero = ResetOptions.ask_after
    reset_prompt: str = ""
    reset_reflector: str = path_setting()
    log: str = machine_setting("")
    record: bool = machine_setting(False)
    corrector: CountOrZero = 0
    operator: Annotated[int, Range(-1, 65535)] = machine_setting(-1)
    operator_page: str = machine_setting("")
    operator_token: str = machine_setting("")
    overdue: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    hand: str = machine_setting("")
    reflector: str = path_setting()
    max_reward: Annotated[float, Range(0, 1e6, open_low=True, open_high=True)] = 1.0

    @property
    def judges_itself(self) -> bool:
        """See ``EnvConfig``; a robot has no other reward than its judge's."""
        return True

    @property
    def only_recorded(self) -> bool:
        """See ``EnvConfig``; an arm of LeRobot's is recorded and deployed, not learned on."""
        return self.robot == "lerobot"

    def for_evaluation(self, split: str) -> EnvConfig:
        """The same robot without a person: only the policy is scored.

        A simulated arm arranges the initial states of its evaluation, so that they are the same for
        every policy. A real one has the scene brought back as in training.
        """
        # The env that trains writes the same numbers of episodes.
        log = f"{self.log}/{split}" if self.log else ""
        alone = replace(self.alone(), split=split, corrector=0, log=log)
        return alone if self.robot != "twin" else replace(alone, **_NO_RESET)

    def alone(self) -> RobotConfig:
        """The same without a person, at a page or with a device."""
        return replace(self, operator=-1, operator_page="", operator_token="", overdue=0.0, hand="")

    def for_demonstrations(self) -> EnvConfig | None:
        """The task of the simulated arm, which a scripted expert knows."""
        return task_config(self) if self.robot == "twin" else None

    def beside_a_run(self, count: int) -> EnvConfig | None:
        """See ``EnvConfig``; a robot plays one episode at a time."""
        return None

    def smallest(self) -> EnvConfig | None:
        """The simulated robot, without a page or a log; None for a real one."""
        if self.robot != "twin":
            return None
        return replace(self.alone(), log="", record=False, **_NO_RESET)


_RESET_KEYS = {
    "path": "reset",
    "practice": "practice",
    "seconds": "reset_seconds",
    "tries": "reset_tries",
    "ask_after": "ask_after",
    "prompt": "reset_prompt",
    "reflector": "reset_reflector",
}
"""Field of ``ResetOptions`` -> that of ``RobotConfig``."""
_NO_RESET: dict[str, Any] = {
    key: getattr(ResetOptions, field) for field, key in _RESET_KEYS.items()
}


def reset_options(config: RobotConfig) -> ResetOptions:
    """Who brings the scene back between episodes."""
    given = {field: getattr(config, key) for field, key in _RESET_KEYS.items()}
    return ResetOptions(**given, home=config.home)


def robot_spec(config: RobotConfig, proprio_dim: int) -> EnvSpec:
    """The spec of the env of a config: all of it but the proprio's length, which is the robot's."""
    space = SPACES["robot", config.control_mode]
    moves = space.dims - 1
    return EnvSpec(
        name=f"robot/{config.task if config.robot == 'twin' else config.robot}",
        num_envs=1,
        action_dim=space.dims,
        proprio_dim=proprio_dim,
        control_mode=config.control_mode,
        control_hz=config.control_hz,
        max_episode_steps=config.max_episode_steps,
        cameras={name: (config.image_size, config.image_size) for name in config.cameras},
        # How a real camera is mounted is not known, and a twin stands for a real robot.
        conventions=Conventions(
            channels="rgb",
            fit="crop",
            actions="delta",
            scale=(space.metres,) * 3 + (space.radians,) * (moves - 3),
            gripper=(-1.0, 1.0),
        ),
    )


def motors_spec(config: RobotConfig, space: JointSpace) -> EnvSpec:
    """The spec of an arm of LeRobot's: an action, and the proprio, are positions of its motors."""
    conventions = Conventions(channels="rgb", fit="crop", state=space.state, actions="absolute")
    return replace(
        robot_spec(config, space.dims),
        action_dim=space.dims,
        control_mode=CONTROL_MODE,
        conventions=conventions,
    )


def task_config(config: RobotConfig) -> Any:
    """The embedded task that a simulated robot plays."""
    from embodyrl.sims.mujoco.config import MujocoConfig as TaskConfig

    return TaskConfig(
        num_envs=1,
        split=config.split,
        seed=config.seed,
        task=config.task,
        cameras=tuple(config.cameras),
        image_size=config.image_size,
        renderer=config.renderer,
        control_mode=config.control_mode,
    )


def check_settings(config: RobotConfig) -> None:
    """Checks settings that depend on each other, or on what there is.

    Raises:
        UserError: a setting that cannot be.
    """
    if config.robot not in ROBOTS:
        raise UserError(f"There is no robot {config.robot!r}. {did_you_mean(config.robot, ROBOTS)}")
    # Only control modes whose actions the decoder knows.
    modes = [mode for env, mode in SPACES if env == "robot"]
    if config.control_mode not in modes:
        raise UserError(
            f"A robot has no control mode {config.control_mode!r}. "
            f"{did_you_mean(config.control_mode, modes)}"
        )
    if config.corrector and config.robot != "twin":
        raise UserError(
            "env.corrector works with the simulated arm alone, because its scripted expert needs "
            f"the simulator's state. env.robot is {config.robot}."
        )
    options = reset_options(config)
    check_options(options, {field: f"env.{key}" for field, key in _RESET_KEYS.items()})
    # Who is beside the arm.
    page = config.operator >= 0 or config.operator_page
    if config.operator >= 0 and config.operator_page:
        raise UserError("Give env.operator or env.operator_page: an arm is on one page.")
    if config.operator_token and not config.operator_page:
        raise UserError("env.operator_token is the token of env.operator_page, which is not given.")
    if config.overdue and not page:
        raise UserError(
            "env.overdue asks for a person at a page. Give env.operator or env.operator_page, too."
        )
    if config.corrector and (page or config.hand):
        raise UserError(
            "env.corrector is a scripted person. Leave out env.operator, env.operator_page and "
            "env.hand."
        )
    if config.device not in ("auto", "cpu"):
        raise UserError(
            "A robot's observations are made on the CPU, so env.device must be cpu, not "
            f"{config.device!r}."
        )


def reflector_judge(config: RobotConfig) -> ReflectorJudge | None:
    """The judge of the config's reflector, if it names one."""
    if not config.reflector:
        return None
    from embodyrl.world_models.reflectors.folder import load_reflector

    return ReflectorJudge(load_reflector(config.reflector))
