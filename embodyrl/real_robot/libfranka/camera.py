"""A camera that OpenCV reads, in a thread of its own."""

from __future__ import annotations

import threading
import time

import numpy as np

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.functional.pictures import Image, fit


class Camera:
    """The newest image of a camera.

    Args:
        name: for messages.
        source: what OpenCV opens: a number, a device's path or an address; a file is played once.
        size: (height, width) that images are cut and scaled to.

    Attributes:
        newest: when the newest image came (``time.monotonic``), and the image.

    Raises:
        MissingDependencyError: there is no OpenCV.
        UserError: the camera cannot be opened.
    """

    def __init__(self, name: str, source: str, size: tuple[int, int]) -> None:
        try:
            import cv2
        except ImportError as error:
            raise MissingDependencyError(
                "Cameras need OpenCV, which is not installed. Install it with: pip install "
                "opencv-python-headless"
            ) from error
        self._capture = cv2.VideoCapture(int(source) if source.isdigit() else source)
        if not self._capture.isOpened():
            raise UserError(
                f"Camera {name} cannot be opened at {source}. Is it there, and not in use "
                "elsewhere?"
            )
        self._size = size
        self._closing = False
        self.newest: tuple[float, Image | None] = (-np.inf, None)
        self._thread = threading.Thread(target=self._work, name=f"camera {name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closing:
            there, image = self._capture.read()
            if not there:
                return  # the age of the newest image then shows it
            # OpenCV gives BGR.
            rgb = np.ascontiguousarray(image[:, :, ::-1], np.uint8)
            self.newest = (time.monotonic(), fit(rgb, self._size))

    def close(self) -> None:
        """Lets go of the camera."""
        self._closing = True
        self._thread.join(timeout=2.0)
        self._capture.release()
