"""``embodyrl world loop``: policy -> real episodes -> world model -> better policy, in rounds.

A policy that is trained in a dream finds the errors of the dream. So each round

1. records what the newest policy really does, and replays of its successes with a nudge
   (``embodyrl.data.perturbed_replay``);
2. continues the training of the world model with these episodes;
3. asks whether the model knows which of the policy's proposals is better (``dreams.gate``).
   Nothing is learned from a model that does not;
4. trains the best policy so far in the dream; or lets the dream choose among its proposals in the
   real env, and imitates what was solved (``dreams.choose``). After every few updates the policy is
   evaluated in the real env, and the round ends when that shows no progress (``run.patience``).

A policy that has never seen the codec's pictures solves less in dreams, whatever the dynamics. So
an algorithm that imitates demonstrations beside RL gets half of them as the codec shows them.

The initial states that decide which policy is kept are of the training split; only the last
evaluation is on held-out states. Every stage leaves its result under ``out`` and is not repeated:
the same command continues where the last one stopped.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from embodyrl.build import limit_num_envs, make_env
from embodyrl.config import compose, env_config
from embodyrl.data.collect import collect_dataset
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.dreams.choose import imitate_chosen, record_chosen
from embodyrl.dreams.gate import (
    GateClosed,
    closed_text,
    episode_counts,
    gate_text,
    measure_gate,
)
from embodyrl.dreams.loop_config import LoopConfig, claim_folder, imitates
from embodyrl.dreams.loop_record import (
    LoopRecord,
    RealEvaluation,
    best_evaluation,
    real_evaluations,
)
from embodyrl.dreams.score import score_policy
from embodyrl.env import EnvConfig
from embodyrl.storage.config_section import build_section
from embodyrl.storage.folder_lock import locked
from embodyrl.storage.preset_files import apply_overrides
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.dream_chooser import choice_by_dream
from embodyrl.world_models.train import train_world


def run_loop(config: LoopConfig, *, command: str = "") -> dict[str, Any] | None:
    """Runs a loop, or continues it.

    Returns:
        What ``loop.json`` then holds: ``rounds``, ``gates``, ``real_steps``, ``eval_steps``,
        ``gate_steps``, ``minutes`` by stage, the ``best`` checkpoint, and ``before`` and ``after``
        on held-out states; with ``imitate`` also ``chosen`` by round, and ``after_choice``; with
        ``dream`` also ``dreamt``. None when it was interrupted.

    Raises:
        GateClosed: no round's model could be learned from.
        UserError: see ``collect_dataset``, ``train_world`` and ``training.runner.train``; or
            ``out`` holds another loop, or another process is working in it.
    """
    folder = Path(config.out)
    with locked(folder):
        claim_folder(folder, config)
        return _run_rounds(folder, config, command)


def _run_rounds(folder: Path, config: LoopConfig, command: str) -> dict[str, Any] | None:
    real = env_config(config.env, config.env_overrides)
    record = LoopRecord(folder)
    best = newest = config.policy
    best_solved: int | None = None  # before the first evaluation
    data = list(config.data)
    chosen: list[str] = []
    model = passed = ""
    found: dict[str, Any] = {}
    acts_alone = bool(config.imitate) and config.proposals == 1
    for number in range(config.rounds):
        name = f"round_{number}"
        round_folder = folder / name
        if not acts_alone:
            # 1. Record what the newest policy does.
            with record.stage("real episodes"):
                added = _record_episodes(config, real, newest, round_folder, number)
            weights = [1] * len(data) + [config.newest if model else 1] * len(added)
            data += added
            # 2. Train the world model on all episodes.
            with record.stage("world model"):
                out = round_folder / "world"
                trained = _train_world(config, data, weights, model, out, command)
            if trained is None:
                return None
            model = trained
            # 3. Ask whether it may be learned from.
            with record.stage("gate"):
                found = _ask_gate(record, name, config, model, best, real, data)
            if not found["passes"] and config.gate == "refuse":
                continue
            passed = model
        # 4. Learn in the dream or by its choice, with evaluations in the real env on the way.
        known = best_solved is not None
        if config.imitate:
            with record.stage("choice"):
                chosen.append(record_chosen(config, real, best, model, round_folder, number))
                record.add_chosen(name, best, model, episode_counts(chosen[-1:]))
            data.append(chosen[-1])
            with record.stage("imitation"):
                evaluations = imitate_chosen(
                    config, real, round_folder, best, chosen, command, evaluated_before=known
                )
        else:
            with record.stage("dream"):
                evaluations = _train_in_dream(
                    config, round_folder, model, best, command, evaluated_before=known
                )
        if evaluations is None:
            return None
        record.add_round(name, evaluations, data)
        if config.dream:
            record.add_dreamt(name, round_folder / "dream")
        print(record.round_text(name))
        if not evaluations:
            continue
        # Keep the best policy.
        best_solved = evaluations[0].solved if best_solved is None else best_solved
        newest = evaluations[-1].checkpoint
        kept = best_evaluation(evaluations, best_solved)
        if kept is not None:
            best = kept.checkpoint
            best_solved = kept.solved
    if not acts_alone and not passed:
        raise GateClosed(closed_text(found, config, data))
    # Evaluate the first and the best policy on held-out initial states.
    with record.stage("last evaluation"):
        for when, path in (("before", config.policy), ("after", best)):
            if not record.has_score(when, path):
                _score(record, when, path, config, real)
        if config.imitate and passed and not record.has_score("after_choice", best):
            _score(record, "after_choice", best, config, real, passed)
    return record.finish(best)


def _ask_gate(
    record: LoopRecord,
    name: str,
    config: LoopConfig,
    model: str,
    policy: str,
    real: EnvConfig,
    data: list[str],
) -> dict[str, Any]:
    """What the gate of a round found, measured once for each ``gate_states``; it is also said."""
    found = record.gate(name)
    if found is None or found["most"] != config.gate_states:
        found = measure_gate(config, model, policy, real) | {"most": config.gate_states}
        record.add_gate(name, found)
    print(f"Gate of {name.replace('_', ' ')}: {gate_text(found, config, data)}")
    return found


def _record_episodes(
    config: LoopConfig, real: EnvConfig, policy: str, folder: Path, number: int
) -> list[str]:
    """The data sets of a round's real episodes: the policy's own, and replays with a nudge."""
    total = config.episodes if number else config.first_episodes
    num_replays = round(config.near * total)
    common: dict[str, Any] = {
        "keep_failures": True,
        "past_success": config.past_success,
        "seed": config.seed + 1000 * (number + 1),
    }
    tried = folder / "tried"
    if not tried.exists():
        collect_dataset(
            real,
            tried,
            num_episodes=total - num_replays,
            policy=policy,
            derail=config.derail,
            **common,
        )
    # Only successes are replayed.
    if not num_replays or not _any_success(tried):
        return [str(tried)]
    replayed = folder / "near"
    if not replayed.exists():
        collect_dataset(
            real,
            replayed,
            num_episodes=num_replays,
            replay=str(tried),
            perturb=config.perturb,
            **common,
        )
    return [str(tried), str(replayed)]


def _any_success(path: Path) -> bool:
    return bool(open_dataset(path, ["next.success"]).columns["next.success"].any())


def _train_world(
    config: LoopConfig, data: list[str], weights: list[int], previous: str, out: Path, command: str
) -> str | None:
    """The folder of the new world model; None when its training was interrupted."""
    settings = {
        "data": data,
        "weights": weights,
        "init": previous,
        "out": str(out),
        "seed": config.seed,
        "max_false_positives": config.max_false_positives,
    }
    overrides = config.refresh if previous else config.world
    path = train_world(
        build_section("world", WorldTrainConfig, apply_overrides(settings, overrides)),
        command=command,
    )
    return None if path is None else str(path)


def _train_in_dream(
    config: LoopConfig,
    folder: Path,
    model: str,
    policy: str,
    command: str,
    *,
    evaluated_before: bool,
) -> list[RealEvaluation] | None:
    """Trains in the dream until the real env shows no progress.

    Args:
        config: of the loop.
        folder: of the round.
        model: folder of the world model.
        policy: checkpoint to start from.
        command: as the user typed it.
        evaluated_before: whether it is known how well ``policy`` does.

    Returns:
        The evaluations in the real env; None when the training was interrupted.
    """
    settings = {
        "env.model": model,
        "run.init_checkpoint": policy,
        "run.out": folder,
        "run.name": "dream",
        "run.seed": config.seed,
        "run.iterations": config.segment * config.segments,
        "run.patience": config.patience,
        "run.eval_every": config.segment,
        "run.eval_episodes": config.select_episodes,
        "run.eval_split": "train",
        "run.eval_before": "false" if evaluated_before else "true",
        "run.checkpoint_every": config.segment,
        "run.keep_checkpoints": 1000,
        "run.videos": 0,
    }
    if imitates(config):
        settings |= {"data.path": config.demos, "data.codec": model}
    run = folder / "dream"
    if not finished(run):
        overrides = [f"{key}={value}" for key, value in settings.items()]
        train(compose(config.dream, [*config.dream_overrides, *overrides]), command=command)
    return real_evaluations(run, policy) if finished(run) else None


def _score(
    record: LoopRecord, when: str, path: str, config: LoopConfig, real: EnvConfig, model: str = ""
) -> None:
    """Evaluates a policy on held-out initial states, alone or with the choice of ``model``."""
    held_out = dataclasses.replace(real, split="eval")
    env = make_env(limit_num_envs(held_out, config.eval_episodes))
    choice = choice_by_dream(model, config.proposals, config.margin) if model else None
    try:
        result = score_policy(env, path, config.eval_episodes, config.seed, choice)
    finally:
        env.close()
    record.add_score(when, path, result)
