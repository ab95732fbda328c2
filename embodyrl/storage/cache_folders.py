"""Where libraries keep what they compiled or fetched, if the home folder cannot be written."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

CACHE = "XDG_CACHE_HOME"
"""Read by platformdirs, Warp (compiled kernels), JAX, Numba and Matplotlib."""


def choose_cache_folders() -> None:
    """Moves caches to a temporary folder if the usual one cannot be written.

    It sets environment variables, so it must be called before the libraries are imported. Child
    processes inherit them. What is cached already, such as models of the Hugging Face hub, is still
    read from its place.
    """
    usual = Path(os.environ.get(CACHE) or "~/.cache").expanduser()
    if _can_write(usual):
        return
    folder = Path(tempfile.gettempdir()) / f"embodyrl-cache-{os.getuid()}"
    if not _can_write(folder) or folder.lstat().st_uid != os.getuid():
        return
    print(
        f"embodyrl: {usual} cannot be written, so compiled kernels and other caches go into "
        f"{folder}. Set {CACHE} to a folder that stays, and they are made once.",
        file=sys.stderr,
    )
    os.environ[CACHE] = str(folder)
    settings = {
        # folders that are read, if they are there, and those that are written
        "HF_HOME": usual / "huggingface" if (usual / "huggingface").is_dir() else folder / "hf",
        "HF_DATASETS_CACHE": folder / "hf_datasets",
        "MPLCONFIGDIR": folder / "matplotlib",
        "TRITON_HOME": folder / "triton",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, str(value))


def _can_write(folder: Path) -> bool:
    """Whether a file of a few kilobytes can be written into a folder, which is made if need be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0" * 4096)
    except OSError:
        return False
    return True
