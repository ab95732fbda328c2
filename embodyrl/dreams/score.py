"""World models against the real env: what ``embodyrl world eval`` measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embodyrl.build import load_config, make_env, make_policy
from embodyrl.dreams.pictures import draw_dreams
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.rollouts.evaluation import Evaluation, evaluate
from embodyrl.storage import checkpoint
from embodyrl.training.evaluate import first_inits
from embodyrl.types import Obs
from embodyrl.world_models.calibrate import outcomes, probabilities, solved_after
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream_metrics import mmrv, pearson, spearman
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.judge_scores import judged
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.open_loop import by_depth, followed, speed, swapped
from embodyrl.world_models.reflectors.folder import load_reflector
from embodyrl.world_models.train import encode

AFTER = (0, 2)
"""Chunks of a real episode after which the dreams begin whose successes are checked."""


def evaluate_world(
    path: str,
    data: Sequence[str],
    policies: Sequence[str] = (),
    *,
    held_out: float = 0.0,
    episodes: int = 256,
    reflector: str = "",
    pictures: str = "",
) -> dict[str, Any]:
    """All measures of a world model.

    Args:
        path: folder of the model.
        data: data sets; with ``held_out`` only that share of their episodes, the one that training
            kept back.
        policies: checkpoints to compare in the dream and in the real env; none skips it.
        held_out: as in training; 0 uses all episodes.
        episodes: per policy.
        reflector: folder of one to score beside the model's own success head.
        pictures: where to draw some of the episodes beside their dreams; empty draws none.

    Raises:
        UserError: no world model, no data, or no reflector there, or it looks at other cameras.
    """
    model = WorldModel.load(path)
    beside = load_reflector(reflector) if reflector else None
    clips = Clips.load(data, spec=None)
    starts = clips.starts
    if held_out:
        starts = starts[clips.held_out(held_out)[starts]]
    clips.latents = encode(model, clips)
    if pictures:
        draw_dreams(model, clips, starts, pictures)
    real = dataclasses.replace(
        WorldModelConfig(model=path).for_evaluation("eval"), num_envs=min(64, episodes)
    )
    prob, lasted = probabilities(model, clips, starts)
    solved = solved_after(clips, starts, model.horizon, len(prob)) & lasted
    result: dict[str, Any] = {
        "model": path,
        "by_depth": by_depth(model, clips, starts),
        "outcomes": outcomes(model.calibration, prob, lasted, solved.any(0)),
        "judged": judged(model, clips, starts, beside),
    }
    if model.inverse is not None:
        result["followed"] = followed(model, clips, starts)
    longest = max(model.spec.max_episode_steps, int((clips.end[starts] - starts).max()))
    train_split = make_env(
        dataclasses.replace(real, split=model.env["split"]).with_time_limit(longest)
    )
    try:
        result["swapped_actions"] = swapped(model, clips, starts, train_split)
    finally:
        train_split.close()
    if policies:
        result["as_evaluator"] = as_evaluator(path, policies, real, episodes=episodes)
    result["speed"] = speed(model)
    return result


def as_evaluator(
    model_path: str, policies: Sequence[str], real: EnvConfig, *, episodes: int = 256, seed: int = 0
) -> dict[str, Any]:
    """Policies scored in the dream and in the real env: does the dream put them in the right order?

    Both begin at the real env's initial states. A model's own keyframes would be others: those of
    replays are the ones that some policy has solved.

    Args:
        model_path: folder of the world model.
        policies: at least three checkpoints or runs of different quality.
        real: config of the real env.
        episodes: in each.
        seed: of the policies' noise.

    Returns:
        ``policies`` with both rates each and ``believed`` (see there); ``pearson``, ``spearman``,
        ``mmrv`` and ``mean_error``.
    """
    if len(policies) < 3:
        raise UserError(
            f"A correlation over {len(policies)} policies says nothing; give at least three "
            "checkpoints."
        )
    rows = []
    world = make_env(real)
    dream = WorldModelEnv(
        WorldModelConfig(model=model_path, num_envs=world.spec.num_envs, split="eval")
    )
    try:
        for path in policies:
            result = score_policy(world, path, episodes, seed)
            rates = {
                "imagined": imagined_successes(path, world, dream, episodes, seed) / episodes,
                "real": result.successes / len(result.episodes),
            }
            rows.append(
                {
                    "policy": path,
                    **rates,
                    "believed": [believed(path, world, dream, k, seed) for k in AFTER],
                }
            )
    finally:
        world.close()
    imagined, truth = (torch.tensor([row[k] for row in rows]) for k in ("imagined", "real"))
    return {
        "policies": rows,
        "pearson": pearson(imagined, truth),
        "spearman": spearman(imagined, truth),
        "mmrv": mmrv(imagined, truth),
        "mean_error": float((imagined - truth).abs().mean()),
    }


def load(path: str, env: VecEnv, seed: int = 0) -> Any:
    """The policy of a checkpoint or run, for ``env``; a critic that sees what a dream does not have is left behind.

    Raises:
        UserError: there is none, or it does not fit.
    """
    config = load_config(path).policy
    if not env.spec.privileged_dim and getattr(config, "critic", "") == "privileged":
        config = dataclasses.replace(config, critic="shared")
    policy = make_policy(config, env.spec, seed)
    checkpoint.load_policy(path, policy, env.spec)
    return policy


def score_policy(env: VecEnv, path: str, episodes: int, seed: int) -> Evaluation:
    """A checkpoint or run on the first ``episodes`` initial states of ``env``, whatever env it was trained in."""
    return evaluate(env, load(path, env, seed), first_inits(env.spec, episodes), seed=seed)


def imagined_successes(
    path: str, real: VecEnv, dream: WorldModelEnv, episodes: int, seed: int = 0
) -> int:
    """How many of the real env's first initial states a checkpoint or run solves in dreams that begin there."""
    n = real.spec.num_envs
    policy = load(path, real)
    generator = torch.Generator().manual_seed(seed)
    solved = 0
    inits = first_inits(real.spec, episodes)
    for first in range(0, episodes, n):
        some = inits[first : first + n]
        obs = dream.dream_from(real.reset(init=[*some, *some[-1:] * (n - len(some))]))
        solved += int(_dreamt(dream, policy, obs, torch.arange(n) < len(some), generator)[0].sum())
    return solved


def believed(
    path: str, real: VecEnv, dream: WorldModelEnv, after: int = 0, seed: int = 0
) -> dict[str, float]:
    """How much of what a policy achieves in dreams is true: the same actions are carried out in the real env.

    Args:
        path: checkpoint or run.
        real: N real envs.
        dream: as many dreams.
        after: chunks that the policy acts in the real env before the dream begins where that
            stands.
        seed: of the policy's noise.

    Returns:
        ``after``, ``episodes`` that were not over when the dream began, ``imagined`` and ``true``
        successes among them,
        and ``both``: dreams that were solved and truly so, by the end of the same chunk.
    """
    n = real.spec.num_envs
    policy = load(path, real)
    generator = torch.Generator().manual_seed(seed)
    inits = first_inits(real.spec, n)
    seen = [real.reset(init=inits)]
    taken = []
    over = torch.zeros(n, dtype=torch.bool)
    for _ in range(after):
        taken.append(policy.sample(seen[-1], generator=generator, mode="eval").actions)
        step = real.step(taken[-1])
        seen.append(step.obs)
        over |= step.done
    horizon = sum(chunk.shape[1] for chunk in taken)
    obs = dream.dream_from(seen[-1], first=seen[0], previous=seen[max(0, after - 1)], age=horizon)
    imagined, chunks = _dreamt(dream, policy, obs, ~over, generator)
    real.reset(init=inits)
    for chunk in taken:
        real.step(chunk)
    true = torch.zeros_like(over)
    for chunk, going in chunks:
        true |= real.step(chunk).success & going
    counts = {"imagined": imagined, "true": true, "both": imagined & true}
    return {
        "after": after,
        "episodes": int((~over).sum()),
        **{k: int(v.sum()) for k, v in counts.items()},
    }


def _dreamt(
    dream: WorldModelEnv, policy: Any, obs: Obs, running: Tensor, generator: torch.Generator
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Dreams until all that run are over: (N,) bool which were solved, and every chunk with (N,) bool which ran."""
    solved = torch.zeros_like(running)
    chunks = []
    while running.any():
        chunks.append((policy.sample(obs, generator=generator, mode="eval").actions, running))
        step = dream.step(chunks[-1][0])
        obs = step.obs
        solved = solved | (step.success & running)
        running = running & ~step.done
    return solved, chunks


def print_world(result: dict[str, Any]) -> None:
    """The figures of ``evaluate_world`` as text."""
    last = result["by_depth"][-1]
    print(
        f"pictures after {last['steps']} steps: {last['psnr']:.1f} dB PSNR, {last['ssim']:.3f} SSIM"
    )
    print(
        f"  (a still picture has {last['psnr_still']:.1f} dB, the codec alone "
        f"{last['psnr_codec']:.1f} dB)"
    )
    seen = result["outcomes"]
    wrong = seen["false_terminations"]
    failing = "" if wrong is None else f", {wrong:.0%} false successes"
    print(
        f"outcomes of {seen['episodes']} held-out episodes: {seen['solved']:.0%} solved, "
        f"{seen['imagined']:.0%} in the dream; F1 {seen['f1']:.2f}, AUROC "
        f"{seen['auroc']:.2f}{failing}"
    )
    for judge, kinds in result["judged"].items():
        for kind, found in kinds.items():
            values = {name: found[name.lower()]["value"] for name in ("F1", "AUROC", "ECE")}
            known = ", ".join(
                f"{name} {value:.3f}" for name, value in values.items() if value is not None
            )
            ended = found["false_terminations"]
            print(
                f"the {judge} on {kind} moments: {known}; {ended['k']} of {ended['n']} failing "
                "episodes ended as solved"
            )
    if seen := result.get("followed"):
        print(
            f"pictures show the actions that were commanded to within {seen['own']:.1f} times what "
            f"is usual of real ones, and another episode's to within {seen['others']:.1f} times"
        )
    wrong = result["swapped_actions"]
    print(
        f"other episodes' actions: {wrong['solved']:.0%} solved, {wrong['imagined']:.0%} in the "
        "dream"
    )
    if judged := result.get("as_evaluator"):
        for row in judged["policies"]:
            print(f"  {row['policy']}: {row['real']:.0%} real, {row['imagined']:.0%} in the dream")
            for d in row["believed"]:
                print(
                    f"    dreams from chunk {d['after']} on: {d['imagined']} of {d['episodes']} "
                    f"solved, {d['both']} of them truly; the same actions solve {d['true']}"
                )
        print(
            f"policies: Pearson {judged['pearson']:.2f}, Spearman {judged['spearman']:.2f}, MMRV "
            f"{judged['mmrv']:.3f}, mean error {judged['mean_error']:.2f}"
        )
    for row in result["speed"]:
        print(
            f"{row['dreams']:>4} dreams, {row['sampling_steps']} sampling steps: "
            f"{row['steps_per_second']:,.0f} imagined steps/s, {row['frames_per_second']:,.0f} "
            "frames drawn/s"
        )
