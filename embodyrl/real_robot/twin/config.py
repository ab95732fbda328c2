"""Which task the twin plays: the one that a checkpoint was trained in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embodyrl.build import load_config
from embodyrl.errors import UserError


def twin_config(path: str, overrides: Sequence[str]) -> Any:
    """The settings of the environment that a checkpoint was trained in.

    They are those of the evaluation split, unless ``env.split`` is overridden.

    Args:
        path: a checkpoint, or a run's folder.
        overrides: of its config, e.g. ``env.task=reach``.

    Raises:
        UserError: the twin cannot play that environment.
    """
    config = load_config(path, overrides)
    if config.env.name != "mujoco":
        raise UserError(
            f"The twin plays the embedded MuJoCo tasks, but {path} was trained in "
            f"{config.env.name}."
        )
    if judged := [o for o in overrides if o.startswith(("env.reflector=", "env.progress_coef="))]:
        raise UserError(
            f"{judged[0]} gives reward while a policy learns in a simulator, and the twin only plays "
            "it: the twin's own success counts. Leave it out."
        )
    given = any(o.startswith("env.split=") for o in overrides)
    return config.env.for_evaluation(config.env.split if given else config.run.eval_split)
