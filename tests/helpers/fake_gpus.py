"""``FakeGpus``: a machine with GPUs, as far as the code can see, whose tensors lie on the CPU.

Replaced is only what asks PyTorch, Warp, SAPIEN and EGL for a GPU: it is noted, and the CPU is
given. Everything else is the real code.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from embodyrl.sims import egl


def uuid_of(number: int) -> bytes:
    return bytes([number + 1] * 16)


class _ToCpu(TorchFunctionMode):
    """Notes GPUs that tensors are asked to be on, and leaves them on the CPU."""

    def __init__(self, asked: set[str]) -> None:
        super().__init__()
        self.asked = asked

    def _instead(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("cuda"):
            value = torch.device(value)
        if isinstance(value, torch.device) and value.type == "cuda":
            self.asked.add(str(value))
            return torch.device("cpu")
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {k: self._instead(v) for k, v in (kwargs or {}).items()}
        return func(*(self._instead(a) for a in args), **kwargs)


class FakeGpus:
    """See the module.

    Attributes:
        tensors: devices that tensors were asked to be on.
        warp: devices that Warp was asked for.
        current: the device that was made current last, and how often.
        egl: numbers of EGL's devices that were opened.
        sapien: the back ends that ManiSkill was asked for.
    """

    def __init__(self, monkeypatch: Any, count: int = 2) -> None:
        self.patch = monkeypatch
        self.tensors: set[str] = set()
        self.warp: set[str] = set()
        self.current: list[str] = []
        self.egl: list[int] = []
        self.sapien: list[dict[str, Any]] = []
        self.see(count)
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "set_device", lambda device: self.current.append(str(device)))
        monkeypatch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(
            cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid=SimpleNamespace(bytes=uuid_of(device.index))),
        )
        # EGL lists the GPUs backwards, and the CPU before them.
        listed = [egl.EglDevice(software=True)]
        listed += [egl.EglDevice(uuid=uuid_of(k)) for k in reversed(range(count))]
        monkeypatch.setattr(egl, "egl_devices", lambda: listed)
        monkeypatch.setattr(egl, "_open", self.egl.append)
        monkeypatch.setattr(egl, "_drawing_on", None)
        monkeypatch.delenv(egl.VARIABLE, raising=False)
        self._mode = _ToCpu(self.tensors)
        self._mode.__enter__()

    def close(self) -> None:
        self._mode.__exit__(None, None, None)

    def see(self, count: int) -> None:
        """From now on PyTorch sees so many GPUs."""
        self.patch.setattr(torch.cuda, "is_available", lambda: count > 0)
        self.patch.setattr(torch.cuda, "device_count", lambda: count)

    def put_into_warp(self) -> None:
        """Warp has two GPUs too."""
        from embodyrl.sims.mujoco.optional_imports import import_warp

        _, wp = import_warp()
        get_device = wp.get_device
        scoped_device = wp.ScopedDevice

        def cpu_instead(name: Any) -> Any:
            if str(name) in ("cpu", "cuda:0", "cuda:1"):
                self.warp.add(str(name))
                return "cpu"
            return name

        self.patch.setattr(wp, "get_cuda_device_count", lambda: 2)
        self.patch.setattr(wp, "get_device", lambda name=None: get_device(cpu_instead(name)))
        self.patch.setattr(wp, "ScopedDevice", lambda name: scoped_device(cpu_instead(name)))
        # A CUDA graph is not replayed here; what is captured has run once.
        graph = SimpleNamespace(graph="graph")
        self.patch.setattr(wp, "ScopedCapture", lambda: contextlib.nullcontext(graph))
        self.patch.setattr(wp, "capture_launch", lambda graph, stream=None: None)
        self.patch.setattr(wp, "stream_from_torch", lambda stream: str(stream))
        self.patch.setattr(wp, "ScopedStream", lambda name: scoped_device(cpu_instead(name)))
        self.patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        self.patch.setattr(torch.cuda, "current_stream", lambda device=None: device)

    def put_into_maniskill(self) -> None:
        """ManiSkill notes the back ends that it is asked for, and builds one scene on the CPU."""
        from mani_skill.utils.registration import EnvSpec

        make = EnvSpec.make
        keys = ("sim_backend", "render_backend")

        def on_cpu(spec: Any, **options: Any) -> Any:
            self.sapien.append({key: options[key] for key in keys})
            options |= {"num_envs": 1, "sim_backend": "physx_cpu"}
            options["render_backend"] = "cpu" if options["render_backend"] != "none" else "none"
            return make(spec, **options)

        self.patch.setattr(EnvSpec, "make", on_cpu)
