"""``GoalReflector``: how near a frame is to frames in which the task was solved.

Compare RoboScape-R. It needs no training, and is as good as its features: pixels say little if a
solved task can look many ways.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from embodyrl.errors import UserError
from embodyrl.world_models.reflectors.base import check_window
from embodyrl.world_models.reflectors.calibration import Calibration, platt
from embodyrl.world_models.reflectors.labelled_episodes import LabelledEpisodes
from embodyrl.world_models.reflectors.score import judge_episodes

Features = Callable[[UInt8[Tensor, "b h w 3"]], Float[Tensor, "b d"]]
TENSORS = "goals.safetensors"
SETTINGS = "goals.json"


@dataclass(frozen=True)
class GoalConfig:
    """Settings of ``fit_goals``."""

    features: str = "pixels"
    """``pixels``, or a Hugging Face vision model such as DINOv2: a folder or a hub id."""
    cameras: tuple[str, ...] = ()
    """Empty means all in the data."""
    window: int = 3
    max_goals: int = 64
    """Goal images kept per instruction."""
    seed: int = 0
    """Of the choice of episodes that give goals."""


class GoalReflector:
    """See the module, and ``Reflector`` for the interface.

    An instruction without a goal cannot be judged: NaN.

    Args:
        config: that the goals were made with.
        goals: sentence -> (G, D) features of frames in which it was solved.
        slope: of the logistic function of distance; below 0.
        bias: its logit at distance 0.
        device: where a vision model runs.
    """

    def __init__(
        self,
        config: GoalConfig,
        goals: Mapping[str, Tensor],
        slope: float,
        bias: float,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.goals = dict(goals)
        self.slope = slope
        self.bias = bias
        self.window = config.window
        self.cameras = config.cameras
        self.calibration = Calibration()
        self._extract = make_features(config.features, device)

    def features(self, views: list[Tensor]) -> Float[Tensor, "b d"]:
        """Features (B, D) of frames, one (B, h, w, 3) uint8 per camera, on the CPU."""
        return torch.cat([self._extract(view).float().cpu() for view in views], dim=1)

    @torch.no_grad()
    def judge(
        self, frames: Mapping[str, Tensor], instruction: list[str], new: int = 0
    ) -> Float[Tensor, "n t"]:
        """See ``Reflector``."""
        n, t, wanted = check_window(self, frames, instruction, new)
        out = torch.full((n, t), math.nan)
        views = [frames[name][:, t - wanted :].flatten(0, 1) for name in self.cameras]
        features = self.features(views).unflatten(0, (n, wanted))
        for row, sentence in enumerate(instruction):
            if sentence in self.goals:
                nearest = torch.cdist(features[row], self.goals[sentence]).amin(1)
                out[row, t - wanted :] = torch.sigmoid(self.slope * nearest + self.bias)
        return out

    def save(self, folder: str | Path) -> None:
        """Writes goals and settings into a folder that exists."""
        sentences = list(self.goals)
        save_file(
            {str(k): self.goals[s].contiguous() for k, s in enumerate(sentences)},
            Path(folder) / TENSORS,
        )
        told = {
            "config": asdict(self.config),
            "sentences": sentences,
            "slope": self.slope,
            "bias": self.bias,
        }
        (Path(folder) / SETTINGS).write_text(json.dumps(told, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> GoalReflector:
        """Reads what ``save`` wrote."""
        told = json.loads((Path(folder) / SETTINGS).read_text())
        tensors = load_file(Path(folder) / TENSORS)
        config = GoalConfig(**(told["config"] | {"cameras": tuple(told["config"]["cameras"])}))
        goals = {sentence: tensors[str(k)] for k, sentence in enumerate(told["sentences"])}
        return cls(config, goals, told["slope"], told["bias"], device)


def fit_goals(episodes: LabelledEpisodes, config: GoalConfig, device: str = "cpu") -> GoalReflector:
    """Takes goals from one half of the episodes, and fits the logistic function on the other half.

    Args:
        episodes: the last frame of an episode that ends solved can be a goal.
        config: the settings.
        device: where a vision model runs.

    Raises:
        UserError: no episode ends solved, or distances say nothing about success.
    """
    config = replace(config, cameras=config.cameras or tuple(episodes.frames))
    source, rest = episodes.split(0.5, config.seed)
    reflector = GoalReflector(config, {}, -1.0, 0.0, device)
    last = np.append(source.first_frames[1:], len(source)) - 1
    for number, sentence in enumerate(source.sentences):
        ends = last[source.label[last] & (source.sentence[last] == number)][: config.max_goals]
        if len(ends):
            reflector.goals[sentence] = reflector.features(
                [
                    torch.from_numpy(source.frames[name][source.rows[ends]])
                    for name in config.cameras
                ]
            )
    if not reflector.goals:
        raise UserError(
            f"None of {len(last)} episodes ends with the task solved, so there is no goal. Collect "
            "episodes with --past-success 5."
        )
    # With slope -1 and bias 0 the logit is minus the distance.
    nearness = torch.logit(torch.from_numpy(judge_episodes(reflector, rest)))
    seen = torch.isfinite(nearness)
    slope, reflector.bias = platt(nearness[seen], rest.label[seen.numpy()])
    reflector.slope = -slope
    return reflector


def make_features(name: str, device: str = "cpu") -> Features:
    """A function from frames (B, h, w, 3) to features (B, D).

    They are scaled so that distances do not grow with D.

    Raises:
        UserError: no such model.
    """
    if name == "pixels":
        return _pixels
    from transformers import AutoImageProcessor, AutoModel

    try:
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        model = AutoModel.from_pretrained(name, trust_remote_code=False).to(device).eval()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{name!r} is neither 'pixels' nor a vision model that can be loaded ({reason})."
        ) from error

    @torch.no_grad()
    def extract(frames: Tensor) -> Tensor:
        inputs = processor(images=list(frames.permute(0, 3, 1, 2).cpu()), return_tensors="pt")
        hidden = model(inputs["pixel_values"].to(device)).last_hidden_state
        tokens = F.normalize(hidden.flatten(2).float(), dim=-1)
        return tokens.flatten(1) / tokens.shape[1] ** 0.5

    return extract


def _pixels(frames: Tensor) -> Tensor:
    small = F.adaptive_avg_pool2d(frames.permute(0, 3, 1, 2).float() / 255, 16)
    return small.flatten(1) / math.prod(small.shape[1:]) ** 0.5
