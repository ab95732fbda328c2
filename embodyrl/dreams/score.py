"""``embodyrl world eval``: measures a world model against the real env that it imagines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embodyrl.build import load_config, load_policy, make_env
from embodyrl.data.policy_actor import ProposalChoice
from embodyrl.dreams.pictures import draw_dreams
from embodyrl.dreams.ranking import rank_proposals
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.functional.ranking import mmrv, pearson, spearman
from embodyrl.rollouts.evaluation import Evaluation, evaluate
from embodyrl.training.evaluate import first_inits
from embodyrl.types import Obs
from embodyrl.world_models.calibrate import outcomes
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.config import WorldModelConfig
from embodyrl.world_models.encode import encode
from embodyrl.world_models.env import WorldModelEnv
from embodyrl.world_models.found_state import find_states
from embodyrl.world_models.judge_scores import score_foresight, score_judges
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.open_loop import (
    action_following,
    measure_speed,
    quality_by_depth,
    wrong_action_test,
)
from embodyrl.world_models.reflectors.base import Reflector
from embodyrl.world_models.reflectors.folder import load_reflector
from embodyrl.world_models.replay import replay_success, solved_after

RANKED_AT_ONCE = 64
"""Envs in which proposals are carried out."""
START_CHUNKS = (0, 2)
"""Chunks of a real episode after which the dreams begin that ``verify_dreams`` checks."""


def evaluate_world(
    path: str,
    data: Sequence[str],
    policies: Sequence[str] = (),
    *,
    held_out: float = 0.0,
    episodes: int = 256,
    reflector: str = "",
    pictures: str = "",
    rank: str = "",
    states: int = 128,
) -> dict[str, Any]:
    """All measures of a world model.

    Args:
        path: folder of the model.
        data: data sets; with ``held_out`` only the share of their episodes that training kept back.
        policies: checkpoints to compare in the dream and in the real env; none skips this.
        held_out: as in training; 0 uses all episodes.
        episodes: per policy.
        reflector: folder of a reflector to score beside the model's own success head.
        pictures: file for a picture of some episodes beside their dreams; empty draws none.
        rank: a checkpoint or run, whose proposals the dream ranks; empty ranks none.
        states: in which they are ranked.

    Raises:
        UserError: no world model, no data or no reflector there, or the cameras differ.
    """
    model = WorldModel.load(path)
    if policies or reflector or pictures:
        model.require_frames()
    second_judge = load_reflector(reflector) if reflector else None
    # The episodes, and the latents of their frames.
    clips = Clips.load(data, spec=None)
    starts = clips.starts
    if held_out:
        starts = starts[clips.held_out(held_out)[starts]]
    clips.latents = encode(model, clips)
    if model.finder is not None:
        clips.privileged = find_states(model, clips)
    real = dataclasses.replace(
        WorldModelConfig(model=path, device="cpu").for_evaluation("eval"),
        num_envs=min(64, episodes),
    )
    result: dict[str, Any] = {"model": path}
    if model.state is not None and len(model.state.prospects):
        result["foresight"] = score_foresight(model, clips, starts)
    if model.imagines_frames:
        if pictures:
            draw_dreams(model, clips, starts, pictures)
        result |= _dreams_of_episodes(model, clips, starts, real, second_judge)
    # Policies, in the dream and in the real env.
    if policies:
        result["as_evaluator"] = as_evaluator(path, policies, real, episodes=episodes)
    # The proposals of one policy, ranked in the dream and carried out in the real env.
    if rank:
        result["ranking"] = _ranking(model, rank, real, states)
    if model.imagines_frames:
        result["speed"] = measure_speed(model)
    return result


def _dreams_of_episodes(
    model: WorldModel,
    clips: Clips,
    starts: Tensor,
    real: EnvConfig,
    second_judge: Reflector | None,
) -> dict[str, Any]:
    """What becomes of held-out episodes that are dreamt again."""
    prob, lasted = replay_success(model, clips, starts)
    solved = solved_after(clips, starts, model.horizon, len(prob)) & lasted
    result: dict[str, Any] = {
        "by_depth": quality_by_depth(model, clips, starts),
        "outcomes": outcomes(model.calibration, prob, lasted, solved.any(0)),
        "judged": score_judges(model, clips, starts, second_judge),
    }
    if model.inverse is not None:
        result["followed"] = action_following(model, clips, starts)
    # Other episodes' actions, dreamt and in the real env.
    longest = max(model.spec.max_episode_steps, int((clips.end[starts] - starts).max()))
    train_split = make_env(
        dataclasses.replace(real, split=model.env["split"]).with_time_limit(longest)
    )
    try:
        result["swapped_actions"] = wrong_action_test(model, clips, starts, train_split)
    finally:
        train_split.close()
    return result


def as_evaluator(
    model_path: str, policies: Sequence[str], real: EnvConfig, *, episodes: int = 256, seed: int = 0
) -> dict[str, Any]:
    """Scores policies in the dream and in the real env: does the dream rank them correctly?

    Both begin at the real env's initial states. The model's own keyframes would be a biased choice:
    those of replays are states that some policy has solved.

    Args:
        model_path: folder of the world model.
        policies: at least three checkpoints or runs of different quality.
        real: config of the real env.
        episodes: in each.
        seed: of the policies' noise.

    Returns:
        ``policies`` with both rates each and ``believed`` (``verify_dreams``); ``pearson``,
        ``spearman``, ``mmrv`` and ``mean_error``.

    Raises:
        UserError: fewer than three policies.
    """
    if len(policies) < 3:
        raise UserError(
            f"A correlation over {len(policies)} policies says nothing; give at least three "
            "checkpoints."
        )
    rows = []
    world = make_env(real)
    dream = WorldModelEnv(
        WorldModelConfig(model=model_path, num_envs=world.spec.num_envs, split="eval", device="cpu")
    )
    try:
        for path in policies:
            result = score_policy(world, path, episodes, seed)
            imagined = imagined_successes(path, world, dream, episodes, seed)
            rows.append(
                {
                    "policy": path,
                    "imagined": imagined / episodes,
                    "real": result.successes / len(result.episodes),
                    "believed": [
                        verify_dreams(path, world, dream, chunks, seed) for chunks in START_CHUNKS
                    ],
                }
            )
    finally:
        world.close()
    imagined = torch.tensor([row["imagined"] for row in rows])
    truth = torch.tensor([row["real"] for row in rows])
    return {
        "policies": rows,
        "pearson": pearson(imagined, truth),
        "spearman": spearman(imagined, truth),
        "mmrv": mmrv(imagined, truth),
        "mean_error": float((imagined - truth).abs().mean()),
    }


def _ranking(model: WorldModel, path: str, real: EnvConfig, states: int) -> dict[str, Any]:
    world = make_env(dataclasses.replace(real, num_envs=RANKED_AT_ONCE))
    try:
        return rank_proposals(model, load_for_env(path, world), world, states=states)
    finally:
        world.close()


def load_for_env(path: str, env: VecEnv, seed: int = 0) -> Any:
    """The policy of a checkpoint or run, for ``env``.

    Its critic is left out if it needs a simulator's state that ``env`` does not have.

    Raises:
        UserError: there is no policy, or it does not fit.
    """
    config = load_config(path).policy
    if not env.spec.privileged_dim and getattr(config, "critic", "") == "privileged":
        config = dataclasses.replace(config, critic="shared")
    return load_policy(path, config, env.spec, seed)


def score_policy(
    env: VecEnv, path: str, episodes: int, seed: int, choice: ProposalChoice | None = None
) -> Evaluation:
    """Evaluates a checkpoint or run on the first ``episodes`` initial states of ``env``.

    It may have been trained in another env. ``choice`` takes the best of what it proposes.
    """
    policy = load_for_env(path, env, seed)
    if choice is not None:
        policy = choice.wrap(policy, torch.device("cpu"))
    return evaluate(env, policy, first_inits(env.spec, episodes), seed=seed)


def imagined_successes(
    path: str, real: VecEnv, dream: WorldModelEnv, episodes: int, seed: int = 0
) -> int:
    """How many of the real env's first initial states a policy solves in dreams from there."""
    n = real.spec.num_envs
    policy = load_for_env(path, real)
    generator = torch.Generator().manual_seed(seed)
    solved = 0
    inits = first_inits(real.spec, episodes)
    for first in range(0, episodes, n):
        # The last batch is filled up with copies, which do not count.
        batch = inits[first : first + n]
        obs = dream.dream_from(real.reset(init=[*batch, *batch[-1:] * (n - len(batch))]))
        counts = torch.arange(n) < len(batch)
        solved += int(play_dreams(dream, policy, obs, counts, generator)[0].sum())
    return solved


def verify_dreams(
    path: str, real: VecEnv, dream: WorldModelEnv, after: int = 0, seed: int = 0
) -> dict[str, float]:
    """How many of a policy's successes in dreams are true.

    The actions that the policy took in the dreams are carried out in the real env.

    Args:
        path: checkpoint or run.
        real: N real envs.
        dream: as many dreams.
        after: chunks that the policy first acts in the real env; the dream begins where that
            leads.
        seed: of the policy's noise.

    Returns:
        ``after``; ``episodes``, those that were not over when the dream began; among them
        ``imagined`` and ``true`` successes, and ``both``: solved in the dream and, by the end of
        the same chunk, in the real env.
    """
    n = real.spec.num_envs
    policy = load_for_env(path, real)
    generator = torch.Generator().manual_seed(seed)
    inits = first_inits(real.spec, n)
    # Act in the real env up to where the dreams begin.
    seen = [real.reset(init=inits)]
    taken = []
    over = torch.zeros(n, dtype=torch.bool)
    for _ in range(after):
        taken.append(policy.sample(seen[-1], generator=generator, mode="eval").actions)
        step = real.step(taken[-1])
        seen.append(step.obs)
        over |= step.done
    # Dream on from there.
    age = sum(chunk.shape[1] for chunk in taken)
    obs = dream.dream_from(seen[-1], first=seen[0], previous=seen[max(0, after - 1)], age=age)
    imagined, chunks = play_dreams(dream, policy, obs, ~over, generator)
    # Carry out the same actions in the real env.
    real.reset(init=inits)
    for chunk in taken:
        real.step(chunk)
    true = torch.zeros_like(over)
    for chunk, running in chunks:
        true |= real.step(chunk).success & running
    return {
        "after": after,
        "episodes": int((~over).sum()),
        "imagined": int(imagined.sum()),
        "true": int(true.sum()),
        "both": int((imagined & true).sum()),
    }


def play_dreams(
    dream: WorldModelEnv, policy: Any, obs: Obs, running: Tensor, generator: torch.Generator
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Lets a policy act in dreams until all that run are over.

    Returns:
        (N,) bool, which were solved; and every chunk of actions with (N,) bool, which ran then.
    """
    solved = torch.zeros_like(running)
    chunks = []
    while running.any():
        actions = policy.sample(obs, generator=generator, mode="eval").actions
        chunks.append((actions, running))
        step = dream.step(actions)
        obs = step.obs
        solved = solved | (step.success & running)
        running = running & ~step.done
    return solved, chunks
