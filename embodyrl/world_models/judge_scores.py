"""Scores what judges dreams on held-out episodes: success head, reflector, foresight."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.functional.held_out import auroc
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.reflectors.base import Reflector
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.reflectors.labelled_episodes import LabelledEpisodes
from embodyrl.world_models.reflectors.score import judge_episodes, score_probabilities
from embodyrl.world_models.replay import (
    dreams_at,
    frames_after_chunks,
    replay,
    trusted_success,
)


@torch.no_grad()
def score_judges(
    model: WorldModel, clips: Clips, starts: Tensor, reflector: Reflector | None = None
) -> dict[str, Any]:
    """Scores the success head, and a reflector, on the moments after each chunk.

    What counts as solved in a dream is what was solved in the real episode.

    Args:
        model: the world model.
        clips: with latents.
        starts: (E,) first frames; the episodes' own actions are dreamt again.
        reflector: to be scored as well.

    Returns:
        ``head`` and, where one is given, ``reflector``, each with ``real`` and ``imagined``; see
        ``reflectors.score.score_probabilities``.
    """
    dreams, lasted = replay(model, clips, starts)
    # Everything below is episode after episode: the first frame, then the one after each chunk.
    after = frames_after_chunks(clips, starts, model.horizon, len(dreams))
    exists = torch.cat([torch.ones(1, len(starts), dtype=torch.bool), lasted])
    keep = exists.T.flatten()
    frames = torch.cat([starts[None], after]).T.flatten()[keep]

    def by_episode(first: Tensor, later: list[Tensor]) -> np.ndarray:
        moments = torch.stack([first.cpu(), *(x.cpu() for x in later)])
        return moments.transpose(0, 1).flatten(0, 1)[keep].numpy()

    label = (clips.solved[frames] & (frames != clips.start[frames])).numpy()  # not the first frames
    episode = np.repeat(np.arange(len(starts)), exists.sum(0).numpy())
    sentence = clips.sentence[frames].numpy()

    def labelled(pictures: dict[str, np.ndarray]) -> LabelledEpisodes:
        rows = np.arange(len(label))
        return LabelledEpisodes(pictures, rows, label, episode, sentence, clips.sentences)

    def scores(prob: np.ndarray, calibration: Calibration) -> dict[str, Any]:
        return score_probabilities(prob.astype(np.float64), labelled({}), calibration)

    # The success head. It judges no first frames.
    unjudged = torch.full((len(starts),), float("nan"))
    on_real = [model.success_probability(dreams_at(model, clips, rows)) for rows in after]
    on_dreams = list(trusted_success(model, dreams))
    result = {
        "head": {
            "real": scores(by_episode(unjudged, on_real), model.calibration),
            "imagined": scores(by_episode(unjudged, on_dreams), model.calibration),
        }
    }
    if reflector is None:
        return result
    # The reflector, which is shown the frames.
    dreamt = by_episode(clips.frames(starts), [model.codec.decode(d.latent) for d in dreams])
    films = {"real": clips.frames(frames).numpy(), "imagined": dreamt}
    result["reflector"] = {}
    for kind, film in films.items():
        pictures = {name: film[:, view] for view, name in enumerate(model.spec.cameras)}
        episodes = labelled(pictures)
        prob = judge_episodes(reflector, episodes, chunk=1)
        prob[episodes.first_frames] = np.nan
        result["reflector"][kind] = scores(prob, reflector.calibration)
    return result


@torch.no_grad()
def score_foresight(model: WorldModel, clips: Clips, starts: Tensor) -> dict[str, Any]:
    """How well the state model tells, half-way, which held-out episodes will be solved.

    It asks the nets by which proposals are ranked about real moments, so it needs no simulator. But
    it compares one episode with another, and knowing an easy start from a hard one suffices for
    that; what counts for a choice is the order within one state (``dreams.ranking``).

    Args:
        model: with a state model that has prospects.
        clips: with the states that it reads or finds.
        starts: (E,) first frames.

    Returns:
        ``episodes`` and ``solved``, how many of them, and ``auroc``, None where all end alike.
    """
    assert model.state is not None and clips.succeeded is not None
    # The frame in the middle of each episode, and what the model knows of it.
    rows = (starts + clips.end[starts]) // 2
    state = clips.full_state(rows)
    assert state is not None
    words = embed_sentences(clips.sentences)[clips.sentence[rows]]
    # Will it be solved?
    logits = model.state.prospect_logits(state.to(model.device), words.to(model.device))
    will_be = clips.succeeded[rows].numpy()
    found: dict[str, Any] = {"episodes": len(starts), "solved": int(will_be.sum()), "auroc": None}
    if 0 < found["solved"] < len(starts):
        found["auroc"] = auroc(logits.sigmoid().mean(0).cpu().numpy(), will_be)
    return found
