"""``write_trajectories``: a data set of pieces as a policy would play them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.build import load_config, load_policy
from embodyrl.data.lerobot_write import DatasetWriter, require_recordable
from embodyrl.data.recording import Recording
from embodyrl.devices import use_device
from embodyrl.errors import UserError
from embodyrl.policy import num_executed
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.env_spec import ORIGIN_FILE
from embodyrl.storage.plain_data import ANYTHING, read_json
from embodyrl.world_models.trajectories.policy_pull import PolicyPull
from embodyrl.world_models.trajectories.trajectory_model import TrajectoryModel

AT_ONCE = 256
"""Pieces that are drawn together."""


def write_trajectories(
    model: str,
    out: str,
    *,
    policy: str = "",
    guidance: float = 1.0,
    episodes: int = 500,
    length: int = 0,
    starts: str = "any",
    steps: int = 32,
    proposals: int = 8,
    seed: int = 0,
    device: str = "auto",
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Writes a LeRobotDataset whose episodes are drawn from a trajectory model.

    Args:
        model: folder of a trajectory model.
        out: folder of the data set.
        policy: checkpoint or run that guides; empty with ``guidance`` 0 alone.
        guidance: power of the policy's probability.
        episodes: how many.
        length: rows of each; 0 is one piece. Longer ones are several pieces, each of which begins
            where the one before ended.
        starts: ``any`` recorded state, or the ``first`` one of recorded episodes.
        steps: of the denoising.
        proposals: chunks of the policy per decision, whose Gaussian guides.
        seed: of all that is drawn.
        device: of model and policy.
        progress: is told how many episodes are drawn.

    Returns:
        ``episodes``, ``rows``, ``solved`` episodes, ``cut``: whether unsolved ones end before an
        episode does, and with a policy ``distance``: how far actions are from the policy's mean, in
        standard deviations of the data (mean square).

    Raises:
        UserError: no model, a policy that does not fit it, or ``out`` exists.
    """
    _check(guidance, policy, episodes, length, starts, steps, proposals)
    # The model, and the policy that guides it.
    where = use_device(device, "--device")
    made = TrajectoryModel.load(model).to(where)
    require_recordable(out, made.spec)
    guide: Any = None
    if policy:
        guide = load_policy(policy, load_config(policy).policy, made.spec, 0, where)
        guide.eval()
        _check_chunks(guide, made)
    first = made.starts
    told = made.told
    if starts == "first":
        first, told = first[made.begins], told[made.begins]
    # Draw many at a time, and write them one after the other.
    generator = torch.Generator().manual_seed(seed)
    count = {"rows": 0, "solved": 0}
    distances: list[float] = []
    with DatasetWriter(out, made.spec, split=made.split, config=made.env) as writer:
        done = 0
        while done < episodes:
            # Where they begin.
            size = min(AT_ONCE, episodes - done)
            chosen = torch.randint(len(first), (size,), generator=generator)
            begins = (first[chosen], told[chosen])
            pull = guide and PolicyPull(guide, made, begins[1], generator, proposals)
            rows, distance = draw_trajectories(
                made, *begins, generator, length=length, steps=steps, pull=pull, guidance=guidance
            )
            distances += [distance] * size
            # A piece is over when the task is solved.
            for row, sentence in zip(rows, begins[1].tolist(), strict=True):
                recording = as_recording(made, row, made.sentences[sentence])
                count["rows"] += len(recording)
                count["solved"] += recording.success
                writer.add(recording)
                done += 1
                progress(done)
    # What was drawn; an episode that ends where a piece does has not failed.
    whole = starts == "first" and length >= made.spec.max_episode_steps
    result: dict[str, Any] = {"episodes": episodes, **count, "cut": not whole}
    if guide is not None:
        result["distance"] = float(np.mean(distances))
    note = {"model": model, "policy": policy, "guidance": guidance, "starts": starts}
    _note(writer.path, note | result)
    return result


def _note(folder: Path, synthetic: dict[str, Any]) -> None:
    """Adds to what a data set says of its origin."""
    file = folder / "meta" / ORIGIN_FILE
    origin = read_json(file, {...: ANYTHING}, "Draw the data set again.")
    write_json(file, origin | {"synthetic": synthetic}, indent=2)


def draw_trajectories(
    model: TrajectoryModel,
    first: Tensor,
    told: Tensor,
    generator: torch.Generator,
    *,
    length: int = 0,
    steps: int = 32,
    pull: PolicyPull | None = None,
    guidance: float = 1.0,
) -> tuple[Tensor, float]:
    """Trajectories (B, length, D) from states (B, S), and the distance to the policy (nan: none)."""
    parts: list[Tensor] = []
    distance = float("nan")
    rows = 0
    length = length or model.length
    while rows < length:
        piece = model.sample(first, told, generator, steps=steps, pull=pull, guidance=guidance)
        # How far the policy is from the first piece.
        if pull is not None and not parts:
            normal = model.normalize(piece)
            mean, _ = pull(normal)
            distance = float((normal[..., model.actions] - mean).square().mean())
        # The next piece begins in the last state of this one.
        more = rows + len(piece[0]) < length
        first = piece[:, -1, : first.shape[1]]
        parts.append(piece[:, :-1] if more else piece[:, : length - rows])
        rows += parts[-1].shape[1]
    return torch.cat(parts, dim=1), distance


def as_recording(model: TrajectoryModel, rows: Tensor, sentence: str) -> Recording:
    """Rows (T, D) up to success, as an episode."""
    rows = rows.cpu()
    solved = rows[:, -1] > 0.5
    end = int(solved.int().argmax()) + 1 if solved.any() else len(rows)
    values = rows[:end].numpy().astype(np.float32)
    state = model.spec.proprio_dim
    return Recording(
        images={},
        proprio=values[:, :state],
        actions=values[:, model.actions].clip(-1.0, 1.0),
        reward=values[:, -2],
        solved=values[:, -1] > 0.5,
        init=-1,
        task=model.spec.tasks[0],
        instruction=sentence,
    )


def _check(
    guidance: float,
    policy: str,
    episodes: int,
    length: int,
    starts: str,
    steps: int,
    proposals: int,
) -> None:
    """Refuses what cannot be drawn, and what would not be read."""
    if guidance < 0:
        raise UserError(
            f"--guidance is {guidance:g}; it must not be negative. 0 is the data, 1 the policy's "
            "probability times the data's."
        )
    if guidance and not policy:
        raise UserError(
            f"--guidance {guidance:g} needs a policy that guides: name one (--policy RUN). For "
            "trajectories like the recorded ones, set --guidance 0."
        )
    if policy and not guidance:
        raise UserError("With --guidance 0 no policy guides: leave --policy out.")
    if starts not in ("any", "first"):
        raise UserError(f"--starts is {starts!r}; it must be any or first.")
    least = {"--episodes": (episodes, 1), "--length": (length, 0), "--steps": (steps, 2)}
    for name, (value, low) in (least | {"--proposals": (proposals, 2)}).items():
        if value < low:
            raise UserError(f"{name} is {value}; it must be at least {low}.")


def _check_chunks(policy: Any, model: TrajectoryModel) -> None:
    """Refuses a policy whose chunks are longer than a piece."""
    if (horizon := num_executed(policy.config)) >= model.length:
        raise UserError(
            f"The policy decides once in {horizon} actions, and a piece of the model has "
            f"{model.length} rows, so no transition would fit. Train a model of longer pieces "
            f"(--length {4 * horizon})."
        )
