"""Checkpoints: bit-equal round trips, kill -9 while saving, damaged files, full disks, specs."""

import dataclasses
import json
import math
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from embodyrl.errors import UserError
from embodyrl.storage import checkpoint
from embodyrl.storage.checkpoint import DamagedCheckpointError
from embodyrl.storage.env_spec import (
    ORIGIN_FILE,
    check_compatible,
    check_export,
    spec_from_json,
    spec_to_json,
)
from embodyrl.types import Conventions, EnvSpec

SPEC = EnvSpec(
    "mujoco/pick", 8, 7, 11, "ee_delta_pos", 10.0, 60,
    {"agentview": (64, 64), "wrist": (48, 64)}, 5, ("a", "b"),
    layout=(("hand", 0, 3), ("mark", 12, 3)),
)  # fmt: skip


def assert_equal(a, b, path=""):
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu()), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{path}/{i}")
    else:
        assert a == b, path


def write(folder: Path, step: int, **kwargs) -> Path:
    states = {
        "policy": {"w": torch.full((64,), float(step)), "b": torch.arange(3)},
        "algorithm": {"iteration": step},
    }
    return checkpoint.save(folder / f"step_{step:06d}", states, {"step": step}, **kwargs)


def test_every_kind_of_value_comes_back_bit_equal(tmp_path):
    base = torch.randn(4, 6)
    state = {
        "float": base,
        "transposed": base.T,
        "view of the same memory": base[1:],
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5).to(torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan")]).nan_to_num(float("inf")),
        0: [1, 2.5, None, True, "text", (0.9, 0.999), []],
        "a": {"b": torch.ones(1)},
        "a/b": torch.zeros(1),  # the same name once joined
        "nothing": {},
    }
    path = checkpoint.save(
        tmp_path / "step_000001", {"x": state, "none": {}}, {"lr": 1e-4, "list": [1, None]}
    )
    states, meta = checkpoint.load(path)
    assert_equal(
        {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in state.items()},
        states["x"],
    )
    assert states["none"] == {}
    assert meta == {"lr": 1e-4, "list": [1, None]}


@pytest.mark.parametrize("value", [np.float32(1.0), {1, 2}, object(), 1j])
def test_what_it_cannot_hold_is_named_and_leaves_nothing_behind(tmp_path, value):
    with pytest.raises(TypeError, match="policy:a/0 is a"):
        checkpoint.save(tmp_path / "step_000001", {"policy": {"a": [value]}}, {})
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "step_000001", {}, {"value": value})
    assert list(tmp_path.iterdir()) == []


def train(model, optimizer, generator, updates):
    for _ in range(updates):
        x = torch.randn(16, 4, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def build(seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    groups = [
        {"params": model[0].parameters(), "lr": 1e-2},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-3, amsgrad=True, betas=(0.8, 0.99)), generator


def test_resume_is_bit_equal_for_100_updates(tmp_path):
    """Parameters, Adam's moments and step, param groups, generator: as without interruption."""
    model, optimizer, generator = build(0)
    train(model, optimizer, generator, 20)
    rng = {"torch": generator.get_state(), "numpy": np.random.default_rng(3).bit_generator.state}
    states = {
        "policy": model.state_dict(),
        "algorithm": {"optimizer": optimizer.state_dict()},
        "rng": rng,
    }
    path = checkpoint.save(tmp_path / "step_000020", states, {})
    train(model, optimizer, generator, 100)

    other, other_optimizer, other_generator = build(1)
    loaded, _ = checkpoint.load(path)
    other.load_state_dict(loaded["policy"])
    other_optimizer.load_state_dict(loaded["algorithm"]["optimizer"])
    other_generator.set_state(loaded["rng"]["torch"])
    train(other, other_optimizer, other_generator, 100)
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    assert_equal(optimizer.state_dict(), other_optimizer.state_dict())
    assert torch.equal(generator.get_state(), other_generator.get_state())
    numpy_rng = np.random.default_rng()
    numpy_rng.bit_generator.state = loaded["rng"]["numpy"]
    assert numpy_rng.random() == np.random.default_rng(3).random()


def test_standard_tool_verifies_the_manifest(tmp_path):
    path = write(tmp_path, 1)
    done = subprocess.run(
        ["sha256sum", "-c", checkpoint.MANIFEST],
        cwd=path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# One process imports torch and then forks a saver for every kill. The saver replaces step 2 over
# and over, which is the hardest case (the folder exists, and keep_last deletes), and says when each
# save begins.
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from embodyrl.storage import checkpoint

torch.set_num_threads(1)
folder, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
weight = torch.zeros(20_000)

def save(step, value):
    states = {"policy": {"w": weight + value}, "algorithm": {"value": value}}
    checkpoint.save(f"{folder}/step_{step:06d}", states, {"value": value}, keep_last=1)

save(1, 1)
began = time.perf_counter()
for _ in range(5):
    save(1, 1)
duration = (time.perf_counter() - began) / 5
rng = random.Random(seed)
interrupted = 0
for kill in range(kills):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"x")
        value = 1
        while True:
            value += 1
            save(1 + value % 2 if kill % 2 else 1, value)
    os.read(reader, 1)
    os.close(reader), os.close(writer)
    time.sleep(rng.uniform(0, 4 * duration))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    interrupted += any(name.startswith(".") for name in os.listdir(folder))
    heard = []
    newest = checkpoint.latest(folder, heard.append)
    states, meta = checkpoint.load(newest)
    assert not heard, heard
    for name in os.listdir(folder):
        whole = name.startswith(".") or checkpoint.damage(Path(folder, name)) is None
        assert whole, f"{name} is half a checkpoint"
    assert torch.equal(states["policy"]["w"], weight + meta["value"])
    assert states["algorithm"]["value"] == meta["value"]
print(interrupted)
"""


@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_while_saving_never_costs_a_checkpoint(tmp_path, kills):
    command = [sys.executable, "-c", KILLER, str(tmp_path), str(kills), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > kills / 4, "most kills hit no save: the test shows nothing"


def test_full_disk_leaves_the_earlier_checkpoint_whole(tmp_path):
    """A limit on the size of files makes every larger write fail, as a full disk does."""
    first = write(tmp_path, 1)
    code = (
        "import sys, torch; from embodyrl.storage import checkpoint\n"
        "try: checkpoint.save(sys.argv[1], {'policy': {'w': torch.zeros(1_000_000)}}, {})\n"
        "except checkpoint.UserError as error: print(error)"
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [sys.executable, "-c", code, str(tmp_path / "step_000002")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=limit)
    assert (
        "could not be written" in done.stdout and "Earlier checkpoints are untouched" in done.stdout
    ), done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [first.name]
    assert checkpoint.latest(tmp_path) == first


def test_1000_mutations_and_no_silent_load(tmp_path):
    """Flipped bits, truncations, deletions, additions and swapped contents, in every file."""
    good = write(tmp_path, 1)
    files = sorted(p.name for p in good.iterdir())
    original = {name: (good / name).read_bytes() for name in files}
    rng = random.Random(0)
    for i in range(1000):
        name = files[i % len(files)]
        data = bytearray(original[name])
        kind = rng.choice(["flip", "flip", "truncate", "append", "delete", "swap"])
        if kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "truncate":
            del data[rng.randrange(len(data)) :]
        elif kind == "append":
            data.append(rng.randrange(256))
        elif kind == "swap":
            data = bytearray(original[rng.choice([n for n in files if n != name])])
        path = good / name
        path.unlink() if kind == "delete" else path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match="is damaged"):
            checkpoint.load(good)
        path.write_bytes(original[name])
    assert checkpoint.load(good)[1] == {"step": 1}


def test_damage_is_named(tmp_path):
    path = write(tmp_path, 1)
    tensors = path / "policy.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(
        DamagedCheckpointError, match=r"policy\.safetensors is not as it was written"
    ):
        checkpoint.load(path)
    (path / "meta.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"meta\.json is missing"):
        checkpoint.load(path)


def test_latest_passes_over_a_damaged_one_aloud(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "absent") is None
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == second
    (second / "state.json").write_text("{}")
    heard = []
    assert checkpoint.latest(tmp_path, heard.append) == first
    assert (
        len(heard) == 1
        and "step_000002" in heard[0]
        and "state.json" in heard[0]
        and "step_000001" in heard[0]
    )
    (first / checkpoint.MANIFEST).unlink()
    with pytest.raises(DamagedCheckpointError, match="Nothing was started afresh"):
        checkpoint.latest(tmp_path)


def test_keep_last_prunes_only_older_ones(tmp_path):
    damaged = write(tmp_path, 9)
    (damaged / "meta.json").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / ".step_000001.tmp-0123abcd").mkdir()  # what a killed save left
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep_last=2)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["notes", "step_000003", "step_000004", "step_000009"]
    assert checkpoint.latest(tmp_path, lambda text: None).name == "step_000004"


def test_one_put_aside_for_its_successor_is_still_found(tmp_path):
    """The state of the folder when a save is killed between its two renames."""
    path = write(tmp_path, 3)
    aside = path.rename(tmp_path / ".step_000003.old-0123abcd")
    assert checkpoint.latest(tmp_path) == aside
    write(tmp_path, 3)
    assert checkpoint.latest(tmp_path) == path and not aside.exists()


def test_find_takes_a_run_a_folder_or_a_checkpoint(tmp_path):
    path = write(tmp_path / "pick" / "checkpoints", 5)
    for given in (tmp_path / "pick", tmp_path / "pick" / "checkpoints", path):
        assert checkpoint.find(given) == path
    with pytest.raises(UserError, match="Did you mean 'pick'"):
        checkpoint.find(tmp_path / "pik")
    (tmp_path / "arm.onnx").touch()
    with pytest.raises(UserError, match="It is a file, and a checkpoint is a folder"):
        checkpoint.find(tmp_path / "arm.onnx")


def test_spec_round_trip_and_unknown_key():
    data = spec_to_json(SPEC)
    assert spec_from_json(json.loads(json.dumps(data))) == SPEC
    assert spec_from_json(dataclasses.asdict(SPEC)) == SPEC
    with pytest.raises(UserError, match=r"'control_mod'.*Did you mean 'control_mode'"):
        spec_from_json({**data, "control_mod": "x"})
    with pytest.raises(UserError, match="malformed: the content has no 'num_envs'"):
        spec_from_json({"name": "x"})


@pytest.mark.parametrize("odd", [[["hand", math.inf, 3]], [["hand", 0, math.nan]], [[1]], ["x"]])
def test_a_spec_whose_layout_is_odd_is_refused_in_words(odd):
    with pytest.raises(UserError, match="The env spec is"):
        spec_from_json({**spec_to_json(SPEC), "layout": odd})


def test_the_spec_of_an_older_checkpoint_reported_success():
    data = spec_to_json(dataclasses.replace(SPEC, reports_success=False))
    check_compatible(data, SPEC)
    assert not spec_from_json(data).reports_success
    del data["reports_success"], data["layout"]
    assert spec_from_json(data).reports_success and spec_from_json(data).layout == ()


def test_compatible_specs_pass():
    other = dataclasses.replace(
        SPEC, name="mujoco/push", num_envs=1, tasks=("c",), max_episode_steps=9, privileged_dim=0
    )
    check_compatible(SPEC, other)
    check_compatible(spec_to_json(SPEC), other)


def test_every_difference_is_named():
    env = dataclasses.replace(
        SPEC,
        name="libero/spatial",
        action_dim=4,
        proprio_dim=9,
        control_mode="joint_pos",
        control_hz=20.0,
        cameras={"agent_view": (64, 64), "wrist": (64, 64)},
    )
    with pytest.raises(UserError) as caught:
        check_compatible(SPEC, env)
    text = str(caught.value)
    for part in (
        "mujoco/pick",
        "libero/spatial",
        "(action_dim) was 7 and is 4",
        "(proprio_dim) was 11 and is 9",
        "(control_mode) was 'ee_delta_pos' and is 'joint_pos'",
        "(control_hz) was 10.0 and is 20.0",
        "no camera 'agentview' (Did you mean 'agent_view'?)",
        "camera 'wrist' was (48, 64) (height, width) and is (64, 64)",
        "a camera 'agent_view' that the checkpoint does not know",
    ):
        assert part in text


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    width: int = 4


class Tiny(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layer = nn.Linear(2, config.width)


def test_load_policy_fits_or_says_why(tmp_path):
    policy = Tiny(TinyConfig())
    meta = {"spec": spec_to_json(SPEC), "config": {"policy": {"width": 4}}}
    checkpoint.save(
        tmp_path / "run" / "checkpoints" / "step_000001", {"policy": policy.state_dict()}, meta
    )
    fresh = Tiny(TinyConfig())
    assert checkpoint.load_weights(tmp_path / "run", fresh, SPEC) == meta
    assert_equal(dict(policy.state_dict()), dict(fresh.state_dict()))
    with pytest.raises(UserError, match=r"policy\.width was 4 and is 5"):
        checkpoint.load_weights(tmp_path / "run", Tiny(TinyConfig(5)), SPEC)
    other = Tiny(TinyConfig())
    other.extra = nn.Linear(1, 1)
    with pytest.raises(UserError, match=r"extra\.weight is missing"):
        checkpoint.load_weights(tmp_path / "run", other, SPEC)
    other.starts_fresh, before = ("extra.",), other.extra.weight.clone()
    checkpoint.load_weights(tmp_path / "run", other, SPEC)
    assert torch.equal(other.extra.weight, before)
    with pytest.raises(UserError, match="action_dim"):
        checkpoint.load_weights(tmp_path / "run", fresh, dataclasses.replace(SPEC, action_dim=1))


def test_copy_elsewhere_loads(tmp_path):
    path = write(tmp_path / "a", 1)
    shutil.copytree(path, tmp_path / "b" / "best")
    assert checkpoint.load(tmp_path / "b" / "best")[1] == {"step": 1}


def test_conventions_are_kept_and_compared_where_both_are_known():
    meaning = Conventions(
        orientation="upright", scale=(0.05, 0.5), gripper=(1.0, -1.0), state=("hand_position:3",)
    )
    known = dataclasses.replace(SPEC, conventions=meaning)
    assert spec_from_json(spec_to_json(known)) == known
    # What one of them does not know is not compared.
    check_compatible(SPEC, known)
    check_compatible(spec_to_json(known), SPEC)
    check_compatible(known, known)
    other = dataclasses.replace(meaning, orientation="mirrored", gripper=(0.0, 1.0), channels="rgb")
    with pytest.raises(UserError) as caught:
        check_compatible(known, dataclasses.replace(SPEC, conventions=other))
    text = str(caught.value)
    assert "pictures (orientation) was 'upright' and is 'mirrored'" in text
    assert "gripper (gripper) was (1.0, -1.0) and is (0.0, 1.0)" in text
    assert "channels" not in text and "scale" not in text


def test_an_export_says_what_it_was_made_for(tmp_path):
    known = dataclasses.replace(SPEC, conventions=Conventions(orientation="mirrored"))
    check_export(tmp_path, SPEC)
    (tmp_path / ORIGIN_FILE).write_text(json.dumps({"spec": spec_to_json(known)}))
    check_export(tmp_path, known)
    check_export(tmp_path, SPEC)
    upright = dataclasses.replace(SPEC, conventions=Conventions(orientation="upright"))
    with pytest.raises(UserError, match=r"orientation.*'mirrored', and mujoco/pick has 'upright'"):
        check_export(tmp_path, upright)
