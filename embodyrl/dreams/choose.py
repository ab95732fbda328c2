"""Learning that stays in support: the dream chooses among proposals, and what is solved is imitated.

    policy --8 proposals--> world model --best--> real env --solved episodes--> imitation --> policy

No gradient goes through the dream, so the policy cannot learn to fool it, and nobody needs a
simulator's state: neither the model, which finds its own in pictures, nor a critic, of which there
is none. It is best-of-N distillation (reward-ranked fine-tuning, arXiv:2304.06767), chunk by chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl.build import limit_num_envs, make_env
from embodyrl.config import compose
from embodyrl.data.collect import collect_dataset
from embodyrl.dreams.gate import episode_counts
from embodyrl.dreams.loop_config import LoopConfig
from embodyrl.dreams.loop_record import RealEvaluation, real_evaluations
from embodyrl.dreams.score import score_policy
from embodyrl.env import EnvConfig
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from embodyrl.world_models.dream_chooser import choice_by_dream


def record_chosen(
    config: LoopConfig, real: EnvConfig, policy: str, model: str, folder: Path, number: int
) -> str:
    """The data set of a round's real episodes in which the dream chooses what the policy does.

    Args:
        config: of the loop; with ``proposals=1`` the policy acts alone.
        real: config of the real env.
        policy: proposes.
        model: folder of the world model that chooses; empty where nothing does.
        folder: of the round.
        number: of the round.
    """
    path = folder / "chosen"
    if not path.exists():
        # The dream takes the best of several proposals; without one the policy has only its own.
        choice = choice_by_dream(model, config.proposals, config.margin) if model else None
        collect_dataset(
            real,
            path,
            num_episodes=config.chosen,
            policy=policy,
            noise_free=True,
            choice=choice,
            keep_failures=True,
            seed=config.seed + 1000 * (number + 1) + 500,
        )
    return str(path)


def imitate_chosen(
    config: LoopConfig,
    real: EnvConfig,
    folder: Path,
    policy: str,
    chosen: Sequence[str],
    command: str,
    *,
    evaluated_before: bool,
) -> list[RealEvaluation] | None:
    """Imitates what was solved, until the real env shows no progress.

    Args:
        config: of the loop.
        real: config of the real env.
        folder: of the round.
        policy: checkpoint to start from.
        chosen: data sets of all rounds in which the dream chose.
        command: as the user typed it.
        evaluated_before: whether it is known how well ``policy`` does.

    Returns:
        The evaluations in the real env; None when the training was interrupted.
    """
    run = folder / "imitation"
    solved = [path for path in chosen if episode_counts([path])[0]]
    # How well the policy does that it starts from.
    evaluations = []
    if not evaluated_before:
        evaluations.append(_evaluate_before(config, real, policy))
    if not solved:
        print("Nothing was solved, so there is nothing to imitate in this round.")
        return evaluations
    # Imitate the successes of all rounds, and the demonstrations beside.
    data = [config.demos, *solved] if config.demos else solved
    settings: dict[str, Any] = {
        "run.init_checkpoint": policy,
        "run.out": folder,
        "run.name": run.name,
        "run.seed": config.seed,
        "run.iterations": config.segment * config.segments,
        "run.patience": config.patience,
        "run.eval_every": config.segment,
        "run.eval_episodes": config.select_episodes,
        "run.eval_split": "train",
        "run.checkpoint_every": config.segment,
        "run.keep_checkpoints": 1000,
        "run.videos": 0,
        "data.path": data[0],
        "data.more": f"[{','.join(data[1:])}]",
    }
    if not finished(run):
        given = [*config.env_overrides, *config.imitate_overrides]
        overrides = [f"{key}={value}" for key, value in settings.items()]
        train(compose(config.imitate, [*given, *overrides]), command=command)
    return [*evaluations, *real_evaluations(run, policy)] if finished(run) else None


def _evaluate_before(config: LoopConfig, real: EnvConfig, policy: str) -> RealEvaluation:
    """The policy that the first round starts from, on the states by which checkpoints are chosen."""
    train_split = dataclasses.replace(real, split="train")
    env = make_env(limit_num_envs(train_split, config.select_episodes))
    try:
        result = score_policy(env, policy, config.select_episodes, config.seed)
    finally:
        env.close()
    steps = sum(episode.length for episode in result.episodes)
    return RealEvaluation(policy, result.successes, len(result.episodes), steps)
