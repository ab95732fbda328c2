"""What a world model is worth, measured on episodes and policies it was not trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embodyrl.env import VecEnv
from embodyrl.world_models.calibrate import outcomes, probabilities, replay, strayed
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream_metrics import psnr, ssim
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import CONTEXT


@torch.no_grad()
def by_depth(model: WorldModel, clips: Clips, starts: Tensor) -> list[dict[str, float]]:
    """Open loop from the first frame: PSNR and SSIM after each chunk, beside the codec's own and a still picture's."""
    assert clips.latents is not None
    dreams, _ = replay(model, clips, starts)
    rows = []
    for number, dream in enumerate(dreams, start=1):
        at = starts + number * model.horizon
        alive = at < clips.end[starts]
        if int(alive.sum()) < 2:
            break
        real = clips.frames(at[alive]).flatten(0, 1)
        first = clips.frames(starts[alive]).flatten(0, 1)
        shown = model.codec.decode(dream.latent[alive].cpu()).flatten(0, 1)
        coded = model.codec.decode(clips.latents[at[alive]].float()).flatten(0, 1)
        rows.append(
            {
                "steps": number * model.horizon,
                "episodes": int(alive.sum()),
                "psnr": float(psnr(shown, real).mean()),
                "ssim": float(ssim(shown, real).mean()),
                "psnr_codec": float(psnr(coded, real).mean()),
                "psnr_still": float(psnr(first, real).mean()),
            }
        )
    return rows


def followed(model: WorldModel, clips: Clips, starts: Tensor) -> dict[str, float]:
    """Whether dreams show what was commanded: how far pictures stray from the actions, 1 being usual for real ones.

    Returns:
        ``own`` of held-out episodes dreamt again, and ``others``: the same dreams beside another
        episode's actions, which is what pictures would have that take no notice of theirs. Means
        over chunks.
    """
    own, lasted = strayed(model, clips, starts)
    others, _ = strayed(model, clips, starts, starts.roll(1))
    return {"own": float(own[lasted].mean()), "others": float(others[lasted].mean())}


def swapped(model: WorldModel, clips: Clips, starts: Tensor, real: VecEnv) -> dict[str, float]:
    """The wrong-action test: every episode's actions in another one's initial state, dreamt and simulated.

    A model that shows success because that is what the data mostly show, and not because of the
    actions, fails here.
    """
    starts = starts[clips.init[starts] >= 0]
    source = starts.roll(1)
    prob, lasted = probabilities(model, clips, starts, source)
    groups = zip(starts.split(real.spec.num_envs), source.split(real.spec.num_envs), strict=True)
    truth = torch.cat([_simulate(real, clips, a, b) for a, b in groups])
    return outcomes(model.calibration, prob, lasted, truth)


def _simulate(real: VecEnv, clips: Clips, starts: Tensor, source: Tensor) -> Tensor:
    """(E,) bool: whether the actions recorded from ``source`` solve the initial states of ``starts``."""
    n = real.spec.num_envs
    count = len(starts)
    inits = clips.init[starts].tolist()
    real.reset(init=inits + inits[:1] * (n - count))
    solved = torch.zeros(n, dtype=torch.bool)
    for t in range(int((clips.end[source] - source).max())):
        row = torch.minimum(source + t, clips.end[source] - 1)
        going = source + t < clips.end[source]
        actions = torch.zeros(n, 1, clips.actions.shape[1])
        actions[:count, 0] = clips.actions[row]
        step = real.step(actions)
        solved[:count] |= step.success.cpu()[:count] & going
    return solved[:count]


@torch.no_grad()
def speed(
    model: WorldModel, sizes: Sequence[int] = (1, 16, 64, 256), seconds: float = 2.0
) -> list[dict[str, float]]:
    """Imagined control steps a second, and frames drawn a second, by the number of dreams and of sampling steps.

    0 sampling steps are the mean; more than that only a stochastic model has.
    """
    env = model.spec
    rows = []
    for n in sizes:
        c, y, x = model.codec.latent_shape
        context = torch.randn(n, CONTEXT, len(env.cameras), c, y, x, device=model.device)
        words = torch.zeros(n, model.success.config["word_dim"], device=model.device)
        zeros = (
            torch.zeros(n, dim, device=model.device) for dim in (env.proprio_dim, model.state_dim)
        )
        dream = model.begin(context, next(zeros), words, next(zeros))
        actions = torch.zeros(n, model.horizon, env.action_dim, device=model.device)
        count = torch.full((n,), model.horizon, device=model.device)
        frames = _rate(partial(model.frames, dream), seconds) * n
        for steps in (0, 1, 2, 4) if model.stochastic else (0,):
            sample = {"sample": torch.randn_like(dream.latent), "steps": steps} if steps else {}
            rate = _rate(partial(model.imagine, dream, actions, count, **sample), seconds) * n
            row = {"dreams": n, "sampling_steps": steps, "steps_per_second": rate * model.horizon}
            rows.append(row | {"latent_frames_per_second": rate, "frames_per_second": frames})
    return rows


def _rate(once: Callable[[], Any], seconds: float) -> float:
    """Calls a second, after a first one that does not count."""
    once()
    began = time.perf_counter()
    times = 0
    while time.perf_counter() - began < seconds:
        once()
        times += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return times / (time.perf_counter() - began)
