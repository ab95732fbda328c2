"""``place_egl``: which device MuJoCo's OpenGL pictures are drawn on.

EGL numbers its devices in an order of its own, and knows nothing of ``CUDA_VISIBLE_DEVICES``. So a
GPU is found by its UUID, which EGL and CUDA both tell. The CPU's device is Mesa's software
renderer. A process draws on one device: MuJoCo opens EGL once.

Who sets ``MUJOCO_EGL_DEVICE_ID`` has chosen; then nothing is chosen here.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch

from embodyrl.errors import MissingDependencyError, UserError

VARIABLE = "MUJOCO_EGL_DEVICE_ID"
# Numbers from EGL's registry.
_EXTENSIONS = 0x3055
_CUDA_DEVICE = 0x323A
_DEVICE_UUID = 0x335C

_lock = threading.Lock()
_drawing_on: torch.device | None = None


@dataclass(frozen=True)
class EglDevice:
    """A device of EGL's.

    Attributes:
        uuid: its 16 bytes; empty where the driver does not tell.
        cuda: its number in CUDA; -1 where it has none, or the driver does not tell.
        software: whether it is a renderer on the CPU.
    """

    uuid: bytes = b""
    cuda: int = -1
    software: bool = False


def place_egl(device: torch.device) -> None:
    """Opens EGL for MuJoCo on a device; call it before MuJoCo draws.

    On a machine whose GPUs PyTorch does not see, such as a laptop's, the CPU's pictures are drawn
    by whatever EGL has first.

    Raises:
        MissingDependencyError: there is no software renderer for the CPU.
        UserError: EGL does not know this GPU, or this process draws on another device.
    """
    global _drawing_on
    with _lock:
        if VARIABLE in os.environ or _drawing_on == device:
            return
        if _drawing_on is not None:
            raise UserError(
                f"This process draws with OpenGL on {_drawing_on}, and cannot also draw on "
                f"{device}. Give all its envs one env.device, or use env.backend=native or "
                "env.renderer=warp."
            )
        number = egl_number(device, egl_devices())
        if number is not None:
            _open(number)
        _drawing_on = device


def egl_number(device: torch.device, devices: list[EglDevice]) -> int | None:
    """The place of a device among EGL's; None leaves the choice to EGL.

    Raises:
        MissingDependencyError: see ``place_egl``.
        UserError: EGL does not know this GPU.
    """
    if device.type != "cuda":
        if not torch.cuda.is_available():
            return None
        for number, one in enumerate(devices):
            if one.software:
                return number
        raise MissingDependencyError(
            "env.device=cpu draws with OpenGL on the CPU, and EGL has only GPUs here. Install "
            "Mesa's software renderer (Debian, Ubuntu: apt-get install libegl1 libgl1-mesa-dri), "
            "set MUJOCO_GL=osmesa, or use env.device=cuda."
        )
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = bytes(properties.uuid.bytes)
    for number, one in enumerate(devices):
        if one.uuid == uuid or (not one.uuid and one.cuda == device.index):
            return number
    raise UserError(
        f"env.device is {str(device)!r}, but none of EGL's {len(devices)} devices is this GPU, so "
        f"OpenGL cannot draw on it. In a container set NVIDIA_DRIVER_CAPABILITIES=all; or set "
        f"{VARIABLE} to the number of the device that should draw."
    )


def has_egl() -> bool:
    """Whether the machine has EGL's library."""
    try:
        ctypes.CDLL("libEGL.so.1")
    except OSError:
        return False
    return True


def egl_devices() -> list[EglDevice]:
    """All devices of EGL, in its order.

    Raises:
        MissingDependencyError: there is no EGL, or an old one.
    """
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError as error:
        raise MissingDependencyError(
            f"There is no EGL here ({error}). Install it (Debian, Ubuntu: apt-get install libegl1 "
            "libgl1-mesa-dri)."
        ) from error
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]

    def function(name: str, result: Any, *arguments: Any) -> Any:
        address = egl.eglGetProcAddress(name.encode())
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None

    # What drivers without an extension leave out stays None.
    pointer = ctypes.c_void_p
    whole = ctypes.c_int
    query_devices = function("eglQueryDevicesEXT", ctypes.c_uint, whole, pointer, pointer)
    query_text = function("eglQueryDeviceStringEXT", ctypes.c_char_p, pointer, whole)
    query_number = function("eglQueryDeviceAttribEXT", ctypes.c_uint, pointer, whole, pointer)
    query_bytes = function(
        "eglQueryDeviceBinaryEXT", ctypes.c_uint, pointer, whole, whole, pointer, pointer
    )
    if query_devices is None or query_text is None:
        raise MissingDependencyError(
            "EGL cannot list its devices here (EGL_EXT_device_enumeration). Update the GPU's "
            "driver or Mesa, or set MUJOCO_GL=osmesa."
        )
    handles = (pointer * 64)()
    count = whole()
    query_devices(len(handles), handles, ctypes.byref(count))
    found = []
    for handle in handles[: count.value]:
        extensions = (query_text(handle, _EXTENSIONS) or b"").split()
        uuid = (ctypes.c_ubyte * 16)()
        size = whole()
        number = ctypes.c_ssize_t()
        # A driver answers 1 where it knows, and is asked for nothing that it does not list.
        has_uuid = (
            b"EGL_EXT_device_persistent_id" in extensions
            and query_bytes is not None
            and query_bytes(handle, _DEVICE_UUID, 16, uuid, ctypes.byref(size))
        )
        has_number = (
            b"EGL_NV_device_cuda" in extensions
            and query_number is not None
            and query_number(handle, _CUDA_DEVICE, ctypes.byref(number))
        )
        found.append(
            EglDevice(
                uuid=bytes(uuid) if has_uuid else b"",
                cuda=number.value if has_number else -1,
                software=b"EGL_MESA_device_software" in extensions,
            )
        )
    return found


def _open(number: int) -> None:
    """MuJoCo's EGL display on a device; contexts that are made later use it.

    Raises:
        UserError: MuJoCo has opened EGL before, so nobody chose where.
    """
    egl = importlib.import_module("mujoco.egl")
    if egl.EGL_DISPLAY is not None:
        raise UserError(
            "MuJoCo drew with OpenGL in this process before env.device could be obeyed. Set "
            f"{VARIABLE}={number}, or draw elsewhere."
        )
    os.environ[VARIABLE] = str(number)
    try:
        # Its first context opens the display, where the variable says.
        egl.GLContext(1, 1).free()
    finally:
        del os.environ[VARIABLE]
