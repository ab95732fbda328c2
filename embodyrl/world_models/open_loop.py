"""Measures a world model on held-out episodes: pictures, obedience to actions, and speed.

quality_by_depth      pictures after each chunk, open loop
action_following      whether pictures show the commanded actions
wrong_action_test     whether success follows from the actions
measure_speed         imagined steps and decoded frames a second
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embodyrl.env import VecEnv
from embodyrl.world_models.calibrate import outcomes
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream_metrics import psnr, ssim
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import CONTEXT
from embodyrl.world_models.replay import replay, replay_action_error, replay_success


@torch.no_grad()
def quality_by_depth(model: WorldModel, clips: Clips, starts: Tensor) -> list[dict[str, float]]:
    """PSNR and SSIM after each chunk, open loop from the first frame.

    For comparison, each row also has the PSNR of the codec alone (``psnr_codec``) and of the first
    frame shown again (``psnr_still``).
    """
    assert clips.latents is not None
    dreams, _ = replay(model, clips, starts)
    rows = []
    for number, dream in enumerate(dreams, start=1):
        # The episodes that last until here.
        at = starts + number * model.horizon
        alive = at < clips.end[starts]
        if int(alive.sum()) < 2:
            break
        # Their real frames, and what they are compared with.
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


def action_following(model: WorldModel, clips: Clips, starts: Tensor) -> dict[str, float]:
    """How far the pictures of dreams are from showing the commanded actions.

    The unit is that of ``InverseDynamics.error``: 1 is usual for real pictures.

    Returns:
        ``own``: held-out episodes dreamt again. ``others``: the same dreams compared with another
        episode's actions, which is what pictures would have that ignore their actions. Means over
        chunks.
    """
    own, lasted = replay_action_error(model, clips, starts)
    others, _ = replay_action_error(model, clips, starts, starts.roll(1))
    return {"own": float(own[lasted].mean()), "others": float(others[lasted].mean())}


def wrong_action_test(
    model: WorldModel, clips: Clips, starts: Tensor, real: VecEnv
) -> dict[str, float]:
    """Every episode's actions in another one's initial state, dreamt and simulated.

    A model fails here that shows success because the data mostly do, and not because of the
    actions.
    """
    starts = starts[clips.init[starts] >= 0]
    source = starts.roll(1)
    prob, lasted = replay_success(model, clips, starts, source)
    n = real.spec.num_envs
    groups = zip(starts.split(n), source.split(n), strict=True)
    truth = torch.cat([_simulate(real, clips, a, b) for a, b in groups])
    return outcomes(model.calibration, prob, lasted, truth)


def _simulate(real: VecEnv, clips: Clips, starts: Tensor, source: Tensor) -> Tensor:
    """(E,) bool: whether the actions of ``source`` solve the initial states of ``starts``."""
    n = real.spec.num_envs
    count = len(starts)
    # The envs that are not needed repeat the first state.
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
def measure_speed(
    model: WorldModel, sizes: Sequence[int] = (1, 16, 64, 256), seconds: float = 2.0
) -> list[dict[str, float]]:
    """Imagined control steps and decoded frames a second.

    Args:
        model: the world model.
        sizes: numbers of dreams in a batch.
        seconds: that each measurement lasts at least.

    Returns:
        A row for each number of dreams and of sampling steps; 0 sampling steps give the mean, and
        only a stochastic model has more.
    """
    env = model.spec
    rows = []
    for n in sizes:
        c, y, x = model.codec.latent_shape
        context = torch.randn(n, CONTEXT, len(env.cameras), c, y, x, device=model.device)
        words = torch.zeros(n, model.success.config["word_dim"], device=model.device)
        proprio = torch.zeros(n, env.proprio_dim, device=model.device)
        state = torch.zeros(n, model.state_dim, device=model.device)
        dream = model.begin(context, proprio, words, state)
        actions = torch.zeros(n, model.horizon, env.action_dim, device=model.device)
        count = torch.full((n,), model.horizon, device=model.device)
        frames = _calls_per_second(partial(model.frames, dream), seconds) * n
        for steps in (0, 1, 2, 4) if model.stochastic else (0,):
            sample = {"sample": torch.randn_like(dream.latent), "steps": steps} if steps else {}
            imagine = partial(model.imagine, dream, actions, count, **sample)
            rate = _calls_per_second(imagine, seconds) * n
            rows.append(
                {
                    "dreams": n,
                    "sampling_steps": steps,
                    "steps_per_second": rate * model.horizon,
                    "latent_frames_per_second": rate,
                    "frames_per_second": frames,
                }
            )
    return rows


def _calls_per_second(call: Callable[[], Any], seconds: float) -> float:
    """Calls a second, after a first one that does not count."""
    call()
    began = time.perf_counter()
    times = 0
    while time.perf_counter() - began < seconds:
        call()
        times += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return times / (time.perf_counter() - began)
