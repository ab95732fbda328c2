"""A camera behind a ROS topic, as the pre-flight check watches it."""

from __future__ import annotations

from collections.abc import Mapping

from embodyrl.functional.pictures import Image
from embodyrl.real_robot.cameras.camera import CameraPicture


class TopicCamera:
    """See ``Camera``. It may be a simulated one, and nobody said at which rate it runs.

    Args:
        name: the policy's, for messages.
        images: name -> (s, when the newest image was taken, and the image), kept up by the robot.
    """

    fps = 0.0
    noisy = False
    has_depth = False
    problem = ""

    def __init__(self, name: str, images: Mapping[str, tuple[float, Image]]) -> None:
        self.name = name
        self._images = images
        self._last: CameraPicture | None = None

    @property
    def newest(self) -> CameraPicture | None:
        """See ``Camera``; the same object as long as no new image came."""
        found = self._images.get(self.name)
        if found is not None and (self._last is None or found[1] is not self._last.image):
            self._last = CameraPicture(*found)
        return self._last

    def close(self) -> None:
        """See ``Camera``; its topic is the bus's."""
