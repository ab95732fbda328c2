"""World models against the real env: what ``embodyrl world eval`` measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from embodyrl import checkpoint
from embodyrl.build import load_config, make_env, make_policy
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.evaluate import evaluate, first_inits
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.evaluate import by_depth, speed, swapped
from embodyrl.world_models.judge import outcomes, probabilities, solved_after
from embodyrl.world_models.measures import mmrv, pearson, spearman
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.train import encode


def evaluate_world(
    path: str, data: Sequence[str], policies: Sequence[str] = (), *, held_out: float = 0.0, episodes: int = 256
) -> dict[str, Any]:
    """All measures of a world model.

    Args:
        path: folder of the model.
        data: data sets; with ``held_out`` only that share of their episodes, the one that training kept back.
        policies: checkpoints to compare in the dream and in the real env; none skips it.
        held_out: as in training; 0 uses all episodes.
        episodes: per policy.
    """
    model = WorldModel.load(path)
    clips = Clips.load(data, spec=None)
    starts = clips.starts
    if held_out:
        starts = starts[clips.held_out(held_out)[starts]]
    clips.latents = encode(model, clips)
    real = dataclasses.replace(WorldModelConfig(model=path).for_evaluation("eval"), num_envs=64)
    prob, lasted = probabilities(model, clips, starts)
    solved = solved_after(clips, starts, model.horizon, len(prob)) & lasted
    result: dict[str, Any] = {
        "model": path,
        "by_depth": by_depth(model, clips, starts),
        "outcomes": outcomes(model.calibration, prob, lasted, solved.any(0)),
    }
    train_split = make_env(dataclasses.replace(real, split=model.env["split"]))
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

    Args:
        model_path: folder of the world model.
        policies: at least three checkpoints or runs of different quality.
        real: config of the real env.
        episodes: in each.
        seed: of the policies' noise.

    Returns:
        ``policies`` with both rates each, ``pearson``, ``spearman``, ``mmrv`` and ``mean_error``.
    """
    if len(policies) < 3:
        raise UserError(f"A correlation over {len(policies)} policies says nothing; give at least three checkpoints.")
    rows = []
    config = WorldModelConfig(model=model_path, num_envs=64, split="eval")
    envs: dict[str, Any] = {"imagined": WorldModelEnv(config), "real": make_env(real)}
    try:
        for path in policies:
            policy = make_policy(load_config(path).policy, envs["real"].spec, seed)
            checkpoint.load_policy(path, policy, envs["real"].spec)
            rates = {name: _rate(env, policy, episodes, seed) for name, env in envs.items()}
            rows.append({"policy": path, **rates})
    finally:
        for env in envs.values():
            env.close()
    imagined, truth = (torch.tensor([row[k] for row in rows]) for k in ("imagined", "real"))
    return {
        "policies": rows,
        "pearson": pearson(imagined, truth),
        "spearman": spearman(imagined, truth),
        "mmrv": mmrv(imagined, truth),
        "mean_error": float((imagined - truth).abs().mean()),
    }


def _rate(env: VecEnv, policy: Any, episodes: int, seed: int) -> float:
    result = evaluate(env, policy, first_inits(env.spec, episodes), seed=seed)
    return result.successes / len(result.episodes)


def print_world(result: dict[str, Any]) -> None:
    """The figures of ``evaluate_world`` as text."""
    last = result["by_depth"][-1]
    print(f"pictures after {last['steps']} steps: {last['psnr']:.1f} dB PSNR, {last['ssim']:.3f} SSIM")
    print(f"  (a still picture has {last['psnr_still']:.1f} dB, the codec alone {last['psnr_codec']:.1f} dB)")
    seen = result["outcomes"]
    print(
        f"outcomes of {seen['episodes']} held-out episodes: {seen['solved']:.0%} solved, {seen['imagined']:.0%} in the "
        f"dream; F1 {seen['f1']:.2f}, AUROC {seen['auroc']:.2f}, {seen['false_terminations']:.0%} false successes"
    )
    wrong = result["swapped_actions"]
    print(f"other episodes' actions: {wrong['solved']:.0%} solved, {wrong['imagined']:.0%} in the dream")
    if judged := result.get("as_evaluator"):
        for row in judged["policies"]:
            print(f"  {row['policy']}: {row['real']:.0%} real, {row['imagined']:.0%} in the dream")
        print(
            f"policies: Pearson {judged['pearson']:.2f}, Spearman {judged['spearman']:.2f}, MMRV {judged['mmrv']:.3f}, "
            f"mean error {judged['mean_error']:.2f}"
        )
    for row in result["speed"]:
        print(
            f"{row['dreams']:>4} dreams: {row['steps_per_second']:,.0f} imagined steps/s, "
            f"{row['frames_per_second']:,.0f} frames drawn/s"
        )
