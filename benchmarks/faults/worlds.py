"""Changes the content of a world model or a reflector at random; see ``files``."""

import contextlib
import io
import json
import random
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.faults.files import campaign, count, mutate, mutate_tensors
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.init import build_model
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.reflectors.folder import load_reflector, save_reflector
from embodyrl.world_models.reflectors.trained import TrainedReflector

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
from squares import squares

TINY = {"latent_channels": 4, "channels": 8, "width": 32, "layers": 1, "heads": 2, "horizon": 4}


def tiny_world(folder: Path) -> Path:
    """A world model with random weights and a few keyframes."""
    clips = squares(4, 0, state=True)
    model = build_model(WorldTrainConfig(state=True, **TINY), clips, torch.arange(len(clips)))
    rows = torch.arange(6)
    assert clips.privileged is not None
    model.keyframes = {
        "context": torch.zeros(6, 3, 1, *model.codec.latent_shape).half(),
        "proprio": clips.proprio[rows],
        "sentence": torch.zeros(6, dtype=torch.long),
        "init": rows,
        "age": torch.zeros(6, dtype=torch.long),
        "held_out": rows % 2 == 0,
        "privileged": clips.privileged[rows],
    }
    model.sentences = clips.sentences
    model.save(folder / "model")
    return folder / "model"


def tiny_reflector(folder: Path) -> Path:
    """A reflector with random weights."""
    reflector = TrainedReflector({"front": (32, 32)}, width=4, features=8)
    return save_reflector(reflector, folder / "reflector")


def change(folder: Path, rng: random.Random) -> str:
    """One change to a file of the folder."""
    files = sorted(folder.rglob("*.json")) * 3 + sorted(folder.rglob("*.safetensors"))
    file = rng.choice(files)
    if file.suffix == ".safetensors":
        what = mutate_tensors(file, rng)
    else:
        data, what = mutate(json.loads(file.read_text()), rng)
        file.write_text(json.dumps(data))
    return f"{file.relative_to(folder)}: {what}"


def dream(folder: Path) -> None:
    """Two dreams of one chunk."""
    env = WorldModelEnv(WorldModelConfig(model=str(folder), num_envs=2, device="cpu"))
    env.reset(torch.arange(2), init=torch.arange(2))
    env.step(torch.zeros(2, 2, env.spec.action_dim))


def judge(folder: Path) -> None:
    """One judgement of a reflector."""
    reflector = load_reflector(folder)
    frames = {
        name: torch.zeros(1, reflector.window, 32, 32, 3, dtype=torch.uint8)
        for name in reflector.cameras
    }
    reflector.judge(frames, ["push"])


WORLD = {"load": lambda folder: WorldModel.load(folder), "dream": dream}


def world_campaign(folder: Path, tries: int, seed: int) -> dict:
    """See ``files.campaign``."""
    with contextlib.redirect_stdout(io.StringIO()):
        model = tiny_world(folder)
    return campaign(model, tries, seed, WORLD, change)


def reflector_campaign(folder: Path, tries: int, seed: int) -> dict:
    """See ``files.campaign``."""
    return campaign(tiny_reflector(folder), tries, seed, {"judge": judge}, change)


def survive(tries: int, seed: int) -> dict[str, int]:
    """Half of the tries on a world model, half on a reflector."""
    with tempfile.TemporaryDirectory() as folder:
        worlds = count(world_campaign(Path(folder), tries // 2, seed))
        reflectors = count(reflector_campaign(Path(folder), tries - tries // 2, seed))
    return {key: worlds[key] + reflectors[key] for key in worlds}
