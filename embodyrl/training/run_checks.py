"""What a run is told or refused before its first iteration, about its episodes and their tasks."""

from __future__ import annotations

from embodyrl.algorithm import Algorithm
from embodyrl.config import Config
from embodyrl.errors import UserError
from embodyrl.policy import num_executed
from embodyrl.types import EnvSpec


def rollout_steps(config: Config, algorithm: Algorithm) -> int | None:
    """Actions of a rollout in each env; None where it is as long as its episodes, or there is none."""
    if not algorithm.plays or algorithm.continues_episodes or algorithm.whole_episodes:
        return None
    return config.algorithm.num_chunks * num_executed(algorithm.policy.config)


def short_rollout(config: Config, algorithm: Algorithm, spec: EnvSpec) -> str:
    """What to say where an episode may be longer than a rollout; otherwise nothing.

    Episodes that succeed (or fall) early end within it, and others may not: a rate over them would
    be biased, so there is none (``EpisodeStream.scored``).
    """
    steps = rollout_steps(config, algorithm)
    most = spec.max_episode_steps
    if steps is None or steps >= most:
        return ""
    what = "success" if spec.reports_success else "return"
    return (
        f"A rollout has {steps} actions and an episode up to {most}, so there is no train {what}: "
        "only short episodes end in a rollout. The evaluations score all."
    )


def check_task_sampling(config: Config, algorithm: Algorithm, spec: EnvSpec) -> None:
    """Refuses ``run.task_sampling=difficulty`` where the success of the tasks stays unknown.

    Raises:
        UserError: there is one task, no training episode, or no success of any.
    """
    if config.run.task_sampling == "uniform":
        return
    why = ""
    mend = "Leave run.task_sampling at uniform."
    if not algorithm.plays:
        why = f"{config.algorithm.name} plays no episodes in training"
    elif len(spec.tasks) == 1:
        why = f"{spec.name} has one task"
    elif not spec.reports_success:
        why = f"{spec.name} reports no success"
    elif short_rollout(config, algorithm, spec):
        why = (
            f"a rollout has {rollout_steps(config, algorithm)} actions and an episode up to "
            f"{spec.max_episode_steps}, so the success of training episodes stays unknown"
        )
        mend = f"Raise algorithm.num_chunks, or leave {mend.partition(' ')[2]}"
    if why:
        raise UserError(
            f"run.task_sampling={config.run.task_sampling} draws tasks by their success in "
            f"training, but {why}. {mend}"
        )


def check_episodes_end(config: Config, executed: int, max_episode_steps: int) -> None:
    """Refuses an off-policy run whose episodes would never come to an end.

    They begin anew after every checkpoint and evaluation; ``executed`` is H.
    """
    every = min(
        n
        for n in (config.run.checkpoint_every, config.run.eval_every or config.run.iterations)
        if n
    )
    steps = every * config.algorithm.num_chunks * executed
    if steps < max_episode_steps:
        raise UserError(
            f"Episodes begin anew after every checkpoint and evaluation, here after {steps} steps, "
            f"so no episode of {max_episode_steps} steps would ever end. Raise "
            "run.checkpoint_every and run.eval_every."
        )
