"""A step for LeRobot's pre-processors that turns pictures, and puts their colours in order.

``embodyrl export --profile`` writes it into a checkpoint that was trained on other pictures than the
family shows. LeRobot knows it once this module is imported, which its command line does with
``--env.discover_packages_path=embodyrl.policies.vla.picture_step``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lerobot.processor import ObservationProcessorStep, ProcessorStepRegistry

from embodyrl.policies.vla.processors import IMAGES
from embodyrl.storage.pretrained import PICTURE_STEP

__path__: list[str] = []
"""LeRobot looks for submodules of what ``discover_packages_path`` names; there are none."""


@ProcessorStepRegistry.register(name=PICTURE_STEP)
@dataclass
class PictureStep(ObservationProcessorStep):
    """Turns all pictures (..., 3, h, w) of an observation.

    Attributes:
        rows: exchange top and bottom.
        columns: exchange left and right.
        channels: reverse the order of the colours.
    """

    rows: bool = False
    columns: bool = False
    channels: bool = False

    def observation(self, observation: Any) -> Any:
        """The observation with its pictures turned."""
        wanted = ((-2, self.rows), (-1, self.columns), (-3, self.channels))
        dims = [dim for dim, flip in wanted if flip]
        return {
            key: torch.flip(value, dims) if key.startswith(IMAGES) else value
            for key, value in observation.items()
        }

    def get_config(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"rows": self.rows, "columns": self.columns, "channels": self.channels}

    def transform_features(self, features: Any) -> Any:
        """Keys and shapes stay."""
        return features
