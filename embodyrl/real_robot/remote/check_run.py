"""What a run must be for actors elsewhere to play for it, and what it knows of its env."""

from __future__ import annotations

from embodyrl import registry
from embodyrl.algorithm import Algorithm
from embodyrl.config import Config
from embodyrl.errors import UserError, refuse_unread
from embodyrl.real_robot.env.config import RobotConfig
from embodyrl.storage import checkpoint, plain_data
from embodyrl.storage.env_spec import spec_from_json
from embodyrl.types import EnvSpec


def check_run(config: Config) -> type[Algorithm]:
    """The algorithm of a run, if it can learn from actors elsewhere.

    Raises:
        UserError: it cannot, or the run is no robot's.
    """
    algorithm = registry.load("algorithms", config.algorithm.name)
    if not algorithm.continues_episodes:
        raise UserError(
            f"{config.algorithm.name} learns from its own latest rollouts alone, but an actor "
            "elsewhere plays with weights that are some chunks old. Use sac_flow, rlpd or "
            "wsrl."
        )
    if not isinstance(config.env, RobotConfig):
        raise UserError(
            f"embodyrl act plays on a robot, but the run's env is {config.env.name}. Set "
            "env.name=robot."
        )
    why = "the actor at the robot chooses what it plays"
    refuse_unread(config.run, "run", ("task_sampling", "start_sampling", "first_length"), why)
    return algorithm


def saved_spec(config: Config) -> EnvSpec | None:
    """The env's spec in the run's newest checkpoint, or in that which it starts from.

    Raises:
        UserError: that checkpoint cannot be read.
    """
    newest = checkpoint.latest(config.run.folder / "checkpoints")
    if newest is None and config.run.init_checkpoint:
        newest = checkpoint.find(config.run.init_checkpoint)
    if newest is None:
        return None
    meta = plain_data.read_json(newest / "meta.json", checkpoint.RUN_META, checkpoint.REMEDY)
    return spec_from_json(meta["spec"])
