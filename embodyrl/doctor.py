"""What this machine can do, tried rather than guessed, and how to mend what it cannot.

Whatever may crash, hang or take its time (drivers above all) runs in a process of its own with a deadline.
``python -m embodyrl.doctor PROBE`` is one of those processes.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Finding = dict[str, Any]
DEADLINE = 20.0
"""Seconds for one probe on an idle machine: each takes under 4 s. A busy one is given more, by its load."""


@dataclass(frozen=True)
class Probe:
    """A test that runs in its own process: ``run`` returns what it found, or raises."""

    name: str
    run: Callable[[], str]
    mend: str
    optional: bool = False
    env: dict[str, str] = field(default_factory=dict)


def _torch() -> str:
    import torch

    x = torch.ones(4, 4, requires_grad=True)
    (x @ x).sum().backward()
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build for the CPU alone"
    return f"{torch.__version__} ({cuda})"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("there is an NVIDIA GPU that PyTorch cannot use, so everything runs on the CPU")
    torch.ones(4, device="cuda").sum().item()
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{torch.cuda.get_device_name(0)}, {gib:.0f} GiB" + f" (1 of {torch.cuda.device_count()})"


SCENE = """<mujoco><visual><global offwidth="32" offheight="32"/></visual><worldbody><light pos="0 0 3"/>
<geom type="plane" size="1 1 .1"/><body pos="0 0 .5"><freejoint/><geom size=".2" rgba="1 0 0 1"/></body>
</worldbody></mujoco>"""


def _mujoco() -> str:
    import mujoco

    model = mujoco.MjModel.from_xml_string(SCENE)  # pyright: ignore[reportAttributeAccessIssue] (native module)
    data = mujoco.MjData(model)  # pyright: ignore[reportAttributeAccessIssue]
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
    if int(picture.max()) == int(picture.min()):
        raise RuntimeError("the picture is one flat colour")
    return f"drew a picture with {name.decode() if name else 'an unnamed driver'}"


def _warp() -> str:
    import mujoco_warp
    import warp

    warp.config.log_level = warp.LOG_WARNING
    warp.init()
    cache = Path(str(warp.config.kernel_cache_dir))
    compiled = any(cache.glob("*render_megakernel*"))
    state = "kernels compiled" if compiled else "kernels not compiled yet: the first use takes a minute"
    devices = warp.get_cuda_device_count()
    where = f"{devices} GPU" if devices else "CPU"
    return f"{importlib.metadata.version(mujoco_warp.__name__.replace('_', '-'))} on {where}, {state}"


def _vulkan() -> str:
    import sapien

    sapien.render.RenderSystem("cuda" if _has_gpu() else "cpu")
    names = re.findall(r"GPU: (.+)", str(sapien.render.get_device_summary()))
    return "SAPIEN can draw with " + (", ".join(names) or "an unnamed device")


def _video() -> str:
    import av
    import numpy as np

    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
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
        "pip install 'mujoco-warp>=3.17,<3.18' 'warp-lang>=1.15'; until then use env.renderer=opengl or none",
    ),
    "vulkan": Probe(
        "pixels: Vulkan (ManiSkill)",
        _vulkan,
        "as root: scripts/install_vulkan.sh (Mesa 24.3 or newer); with an NVIDIA GPU in a container: "
        "NVIDIA_DRIVER_CAPABILITIES=all. States (env.obs=state) need none",
        optional=True,
    ),
    "cuda": Probe(
        "GPU", _cuda, "update the GPU's driver, or install the PyTorch build that fits it (nvidia-smi)", True
    ),
    "egl": Probe(
        "pixels: OpenGL by EGL (LIBERO)",
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


def diagnose(out: str = "runs") -> list[Finding]:
    """Tries everything; each finding has ``name``, ``ok``, ``optional``, ``found`` and ``mend`` (empty where ok).

    Args:
        out: the folder that runs are to be written under.
    """
    with ThreadPoolExecutor(max_workers=max(2, min(4, _cores()))) as pool:
        probes = list(pool.map(_try, PROBES))
        here = [_python(), *_packages(), *_machine(Path(out))]
    return here[:1] + probes + here[1:]


def _finding(name: str, ok: bool, found: str, mend: str, optional: bool = False) -> Finding:
    return {"name": name, "ok": ok, "optional": optional, "found": found, "mend": "" if ok else mend}


def _try(key: str) -> Finding:
    probe = PROBES[key]
    if key == "vulkan" and importlib.util.find_spec("sapien") is None:
        return _finding(probe.name, False, "SAPIEN is not installed", "pip install 'embodyrl[maniskill]'", True)
    if key == "cuda" and not _has_gpu():
        return _finding(probe.name, False, "no NVIDIA GPU: everything runs on the CPU", "none needed to start", True)
    mend = probe.mend
    # The package may be a checkout on PYTHONPATH: the child must find the same one.
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **probe.env}
    command = [sys.executable, "-W", "ignore", "-m", "embodyrl.doctor", key]
    load = os.getloadavg()[0]
    deadline = DEADLINE * max(1.0, 2 * load / _cores())
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=deadline,
            stdin=subprocess.DEVNULL,
            env=env,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        busy = f"; the machine is busy (load {load:.0f}), so try again when it is not" if load > 2 * _cores() else ""
        return _finding(probe.name, False, f"no answer within {deadline:.0f} s{busy}", mend, probe.optional)
    if done.returncode == 0 and done.stdout.strip():
        return _finding(probe.name, True, done.stdout.strip().splitlines()[-1], mend, probe.optional)
    if done.returncode < 0:
        found = f"crashed (signal {-done.returncode})"
    else:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        found = lines[-1].strip() if lines else f"ended with status {done.returncode}"
    return _finding(probe.name, False, found, mend, probe.optional)


def _has_gpu() -> bool:
    """Whether an NVIDIA GPU is in the machine, whatever software can use it."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _python() -> Finding:
    version = platform.python_version()
    ok = sys.version_info >= (3, 12)
    return _finding(
        "Python", ok, f"{version} at {sys.executable}", "use Python 3.12 or newer: make setup finds or gets one"
    )


def _packages() -> list[Finding]:
    """The base packages, and one finding for each extra, by the versions that are installed."""
    from packaging.requirements import Requirement

    groups: dict[str, list[Requirement]] = {"": []}
    for extra, line in _requirements():
        groups.setdefault(extra, []).append(Requirement(line))
    findings = []
    for extra, wanted in groups.items():
        if extra == "all":
            continue  # the sum of others
        missing, wrong, here = [], [], []
        for requirement in wanted:
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(requirement.name)
                continue
            here.append(f"{requirement.name} {version}")
            if not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
        ok = not missing and not wrong
        if ok:
            found = ", ".join(here) if extra else f"{len(here)} packages"
        else:
            found = "; ".join(([f"not installed: {', '.join(missing)}"] if missing else []) + wrong)
        mend = f"pip install 'embodyrl[{extra}]'" if extra else "pip install embodyrl"
        findings.append(_finding(f"extra: {extra}" if extra else "base packages", ok, found, mend, bool(extra)))
    return findings


def _requirements() -> list[tuple[str, str]]:
    """(extra or "", requirement) of the installed package; of ``pyproject.toml`` where a checkout is run as it is."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        groups = {"": table["dependencies"], **table["optional-dependencies"]}
        return [(extra, line) for extra, lines in groups.items() for line in lines]
    pairs = []
    for line in importlib.metadata.requires("embodyrl") or []:
        text, _, marker = line.partition(";")
        named = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        pairs.append((named.group(1) if named else "", text.strip()))
    return pairs


def _machine(out: Path) -> list[Finding]:
    cores, memory, available = _cores(), *_memory_gib()
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free / 2**30
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"x")
        written, said = True, f"{out.absolute()} can be written"
    except OSError as error:
        written, said = False, f"{out.absolute()} cannot be written: {error.strerror or error}"
    return [
        _finding("processor cores", cores >= 2, f"{cores}", "two or more make the quickstart's ten minutes", True),
        _finding(
            "memory",
            available >= 4,
            f"{available:.1f} GiB of {memory:.1f} GiB available",
            "end other programs, or run fewer environments (env.num_envs=16); the quickstart wants 4 GiB",
            True,
        ),
        _finding("disk", free >= 1, f"{free:.1f} GiB free at {parent}", f"free at least 1 GiB at {parent}"),
        _finding(
            "runs folder", written, said, f"choose a folder that you may write: run.out=FOLDER, or chmod u+w {parent}"
        ),
    ]


def _cores() -> int:
    """Cores that this process may use: affinity and a container's quota counted."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, round(int(quota[0]) / int(quota[1]))))
    return cores


def _memory_gib() -> tuple[float, float]:
    """Total and available memory, a container's limit counted."""
    numbers = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    total = int(numbers.get("MemTotal", 0)) / 2**20
    available = int(numbers.get("MemAvailable", 0)) / 2**20
    if not total:  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        total = min(total, int(limit) / 2**30)
        cached = re.search(r"^inactive_file (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
        reclaimable = int(cached.group(1)) if cached else 0
        available = min(available, (int(limit) - int(used) + reclaimable) / 2**30)
    return total, available


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def print_findings(findings: list[Finding]) -> None:
    """Prints one line for each finding and, below those that fail, what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for f in findings:
        mark = Text("ok", "green") if f["ok"] else Text("--", "yellow") if f["optional"] else Text("FAILS", "bold red")
        said = Text(f["found"], overflow="fold")
        if f["mend"]:
            said.append(f"\n{f['mend']}", style="cyan")
        table.add_row(mark, Text(f["name"], no_wrap=True), said)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    broken = [f["name"] for f in findings if not f["ok"] and not f["optional"]]
    if broken:
        console.print(Text(f"\nNot ready: {', '.join(broken)}. What to do is said in each line.", style="bold red"))
    else:
        console.print(Text("\nReady. Start with: embodyrl quickstart", style="bold"))
        if not all(f["ok"] for f in findings):
            console.print("Lines marked -- are for parts that you may never need.")


def _main(key: str) -> int:
    try:
        found = PROBES[key].run()
    except Exception as error:  # whatever a driver or a half-installed package raises is the finding
        print(re.sub(r"\s+", " ", f"{error}" or type(error).__name__), file=sys.stderr)
        return 1
    sys.stdout.flush()
    print(found)
    sys.stdout.flush()
    # Some drivers crash in their own clean-up, after all is said.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
