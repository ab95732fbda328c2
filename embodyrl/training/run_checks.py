"""What a run is told or refused before its first iteration, about its episodes and their tasks."""

from __future__ import annotations

from embodyrl.algorithm import Algorithm
from embodyrl.config import Config
from embodyrl.errors import UserError, refuse_unread
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


def check_draws(config: Config, algorithm: Algorithm, spec: EnvSpec) -> None:
    """Refuses to draw tasks or initial states by a success that stays unknown.

    Raises:
        UserError: no training episode, no success of any; or there is one task, or a number means
            several states.
    """
    run = config.run
    keys = ("task_sampling", "start_sampling", "first_length")
    if (run.task_sampling, run.start_sampling, run.first_length) == ("uniform", "uniform", 1.0):
        return
    if not algorithm.plays:
        refuse_unread(run, "run", keys, f"{config.algorithm.name} plays no episodes in training")
    if len(spec.tasks) == 1:
        refuse_unread(run, "run", ("task_sampling",), f"{spec.name} has one task")
    if getattr(config.env, "real_envs", 0):
        why = "with env.real_envs a number means one state in a dream and another in the real env"
        refuse_unread(run, "run", ("start_sampling",), why)
    if not spec.reports_success:
        refuse_unread(run, "run", keys[:2], f"{spec.name} reports no success")
    by_success = [key for key in keys[:2] if getattr(run, key) != "uniform"]
    if by_success and short_rollout(config, algorithm, spec):
        steps = rollout_steps(config, algorithm)
        raise UserError(
            f"run.{by_success[0]} draws by success in training, but a rollout has {steps} actions and "
            f"an episode up to {spec.max_episode_steps}, so that stays unknown. Raise "
            f"algorithm.num_chunks, or leave run.{by_success[0]} at uniform."
        )


def check_reward(config: Config, algorithm: Algorithm) -> None:
    """Refuses a reward that nothing earns.

    Raises:
        UserError: a reflector beside a simulator, and no episode is played in training.
    """
    if not algorithm.plays and not config.env.judges_itself:
        why = f"{config.algorithm.name} plays no episodes in training"
        refuse_unread(config.env, "env", ("reflector", "progress_coef"), why)


def check_history(config: Config, algorithm: Algorithm) -> None:
    """Refuses observations that the policy does not look at.

    Raises:
        UserError: several observations at once, and a policy without ``reads_history``.
    """
    if not getattr(algorithm.policy, "reads_history", False):
        why = f"{config.policy.name} sees one observation at a time"
        refuse_unread(config.env, "env", ("history",), why)


def check_held(config: Config, algorithm: Algorithm, spec: EnvSpec) -> None:
    """Refuses settings of an algorithm that need more than a run has.

    They are the weight of imitation that follows success, the distance to the policy that training
    begins with, and successes that are played again.

    Raises:
        UserError: success stays unknown, that policy is random, or no initial state comes twice.
    """
    c = config.algorithm
    run = config.run
    if getattr(c, "bc_schedule", "constant") != "constant":
        why = "so the success of training episodes stays unknown"
        if not spec.reports_success:
            refuse_unread(c, "algorithm", ("bc_schedule",), f"{spec.name} reports none, {why}")
        if short_rollout(config, algorithm, spec):
            steps = rollout_steps(config, algorithm)
            why = f"a rollout has {steps} actions, less than an episode, {why}"
            refuse_unread(c, "algorithm", ("bc_schedule",), why)
    # A reference must be worth staying near to.
    start = run.init_checkpoint or getattr(config.policy, "pretrained", "")
    if getattr(c, "reference_coef", 0.0) and not start:
        raise UserError(
            f"algorithm.reference_coef is {c.reference_coef}, but training begins with random "
            "weights, and a policy must not be held near these. Give run.init_checkpoint=RUN, or "
            "set it to 0."
        )
    # A success can be played again only where its initial state comes twice.
    recurs = run.start_sampling == "difficulty" or spec.num_init_states is not None
    if getattr(c, "replay_successes", 0) and not recurs:
        raise UserError(
            f"algorithm.replay_successes is {c.replay_successes}, but {spec.name} has an initial "
            "state for every number, so none comes twice. Set run.start_sampling=difficulty, or it "
            "to 0."
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
