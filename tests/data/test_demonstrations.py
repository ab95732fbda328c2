"""Data sets written with LeRobot's own library, and read back by it and by us."""

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodyrl.algorithms.sft import SFT
from embodyrl.build import make_policy
from embodyrl.config import resolve
from embodyrl.data.demonstrations import Statistics
from embodyrl.data.frames import decode_camera
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.lerobot_write import DatasetWriter, write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.record import record_episodes
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLP
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.sims.mujoco.experts import ScriptedExpert
from embodyrl.training.load_demos import load_demos
from embodyrl.world_models.clips import Clips


@pytest.fixture(scope="module")
def spec_and_recordings():
    env = MujocoEnv(MujocoConfig(num_envs=4, task="pick,push", cameras=("front", "wrist")))
    expert = ScriptedExpert(env, noise=1.0, seed=0)
    recordings = list(record_episodes(env, expert, 8, keep="all", noise=1.0))
    env.close()
    assert 0 < sum(r.success for r in recordings) < 8
    return env.spec, recordings


@pytest.fixture(scope="module")
def dataset(spec_and_recordings, tmp_path_factory):
    spec, recordings = spec_and_recordings
    return write_dataset(tmp_path_factory.mktemp("data") / "demo", recordings, spec)


def test_what_is_read_is_what_was_recorded(dataset, spec_and_recordings):
    spec, recordings = spec_and_recordings
    demos = load_demonstrations(dataset, 5, spec=spec, keep="all")
    assert demos.num_episodes == 8 and len(demos) == sum(map(len, recordings))
    np.testing.assert_allclose(
        demos.actions.numpy(), np.concatenate([r.actions for r in recordings])
    )
    np.testing.assert_allclose(
        demos.proprio.numpy(), np.concatenate([r.proprio for r in recordings]), atol=1e-7
    )
    assert demos.success.tolist() == [r.success for r in recordings for _ in range(len(r))]
    assert demos.init.tolist() == [r.init for r in recordings for _ in range(len(r))]
    obs, _, _ = demos.batch(torch.arange(len(demos)))
    assert obs.instruction == [r.instruction for r in recordings for _ in range(len(r))]
    np.testing.assert_allclose(
        demos.privileged.numpy(), np.concatenate([r.privileged for r in recordings])
    )
    assert (
        demos.privileged.shape[1] == spec.privileged_dim and obs.privileged is None
    )  # which no policy sees
    for camera in ("front", "wrist"):
        original = np.concatenate([r.images[camera] for r in recordings]).astype(np.float64)
        error = ((demos.images[camera] - original) ** 2).mean(axis=(1, 2, 3))
        assert 10 * np.log10(255**2 / error.max()) > 36  # dB, of the worst frame
        assert error.argmax() >= 0 and np.abs(demos.images[camera] - original).mean() < 2.5


def learner(config, spec):
    return SFT(config.algorithm, make_policy(config.policy, spec, 0))


def test_a_run_may_imitate_failures_too(dataset, spec_and_recordings):
    spec, recordings = spec_and_recordings
    number = {}
    for keep in ("success", "all"):
        sections = {
            "env": {"name": "mujoco", "task": "pick,push", "cameras": ["front", "wrist"]},
            "algorithm": {"name": "sft"},
        }
        config = resolve(
            {
                **sections,
                "policy": {"name": "flow_vla"},
                "data": {"path": str(dataset), "keep": keep},
            }
        )
        number[keep] = load_demos(config, learner(config, spec), spec).num_episodes
    assert number == {"success": sum(r.success for r in recordings), "all": 8}


def test_a_policy_that_reads_instructions_needs_them(dataset, spec_and_recordings, tmp_path):
    spec, _ = spec_and_recordings
    folder = shutil.copytree(dataset, tmp_path / "silent")
    table = pq.read_table(folder / "meta" / "tasks.parquet")
    name = next(n for n in ("task", "__index_level_0__") if n in table.column_names)
    place = table.schema.get_field_index(name)
    first = int(table["task_index"][0].as_py())
    texts = ["", *table[name].to_pylist()[1:]]
    pq.write_table(
        table.set_column(place, name, pa.array(texts)), folder / "meta" / "tasks.parquet"
    )
    silent = [
        row["episode_index"]
        for row in open_dataset(folder).episodes
        if first
        in open_dataset(folder).columns["task_index"][
            row["dataset_from_index"] : row["dataset_to_index"]
        ]
    ]
    sections = {"env": {"name": "mujoco", "task": "pick,push", "cameras": ["front", "wrist"]}}
    sections |= {"policy": {"name": "flow_vla"}, "algorithm": {"name": "sft"}}

    def load(**data):
        config = resolve({**sections, "data": {"path": str(folder), "keep": "all", **data}})
        said = []
        demos = load_demos(config, learner(config, spec), spec, pictures=False, say=said.append)
        return demos, said

    with pytest.raises(UserError, match=r"has no instruction in .*flow_vla reads instructions"):
        load()
    # The others are usable, and what is left out is said.
    demos, said = load(skip=silent)
    assert demos.num_episodes == 8 - len(silent) > 0 and "(data.skip)" in said[0]
    # A policy that reads none takes all.
    assert load_demonstrations(folder, 1, keep="all").num_episodes == 8
    assert FlowMLP.reads_instructions is False


def test_a_run_says_which_camera_of_the_data_is_which_of_the_env(dataset, spec_and_recordings):
    spec, _ = spec_and_recordings
    exchanged = {"front": "wrist", "wrist": "front"}
    seen = []
    for cameras in ({}, exchanged):
        sections = {"env": {"name": "mujoco", "task": "pick,push"}, "policy": {"name": "flow_vla"}}
        data = {"path": str(dataset), "cameras": cameras}
        config = resolve({**sections, "algorithm": {"name": "sft"}, "data": data})
        seen.append(load_demos(config, learner(config, spec), spec).images)
    assert np.array_equal(seen[0]["front"], seen[1]["wrist"])
    assert not np.array_equal(seen[0]["front"], seen[1]["front"])


def test_lerobot_reads_the_same_frames(dataset):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    theirs = LeRobotDataset("local/demo", root=dataset, video_backend="pyav", return_uint8=True)
    ours = load_demonstrations(dataset, 1, keep="all")
    assert len(theirs) == len(ours) and theirs.num_episodes == 8
    seen = [k for k in dataset_to_policy_features(theirs.meta.features) if k != "action"]
    assert all(
        k.startswith("observation.") for k in seen
    )  # its policies do not see the simulator's state either
    for i in range(0, len(ours), 7):
        item = theirs[i]
        obs, actions, _ = ours.batch(torch.tensor([i]))
        assert torch.equal(
            item["observation.images.front"].permute(1, 2, 0), obs.images["front"][0]
        )
        assert torch.equal(
            item["observation.images.wrist"].permute(1, 2, 0), obs.images["wrist"][0]
        )
        assert torch.equal(item["action"], actions[0, 0]) and item["task"] == obs.instruction[0]


def test_chunks_stop_at_the_end_of_an_episode(dataset, spec_and_recordings):
    _, recordings = spec_and_recordings
    demos = load_demonstrations(dataset, 6, keep="all")
    first = len(recordings[0])
    _, actions, mask = demos.batch(torch.tensor([0, first - 2, first]))
    assert actions.shape == (3, 6, 4) and mask.tolist() == [
        [True] * 6,
        [True] * 2 + [False] * 4,
        [True] * 6,
    ]
    np.testing.assert_allclose(actions[0].numpy(), recordings[0].actions[:6])
    np.testing.assert_allclose(actions[1].numpy(), recordings[0].actions[[-2, -1, -1, -1, -1, -1]])
    np.testing.assert_allclose(actions[2].numpy(), recordings[1].actions[:6])


def test_failures_and_the_number_of_episodes(dataset, spec_and_recordings):
    _, recordings = spec_and_recordings
    solved = [r for r in recordings if r.success]
    demos = load_demonstrations(dataset, 4)
    assert (
        demos.num_episodes == len(solved)
        and len(demos) == sum(map(len, solved))
        and bool(demos.success.all())
    )
    two = load_demonstrations(dataset, 4, episodes=2)
    assert len(two) == len(solved[0]) + len(solved[1])
    assert (two.images["front"] == demos.images["front"][: len(two)]).all()
    with pytest.raises(UserError, match=f"only {len(solved)} of that kind"):
        load_demonstrations(dataset, 4, episodes=8)


def test_a_mapped_file_holds_the_same_frames(dataset):
    data = open_dataset(dataset)
    rows = np.arange(3, 40)
    key = "observation.images.wrist"
    in_memory = decode_camera(data, key, rows)
    mapped = decode_camera(data, key, rows, memory_limit=0)
    assert isinstance(mapped, np.memmap) and (mapped == in_memory).all()
    files = list((dataset / ".cache").iterdir())
    stamp = files[0].stat().st_mtime_ns
    again = decode_camera(data, key, rows, memory_limit=0)
    assert (again == in_memory).all() and [
        f.stat().st_mtime_ns for f in (dataset / ".cache").iterdir()
    ] == [stamp]
    demos = load_demonstrations(dataset, 3, memory_limit=0)
    obs, _, _ = demos.batch(torch.tensor([1, 5]))
    obs.images["front"] += 1  # a batch is a copy, also of a mapped file


def test_statistics():
    x = torch.from_numpy(np.random.default_rng(0).normal(2.0, 3.0, size=(1000, 2))).float()
    s = Statistics.of(x)
    torch.testing.assert_close(s.mean, x.mean(0))
    torch.testing.assert_close(s.std, x.std(0, correction=0))
    torch.testing.assert_close(
        torch.stack([s.min, s.max]), torch.stack([x.min(0).values, x.max(0).values])
    )
    torch.testing.assert_close(s.q99, torch.quantile(x, 0.99, dim=0), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A data set of others: other names and sizes, one camera as pictures, no success column."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    root = tmp_path_factory.mktemp("foreign") / "set"
    features = {
        "observation.images.top": {
            "dtype": "video",
            "shape": (96, 128, 3),
            "names": ["height", "width", "channels"],
        },
        "observation.image2": {
            "dtype": "image",
            "shape": (3, 48, 48),
            "names": ["channels", "height", "width"],
        },
        "state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": (4,), "names": None},
    }
    made = LeRobotDataset.create(
        "them/set", fps=10, features=features, root=root, video_backend="pyav"
    )
    rng = np.random.default_rng(0)
    for episode in range(3):
        for t in range(5):
            made.add_frame(
                {
                    "observation.images.top": np.full(
                        (96, 128, 3), 40 * episode + 8 * t, dtype=np.uint8
                    ),
                    "observation.image2": np.full(
                        (3, 48, 48), 40 * episode + 8 * t, dtype=np.uint8
                    ),
                    "state": rng.normal(size=3).astype(np.float32),
                    "action": np.full(4, 0.1 * t, dtype=np.float32),
                    "task": f"task {episode % 2}",
                }
            )
        made.save_episode()
    made.finalize()
    if hasattr(os, "sched_setscheduler"):  # SVT-AV1 makes root's process a real-time one
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return root


def test_someone_elses_data_set_with_other_cameras(foreign, spec_and_recordings):
    spec, _ = spec_and_recordings
    demos = load_demonstrations(
        foreign, 2, state="state", cameras={"front": "observation.images.top", "wrist": "image2"}
    )
    assert demos.images["front"].shape == (15, 96, 128, 3) and demos.images["wrist"].shape == (
        15,
        48,
        48,
        3,
    )
    shades = np.array([40 * e + 8 * t for e in range(3) for t in range(5)])
    assert (demos.images["wrist"].mean(axis=(1, 2, 3)) == shades).all()
    assert np.abs(demos.images["front"].mean(axis=(1, 2, 3)) - shades).max() < 3
    assert (
        demos.num_episodes == 3
        and demos.sentences == ["task 0", "task 1"]
        and bool(demos.success.all())
    )
    with pytest.raises(UserError, match="3 proprio dims, but mujoco"):
        load_demonstrations(
            foreign, 2, state="state", spec=spec, cameras={"front": "top", "wrist": "image2"}
        )


def test_pictures_take_the_size_of_the_specs_cameras(foreign, spec_and_recordings):
    from dataclasses import replace

    spec = replace(
        spec_and_recordings[0], proprio_dim=3, cameras={"front": (32, 32), "wrist": (48, 48)}
    )
    demos = load_demonstrations(
        foreign, 2, state="state", spec=spec, cameras={"front": "top", "wrist": "image2"}
    )
    assert {n: x.shape[1:3] for n, x in demos.images.items()} == spec.cameras


def test_wrong_keys_are_named_with_the_nearest(foreign, dataset, spec_and_recordings):
    spec, _ = spec_and_recordings
    with pytest.raises(UserError, match=r"no 'observation.state'.*It holds: .*state"):
        load_demonstrations(foreign, 2)
    with pytest.raises(UserError, match=r"no 'actoin'.*Did you mean 'action'"):
        load_demonstrations(dataset, 2, action="actoin")
    with pytest.raises(UserError, match=r"has the camera 'front', but the data set .*'top'"):
        load_demonstrations(foreign, 2, state="state", spec=spec)
    with pytest.raises(UserError, match="Did you mean 'top'"):
        load_demonstrations(foreign, 2, state="state", cameras={"front": "tob"})


def test_data_of_another_kind_is_refused(dataset, spec_and_recordings, tmp_path):
    from dataclasses import replace

    spec, _ = spec_and_recordings
    with pytest.raises(UserError, match=r"ee_delta_pos; .* takes joint_delta"):
        load_demonstrations(dataset, 2, spec=replace(spec, control_mode="joint_delta"))
    demos = load_demonstrations(dataset, 2, spec=spec)
    demos.actions[3, 1] = 7.0
    with pytest.raises(UserError, match=r"reach 7, but .*\[-1, 1\]"):
        demos.check(spec)
    demos.actions[3, 1] = float("nan")
    with pytest.raises(UserError, match="NaN"):
        demos.check(spec)
    with pytest.raises(UserError, match="no LeRobot data set"):
        load_demonstrations(tmp_path, 2)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text(json.dumps({"codebase_version": "v1.6"}))
    with pytest.raises(UserError, match=r"v1\.6; embodyrl reads v2\.0, v2\.1 and v3\.0"):
        load_demonstrations(tmp_path, 2)


def test_data_sets_whose_states_mean_something_else_are_not_mixed(dataset, tmp_path):
    older = shutil.copytree(dataset, tmp_path / "older")
    page = json.loads((older / "meta" / "embodyrl.json").read_text())
    assert Clips.load([str(dataset), str(dataset)]).spec.layout and page["spec"].pop("layout")
    (older / "meta" / "embodyrl.json").write_text(json.dumps(page))
    with pytest.raises(
        UserError,
        match=r"older and .*demo disagree on which numbers .*EnvSpec\.layout.*Collect it again",
    ):
        Clips.load([str(dataset), str(older)])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_recording_leaves_nothing(spec_and_recordings, tmp_path, error):
    spec, recordings = spec_and_recordings
    with pytest.raises(error), DatasetWriter(tmp_path / "a", spec) as writer:
        writer.add(recordings[0])
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced(spec_and_recordings, tmp_path):
    with pytest.raises(UserError, match="exists already"):
        DatasetWriter(tmp_path, spec_and_recordings[0])
