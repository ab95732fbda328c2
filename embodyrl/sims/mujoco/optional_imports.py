"""Imports that are made only when asked for: mujoco-warp, and MJX with JAX."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import torch

from embodyrl.errors import MissingDependencyError, UserError


def import_warp() -> tuple[Any, Any]:
    """The modules mujoco_warp and warp.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    try:
        with _without_driver_warning():
            import warp as wp

            wp.config.log_level = wp.LOG_WARNING
            wp.init()
        import mujoco_warp as mjw
    except ImportError as error:
        raise MissingDependencyError(
            f"renderer=warp needs the package mujoco-warp, which is not installed ({error}). "
            "Install it with `pip install 'mujoco-warp>=3.17,<3.18'`, or choose renderer=opengl "
            "(slower) or renderer=none (states)."
        ) from error
    return mjw, wp


def warp_device(device: torch.device) -> str:
    """Warp's name of a device.

    Raises:
        MissingDependencyError: see ``import_warp``.
        UserError: Warp does not see this GPU.
    """
    if device.type != "cuda":
        import_warp()
        return "cpu"
    # Warp, when it is imported first, opens the current GPU, so this one is made current.
    with torch.cuda.device(device):
        torch.zeros(1, device=device)
        _, wp = import_warp()
    index = device.index or 0
    count = wp.get_cuda_device_count()
    if index >= count:
        raise UserError(
            f"env.device is {str(device)!r}, but Warp, which simulates or draws, sees {count} GPUs. "
            "Update the GPU's driver, or use env.device=cpu."
        )
    return f"cuda:{index}"


@contextlib.contextmanager
def _without_driver_warning() -> Iterator[None]:
    """Drops Warp's warning that there is no NVIDIA driver, which a machine without a GPU repeats.

    The warning comes from C code, so the file descriptor of stderr itself is caught.
    """
    with tempfile.TemporaryFile() as caught:
        saved = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught.read().decode(errors="replace").splitlines():
                if "Could not find or load the NVIDIA CUDA driver" not in line:
                    print(line, file=sys.stderr)


def import_mjx() -> tuple[Any, Any]:
    """The modules jax and mujoco.mjx.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    # Otherwise JAX takes three quarters of the GPU's memory, which torch needs, too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax  # pyright: ignore[reportMissingImports]
        from mujoco import mjx  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise MissingDependencyError(
            f"env.backend=mjx needs JAX and MJX, which are not installed ({error}). Install them "
            "with: pip install 'embodyrl[jax]' (on a GPU also jax[cuda12])."
        ) from error
    # Compiled programs are kept on disk from one run to the next.
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update(
            "jax_compilation_cache_dir", str(Path(platformdirs.user_cache_dir("embodyrl")) / "jax")
        )
    return jax, mjx


def jax_device(device: torch.device) -> Any:
    """JAX's device of the same number.

    Raises:
        MissingDependencyError: JAX cannot use a GPU.
        UserError: it has begun with another one.
    """
    if device.type != "cuda":
        jax, _ = import_mjx()
        return jax.local_devices(backend="cpu")[0]
    # Otherwise JAX opens all GPUs of the machine, in every process. It reads this once.
    index = str(device.index or 0)
    visible = os.environ.setdefault("JAX_CUDA_VISIBLE_DEVICES", index)
    if visible not in ("all", index):
        raise UserError(
            f"env.device is {str(device)!r}, but JAX sees GPU {visible} alone in this process "
            "(JAX_CUDA_VISIBLE_DEVICES). Give all its envs one env.device."
        )
    jax, _ = import_mjx()
    try:
        found = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise MissingDependencyError(
            f"env.device is {str(device)!r}, but JAX has no GPU here "
            f"({str(error).splitlines()[0]}). Install it with: pip install 'jax[cuda12]', or use "
            "env.device=cpu."
        ) from error
    return found[0] if len(found) == 1 else found[int(index)]
