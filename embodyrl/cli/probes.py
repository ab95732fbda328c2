"""The tests that ``doctor`` runs, each in its own process.

``python -m embodyrl.cli.probes NAME`` runs one of them.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Probe:
    """A test that runs in its own process.

    Attributes:
        name: for people.
        run: returns a sentence about what works, or raises.
        mend: what to do if it fails.
        optional: whether the package can be used without it.
        env: environment variables of the process.
    """

    name: str
    run: Callable[[], str]
    mend: str
    optional: bool = False
    env: dict[str, str] = field(default_factory=dict)


def _torch() -> str:
    import torch

    # A product and its gradient use the compiled parts of PyTorch.
    x = torch.ones(4, 4, requires_grad=True)
    (x @ x).sum().backward()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU only"
    return f"{torch.__version__} ({build})"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "there is an NVIDIA GPU that PyTorch cannot use, so everything runs on the CPU"
        )
    # Run a kernel, and wait for its result.
    torch.ones(4, device="cuda").sum().item()
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    count = torch.cuda.device_count()
    return f"{torch.cuda.get_device_name(0)}, {gib:.0f} GiB (1 of {count})"


SCENE = """<mujoco>
<visual><global offwidth="32" offheight="32"/></visual>
<worldbody>
<light pos="0 0 3"/>
<geom type="plane" size="1 1 .1"/>
<body pos="0 0 .5"><freejoint/><geom size=".2" rgba="1 0 0 1"/></body>
</worldbody>
</mujoco>"""
"""A ball of radius 0.2 m above a floor."""


def _mujoco() -> str:
    import mujoco

    model = mujoco.MjModel.from_xml_string(SCENE)  # pyright: ignore[reportAttributeAccessIssue] (native module)
    data = mujoco.MjData(model)  # pyright: ignore[reportAttributeAccessIssue]
    # Two seconds, in which the ball falls and comes to rest.
    for _ in range(1000):
        mujoco.mj_step(model, data)  # pyright: ignore[reportAttributeAccessIssue]
    height = float(data.qpos[2])
    if not abs(height - 0.2) < 0.01:
        raise RuntimeError(f"a ball of radius 0.2 m came to rest at {height} m")
    return f"{mujoco.__version__}, a dropped ball comes to rest on the floor"


def _opengl() -> str:
    library = {"egl": "EGL", "osmesa": "OSMesa"}[os.environ["MUJOCO_GL"]]
    if ctypes.util.find_library(library) is None:
        raise RuntimeError(f"the library lib{library} is not installed")
    import mujoco
    from OpenGL import GL

    model = mujoco.MjModel.from_xml_string(SCENE)  # pyright: ignore[reportAttributeAccessIssue]
    data = mujoco.MjData(model)  # pyright: ignore[reportAttributeAccessIssue]
    mujoco.mj_forward(model, data)  # pyright: ignore[reportAttributeAccessIssue]
    renderer = mujoco.Renderer(model, 32, 32)
    try:
        renderer.update_scene(data)
        picture = renderer.render()
        name: Any = GL.glGetString(GL.GL_RENDERER)
    finally:
        renderer.close()
    # A broken driver may draw without an error, and leave the image empty.
    if int(picture.max()) == int(picture.min()):
        raise RuntimeError("the picture is one flat colour")
    return f"drew a picture with {name.decode() if name else 'an unnamed driver'}"


def _warp() -> str:
    import mujoco_warp
    import warp

    warp.config.log_level = warp.LOG_WARNING
    warp.init()
    # Warp compiles its kernels at their first use, and keeps them in this folder.
    cache = Path(str(warp.config.kernel_cache_dir))
    if any(cache.glob("*render_megakernel*")):
        kernels = "kernels compiled"
    else:
        kernels = "kernels not compiled yet: the first use takes a minute"
    version = importlib.metadata.version(mujoco_warp.__name__.replace("_", "-"))
    devices = warp.get_cuda_device_count()
    where = f"{devices} GPU" if devices else "CPU"
    return f"{version} on {where}, {kernels}"


def _vulkan() -> str:
    import sapien

    sapien.render.RenderSystem("cuda" if has_gpu() else "cpu")
    names = re.findall(r"GPU: (.+)", str(sapien.render.get_device_summary()))
    return "SAPIEN can draw with " + (", ".join(names) or "an unnamed device")


def _video() -> str:
    import av
    import numpy as np

    # Write a video of four frames into memory, and read it back.
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=10)
        stream.width = 32
        stream.height = 32
        stream.pix_fmt = "yuv420p"
        for k in range(4):
            picture = np.full((32, 32, 3), 60 * k, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    target.seek(0)
    frames = 0
    with av.open(target, "r") as written:
        frames += sum(1 for _ in written.decode(video=0))
    if frames != 4:
        raise RuntimeError(f"4 frames were written and {frames} read back")
    return f"PyAV {av.__version__} writes and reads H.264"


PROBES = {
    "torch": Probe("PyTorch", _torch, "pip install 'torch>=2.7,<2.12'"),
    "warp": Probe(
        "pixels: mujoco-warp",
        _warp,
        (
            "pip install 'mujoco-warp>=3.17,<3.18' 'warp-lang>=1.15'; until then use "
            "env.renderer=opengl or none"
        ),
    ),
    "vulkan": Probe(
        "pixels: Vulkan (ManiSkill)",
        _vulkan,
        "as root: scripts/install_vulkan.sh (Mesa 24.3 or newer); with an NVIDIA GPU in a "
        "container: NVIDIA_DRIVER_CAPABILITIES=all. States (env.obs=state) need none",
        optional=True,
    ),
    "cuda": Probe(
        "GPU",
        _cuda,
        "update the GPU's driver, or install the PyTorch build that fits it (nvidia-smi)",
        True,
    ),
    "egl": Probe(
        "pixels: OpenGL by EGL (LIBERO, OGBench, MetaWorld)",
        _opengl,
        "as root: apt-get install libegl1 libgl1-mesa-dri",
        optional=True,
        env={"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"},
    ),
    "osmesa": Probe(
        "pixels: OpenGL by OSMesa",
        _opengl,
        "only where EGL fails, as root: apt-get install libosmesa6, and set MUJOCO_GL=osmesa",
        optional=True,
        env={"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"},
    ),
    "mujoco": Probe("physics: MuJoCo", _mujoco, "pip install 'mujoco>=3.17,<3.18'"),
    "video": Probe("video: FFmpeg by PyAV", _video, "pip install 'av>=15'"),
}


def has_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU, even if no software can use it yet."""
    # The devices of the Linux driver, and of Windows' subsystem for Linux.
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _main(key: str) -> int:
    """Runs a probe: prints what works, or prints to stderr what does not and returns 1."""
    # A driver or a half-installed package may raise anything: it is the result of the probe.
    try:
        found = PROBES[key].run()
    except Exception as error:
        print(re.sub(r"\s+", " ", f"{error}" or type(error).__name__), file=sys.stderr)
        return 1
    sys.stdout.flush()
    print(found)
    sys.stdout.flush()
    # Leave without the usual clean-up, in which some drivers crash.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
