"""How a finder is taught, by hindsight, and what it finds in recorded episodes.

The labels are those of ``algorithms.hindsight``: where the robot is at the end of an episode that
is solved, and on the way there. Everything comes from the recorded episodes alone: pictures,
proprioception, and which of them were solved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.functional.hindsight import later_steps
from embodyrl.policies.localiser import AGREEMENT, ENDS, ON_THE_WAY
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel

FEWEST = 3
"""Solved episodes from which on something can be learned."""


def frames_on_the_way(clips: Clips, rows: Tensor) -> Tensor:
    """Those of ``rows`` that lead to a success, once each.

    Raises:
        UserError: there are too few solved episodes, or see ``require_moving_pictures``.
    """
    assert clips.succeeded is not None
    rows = rows.unique()
    solved = rows[clips.succeeded[rows]]
    episodes = len(clips.start[solved].unique())
    if episodes < FEWEST:
        raise UserError(
            f"{episodes} of the episodes to learn from are solved, and where they led is all that "
            f"says what matters in a picture. Record {FEWEST} successes or more: demonstrations "
            "(`embodyrl collect`), or a better policy's. Or train with state=false."
        )
    require_moving_pictures(clips, solved)
    return solved[solved <= _last_frames(clips, solved)]


def painting_loss(model: WorldModel, clips: Clips, rows: Tensor) -> Tensor:
    """Error of what proprioception explains of B frames, in pixel values of [-1, 1]."""
    assert model.finder is not None
    obs = clips.obs(rows).to(model.device)
    with _in_float32(model):
        return model.finder.localiser.painting_loss(obs)


def hindsight_loss(model: WorldModel, clips: Clips, rows: Tensor, pairs: Tensor) -> Tensor:
    """The error of the places where ``rows`` led, and how far apart frames of ``pairs`` lead.

    Args:
        model: whose finder is trained.
        clips: the data.
        rows: (B,) of ``frames_on_the_way``.
        pairs: (M,) frames of any episode; each is compared with that of a chunk later.
    """
    assert model.finder is not None
    localiser = model.finder.localiser
    # Where the robot was later.
    steps = later_steps(
        rows,
        clips.start[rows],
        _last_frames(clips, rows),
        ends=ENDS,
        apart=model.horizon,
        on_the_way=ON_THE_WAY,
    )
    places = clips.proprio[steps].to(model.device)
    obs = [
        clips.obs(part).to(model.device)
        for part in (rows, pairs, _chunk_later(model, clips, pairs))
    ]
    with _in_float32(model):
        loss = localiser.hindsight_loss(obs[0], places)
        # Where an episode ends may not move from chunk to chunk.
        return loss + AGREEMENT * localiser.difference(obs[1], obs[2])


@torch.no_grad()
def find_states(model: WorldModel, clips: Clips, size: int = 256) -> Tensor:
    """(F, S): what the finder sees in every frame."""
    assert model.finder is not None
    batches = torch.arange(len(clips)).split(size)
    return torch.cat([model.finder(clips.obs(rows).to(model.device)).cpu() for rows in batches])


def _in_float32(model: WorldModel) -> torch.autocast:
    """In bfloat16 a keypoint would be off by pixels."""
    return torch.autocast(model.device.type, enabled=False)


def _chunk_later(model: WorldModel, clips: Clips, rows: Tensor) -> Tensor:
    """(B,) the frames a chunk after ``rows``, or the last ones of their episodes."""
    return torch.minimum(rows + model.horizon, clips.end[rows] - 1)


def _last_frames(clips: Clips, rows: Tensor) -> Tensor:
    """(B,) the first solved frame of each frame's episode; its last one where none is."""
    number = torch.arange(len(clips))
    begins = clips.start == number
    episode = begins.long().cumsum(0) - 1
    last = clips.end[begins] - 1
    first_solved = torch.where(clips.solved, number, len(clips))
    lowest = torch.full_like(last, len(clips)).scatter_reduce(0, episode, first_solved, "amin")
    return torch.minimum(last, lowest)[episode[rows]]


def require_moving_pictures(clips: Clips, rows: Tensor) -> None:
    """Refuses data of a camera that does not run, judged by some 64 of their pictures.

    Args:
        clips: the data.
        rows: frames of several episodes.

    Raises:
        UserError: all their pictures are the same.
    """
    some = clips.frames(rows[:: max(1, len(rows) // 64)])
    if (some == some[:1]).all():
        raise UserError(
            "The pictures of the episodes are all the same, so nothing can be learned from them. "
            "Is the camera running, and does it see the task? Record them again."
        )
