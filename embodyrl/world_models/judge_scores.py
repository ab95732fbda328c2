"""How well what judges dreams judges: the same held-out episodes, as they were and as they are dreamt again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.world_models.calibrate import after_chunks, believed, replay, stand
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.reflectors.base import Reflector
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.reflectors.labelled_episodes import Episodes
from embodyrl.world_models.reflectors.score import judge_episodes, score


@torch.no_grad()
def judged(
    model: WorldModel, clips: Clips, starts: Tensor, reflector: Reflector | None = None
) -> dict[str, Any]:
    """The success head, and a reflector, on the moments after each chunk.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames; the episodes' own actions are dreamt.
        reflector: to be scored besides.

    Returns:
        ``head`` and, where one is given, ``reflector``, each with ``real`` and ``imagined``; see
        ``reflectors.evaluate.score``. What is solved is what was so in the real episode.
    """
    dreams, lasted = replay(model, clips, starts)
    rows = torch.cat([starts[None], after_chunks(clips, starts, model.horizon, len(dreams))])
    kept = torch.cat([torch.ones(1, len(starts), dtype=torch.bool), lasted])
    # Everything below is episode after episode: its first frame, then the one after each chunk.
    flat = rows.T.flatten()
    keep = kept.T.flatten()
    frames = flat[keep]

    def in_order(first: Tensor, later: list[Tensor]) -> np.ndarray:
        every = torch.stack([first.cpu(), *(x.cpu() for x in later)])
        return every.transpose(0, 1).flatten(0, 1)[keep].numpy()

    unseen = torch.full((len(starts),), float("nan"))
    heads = {
        "real": in_order(unseen, [model.solved(stand(model, clips, row)) for row in rows[1:]]),
        "imagined": in_order(unseen, list(believed(model, dreams))),
    }
    label = (
        clips.solved[frames] & (frames != clips.start[frames])
    ).numpy()  # first frames are not judged
    order = np.repeat(np.arange(len(starts)), kept.sum(0).numpy())
    sentence = clips.sentence[frames].numpy()

    def episodes(pictures: dict[str, np.ndarray]) -> Episodes:
        return Episodes(pictures, np.arange(len(label)), label, order, sentence, clips.sentences)

    def scored(prob: np.ndarray, calibration: Calibration) -> dict[str, Any]:
        return score(prob.astype(np.float64), episodes({}), calibration)

    result = {"head": {kind: scored(prob, model.calibration) for kind, prob in heads.items()}}
    if reflector is None:
        return result
    first = clips.frames(starts)
    every = list(model.spec.cameras)
    shown = [model.codec.decode(dream.latent) for dream in dreams]
    films = {"real": clips.frames(frames).numpy(), "imagined": in_order(first, shown)}
    result["reflector"] = {}
    for kind, film in films.items():
        seen = episodes({name: film[:, every.index(name)] for name in every})
        prob = judge_episodes(reflector, seen, chunk=1)
        prob[seen.first_frames] = np.nan
        result["reflector"][kind] = scored(prob, reflector.calibration)
    return result
