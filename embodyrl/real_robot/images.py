"""Camera images, encoded for the log and the operator's page."""

from __future__ import annotations

import io

from embodyrl.functional.pictures import Image


def to_png(image: Image) -> bytes:
    """An image as PNG, without loss."""
    return _encoded(image, "PNG", compress_level=1)


def to_jpeg(image: Image) -> bytes:
    """An image as JPEG, small enough to be shown ten times a second."""
    return _encoded(image, "JPEG", quality=85)


def _encoded(image: Image, kind: str, **options: int) -> bytes:
    from PIL import Image as Pillow

    out = io.BytesIO()
    Pillow.fromarray(image).save(out, kind, **options)
    return out.getvalue()
