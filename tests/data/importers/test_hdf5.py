"""HDF5 files built as LIBERO's, robomimic's and ManiSkill's own tools write them."""

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.published_layouts import add_observations, robosuite_demonstrations
from embodyrl.cli.main import main
from embodyrl.data.importers.hdf5 import import_hdf5
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.verify import verify_dataset
from embodyrl.errors import UserError
from embodyrl.functional.rotations import rotation_matrices, rotation_vectors
from embodyrl.sims.libero.base import CONVENTIONS
from embodyrl.types import EnvSpec

LENGTHS = (6, 9)
SIZE = 32


def pictures(steps: int, seed: int) -> np.ndarray:
    """Pictures whose rows differ, so that a turned one is noticed."""
    rows = np.linspace(20, 220, SIZE)[None, :, None, None]
    offset = 4 * np.arange(steps)[:, None, None, None] + seed
    return np.broadcast_to(rows + offset, (steps, SIZE, SIZE, 3)).clip(0, 255).astype(np.uint8)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def robosuite_args(**changes) -> dict:
    options = {
        "control_freq": 20,
        "reward_shaping": False,
        "controller_configs": {"type": "OSC_POSE", "control_delta": True},
        **changes,
    }
    return {"env_name": "Lift", "type": 1, "env_kwargs": options}


def write_libero(file: Path, convention: str = "opengl", lengths=LENGTHS) -> None:
    """As LIBERO's scripts/create_dataset.py."""
    with h5py.File(file, "w") as f:
        data = f.create_group("data")
        data.attrs["env_name"] = "Libero_Floor_Manipulation"
        data.attrs["env_args"] = json.dumps(robosuite_args())
        data.attrs["problem_info"] = json.dumps({"language_instruction": ['"', "pick it up", '"']})
        data.attrs["macros_image_convention"] = convention
        data.attrs["bddl_file_name"] = "chiliocosm/bddl_files/libero_object/pick_it_up.bddl"
        for i, n in enumerate(lengths):
            demo = data.create_group(f"demo_{i}")
            obs = demo.create_group("obs")
            poses = rng(i).normal(size=(n, 6))
            obs["gripper_states"] = rng(i + 10).normal(size=(n, 2))
            obs["joint_states"] = rng(i + 20).normal(size=(n, 7))
            obs["ee_states"], obs["ee_pos"], obs["ee_ori"] = poses, poses[:, :3], poses[:, 3:]
            obs["agentview_rgb"], obs["eye_in_hand_rgb"] = pictures(n, 0), pictures(n, 9)
            obs["agentview_depth"] = np.ones((n, SIZE, SIZE, 1), np.float32)
            demo["actions"] = rng(i + 30).uniform(-1, 1, size=(n, 7))
            demo["states"] = rng(i).normal(size=(n, 20))
            last = (np.arange(n) == n - 1).astype(np.uint8)
            demo["rewards"], demo["dones"] = last, last
            demo.attrs["num_samples"] = n


def write_robomimic(file: Path, lengths=LENGTHS, **changes) -> None:
    """As robomimic's scripts/dataset_states_to_obs.py; the second episode fails."""
    with h5py.File(file, "w") as f:
        data = f.create_group("data")
        data.attrs["total"] = sum(lengths)
        data.attrs["env_args"] = json.dumps(robosuite_args(**changes), indent=4)
        for i, n in enumerate(lengths):
            demo = data.create_group(f"demo_{i}")
            for group in ("obs", "next_obs"):
                for key, dims in (("eef_pos", 3), ("eef_quat", 4), ("gripper_qpos", 2)):
                    demo[f"{group}/robot0_{key}"] = rng(i + dims).normal(size=(n, dims))
                demo[f"{group}/object"] = rng(i).normal(size=(n, 10))
                demo[f"{group}/agentview_image"] = pictures(n, 0)
            demo["actions"] = rng(i + 30).uniform(-1, 1, size=(n, 7))
            demo["states"] = rng(i).normal(size=(n, 32))
            demo["rewards"] = ((np.arange(n) == n - 1) & (i != 1)).astype(np.float64)
            demo["dones"] = (np.arange(n) == n - 1).astype(np.int64)
            demo.attrs["num_samples"] = n
        f["mask/train"] = np.array([b"demo_0"])


def write_maniskill(file: Path, mode: str = "rgb", lengths=LENGTHS) -> None:
    """As ManiSkill's RecordEpisode; the second episode fails."""
    with h5py.File(file, "w") as f:
        for i, n in enumerate(lengths):
            trajectory = f.create_group(f"traj_{i}", track_order=True)
            if mode == "state":
                trajectory["obs"] = rng(i).normal(size=(n + 1, 12)).astype(np.float32)
            else:
                obs = trajectory.create_group("obs", track_order=True)
                agent = obs.create_group("agent", track_order=True)
                agent["qpos"] = rng(i).normal(size=(n + 1, 9)).astype(np.float32)
                agent["qvel"] = rng(i + 1).normal(size=(n + 1, 9)).astype(np.float32)
                extra = obs.create_group("extra", track_order=True)
                # Not in the order of the alphabet.
                extra["tcp_pose"] = rng(i + 2).normal(size=(n + 1, 7)).astype(np.float32)
                extra["is_grasped"] = np.zeros(n + 1, bool)
                obs["sensor_param/base_camera/intrinsic_cv"] = np.zeros((n + 1, 3, 3))
                obs["sensor_data/base_camera/rgb"] = pictures(n + 1, 0)
                obs["sensor_data/base_camera/depth"] = np.ones((n + 1, SIZE, SIZE, 1), np.uint16)
            trajectory["actions"] = rng(i + 30).uniform(-1, 1, size=(n, 4)).astype(np.float32)
            trajectory["success"] = (np.arange(n) == n - 1) & (i != 1)
            trajectory["terminated"] = trajectory["success"][()]
            trajectory["truncated"] = np.zeros(n, bool)
    env = {"env_id": "PushCube-v1", "max_episode_steps": 50}
    env["env_kwargs"] = {"obs_mode": mode, "control_mode": "pd_ee_delta_pos"}
    episodes = [{"episode_id": i, "elapsed_steps": n} for i, n in enumerate(lengths)]
    file.with_suffix(".json").write_text(json.dumps({"env_info": env, "episodes": episodes}))


def spec(name: str, mode: str, cameras: dict, proprio: int, actions: int) -> EnvSpec:
    return EnvSpec(name, 1, actions, proprio, mode, 20.0, 50, cameras)


def test_libero(tmp_path, capsys):
    suite = tmp_path / "libero_object"
    suite.mkdir()
    write_libero(suite / "pick_it_up_demo.hdf5")
    assert main(["data", "from-hdf5", str(suite), "--out", str(tmp_path / "set")]) == 0
    said = capsys.readouterr().out
    assert "left aside are agentview_depth, ee_states, joint_states" in said
    assert (
        "paired with the action after it" in said and "Wrote 2 episodes, 2 of them solved" in said
    )
    verdict = verify_dataset(tmp_path / "set")
    assert verdict.faults == [] and verdict.fps == 20
    # What this project's env wants.
    size = (SIZE, SIZE)
    env = spec("libero/libero_object", "osc_pose", {"agentview": size, "wrist": size}, 8, 7)
    demos = load_demonstrations(tmp_path / "set", 4, spec=env)
    assert demos.remarks == [] and demos.sentences == ["pick it up"]
    assert len(demos) == sum(LENGTHS) - len(LENGTHS)
    # Each observation stands beside the action after the one that led to it.
    with h5py.File(suite / "pick_it_up_demo.hdf5") as f:
        obs, actions = f["data/demo_0/obs"], f["data/demo_0/actions"][()]
        state = np.concatenate([obs[k][()] for k in ("ee_pos", "ee_ori", "gripper_states")], axis=1)
    last = LENGTHS[0] - 1
    np.testing.assert_allclose(demos.proprio[:last], state[:-1], rtol=1e-6)
    np.testing.assert_allclose(demos.actions[:last], actions[1:], rtol=1e-6)
    assert demos.solved[:last].tolist() == [False] * (last - 1) + [True]
    # OpenGL's lowest row comes first in the file, and last here.
    column = demos.images["agentview"][0, :, 5, 0].astype(int)
    assert column[0] > 200 > 40 > column[-1]
    assert abs(demos.images["wrist"][0].astype(int).mean() - column.mean() - 9) < 2


def test_libero_pictures_that_stand_upright_stay_so(tmp_path):
    write_libero(tmp_path / "a.hdf5", convention="opencv")
    import_hdf5(tmp_path / "a.hdf5", tmp_path / "set", say=lambda text: None)
    column = load_demonstrations(tmp_path / "set", 1).images["agentview"][0, :, 5, 0].astype(int)
    assert column[0] < 40 < 200 < column[-1]


def test_absolute_targets_of_a_controller_become_changes(tmp_path):
    file = tmp_path / "a.hdf5"
    write_libero(file)
    with h5py.File(file, "a") as f:
        controller = {"type": "OSC_POSE", "control_delta": False}
        f["data"].attrs["env_args"] = json.dumps(robosuite_args(controller_configs=controller))
        for demo in f["data"].values():
            # The state that stands beside an action after the import is that of the row before.
            changes, pose = demo["actions"][1:], demo["obs/ee_states"][:-1]
            turned = rotation_matrices(0.5 * changes[:, 3:6]) @ rotation_matrices(pose[:, 3:])
            moved = pose[:, :3] + 0.05 * changes[:, :3]
            demo["changes"] = changes
            demo["actions"][1:] = np.column_stack([moved, rotation_vectors(turned), changes[:, 6]])
    import_hdf5(file, tmp_path / "set", say=lambda text: None)
    size = (SIZE, SIZE)
    env = spec("libero/libero_object", "osc_pose", {"agentview": size, "wrist": size}, 8, 7)
    demos = load_demonstrations(tmp_path / "set", 1, spec=replace(env, conventions=CONVENTIONS))
    with h5py.File(file) as f:
        changes = np.concatenate([f[f"data/demo_{i}/changes"][()] for i in range(len(LENGTHS))])
    np.testing.assert_allclose(demos.actions, changes, atol=1e-4)
    assert "absolute targets become changes" in demos.remarks[-1]
    # Changes and targets make no one data set.
    write_libero(tmp_path / "b.hdf5")
    with pytest.raises(UserError, match=r"has osc_pose actions at 20 Hz, and .* absolute osc_pose"):
        import_hdf5(tmp_path, tmp_path / "both", say=lambda text: None)


def test_robomimic(tmp_path):
    write_robomimic(tmp_path / "lift.hdf5")
    said = []
    written = import_hdf5(
        tmp_path / "lift.hdf5", tmp_path / "set", instruction="lift it", say=said.append
    )
    assert written == {"episodes": 2, "frames": sum(LENGTHS), "solved": 1, "left_out": 0}
    assert said == ["lift.hdf5: left aside are object."]
    assert verify_dataset(tmp_path / "set").faults == []
    env = spec("robomimic/Lift", "osc_pose", {"agentview": (SIZE, SIZE)}, 9, 7)
    demos = load_demonstrations(tmp_path / "set", 4, spec=env, keep="all")
    assert demos.sentences == ["lift it"] and demos.remarks == []
    with h5py.File(tmp_path / "lift.hdf5") as f:
        np.testing.assert_allclose(demos.actions[:6], f["data/demo_0/actions"][()], rtol=1e-6)
        np.testing.assert_allclose(
            demos.proprio[:6, :3], f["data/demo_0/obs/robot0_eef_pos"][()], rtol=1e-6
        )
    column = demos.images["agentview"][0, :, 5, 0].astype(int)
    assert column[0] < 40 < 200 < column[-1]
    assert demos.success.tolist() == [True] * 6 + [False] * 9


@pytest.mark.parametrize("mode", ["rgb", "state"])
def test_maniskill(tmp_path, mode):
    write_maniskill(tmp_path / "trajectory.h5", mode)
    said = []
    path = tmp_path / "trajectory.h5"
    written = import_hdf5(path, tmp_path / "set", instruction="push", say=said.append)
    assert written == {"episodes": 2, "frames": sum(LENGTHS), "solved": 1, "left_out": 0}
    assert verify_dataset(tmp_path / "set").faults == []
    cameras = {"base_camera": (SIZE, SIZE)} if mode == "rgb" else {}
    dims = 26 if mode == "rgb" else 12
    env = spec("maniskill/PushCube-v1", "pd_ee_delta_pos", cameras, dims, 4)
    demos = load_demonstrations(tmp_path / "set", 4, spec=env)
    assert len(demos) == 6 and "1 of 2 episodes, which failed" in demos.remarks[0]
    with h5py.File(path) as f:
        obs = f["traj_0/obs"]
        if mode == "rgb":
            assert "sensor_data/base_camera/depth" in said[0]
            keys = ("agent/qpos", "agent/qvel", "extra/tcp_pose", "extra/is_grasped")
            parts = [obs[key][()].reshape(7, -1) for key in keys]
            np.testing.assert_allclose(demos.proprio, np.concatenate(parts, axis=1)[:-1], rtol=1e-6)
        else:
            np.testing.assert_allclose(demos.proprio, obs[:-1], rtol=1e-6)


def test_an_episode_that_cannot_be_used_is_left_out_with_a_word(tmp_path):
    file = tmp_path / "lift.hdf5"
    write_robomimic(file, lengths=(5, 6, 7, 5, 6, 5))
    with h5py.File(file, "a") as f:
        for name, change in (
            ("demo_1/actions", lambda a: a[:-1]),
            ("demo_2/obs/agentview_image", lambda a: a[:-2]),
            ("demo_3/actions", lambda a: np.where(np.arange(7) == 3, np.nan, a)),
            ("demo_4/obs/robot0_eef_pos", lambda a: a[:, :2]),
        ):
            values = change(f["data"][name][()])
            del f["data"][name]
            f["data"][name] = values
    said = []
    written = import_hdf5(file, tmp_path / "set", instruction="lift it", say=said.append)
    assert (written["episodes"], written["left_out"]) == (2, 4)
    for text, words in zip(
        said[1:],
        (
            "demo_1 is left out: camera agentview has 6 rows for 5 actions",
            "demo_2 is left out: camera agentview has 5 rows for 7 actions",
            "demo_3 is left out: its actions hold NaN",
            "demo_4 is left out: it has 8 numbers of state, and the first one 9",
        ),
        strict=True,
    ):
        assert words in text
    assert verify_dataset(tmp_path / "set").faults == []


def test_what_a_file_does_not_say_is_asked_for(tmp_path):
    def refused(match, file, **options):
        with pytest.raises(UserError, match=match):
            import_hdf5(file, tmp_path / "set", say=lambda text: None, **options)

    write_robomimic(tmp_path / "lift.hdf5", control_freq=None)
    refused("does not say how many actions a second", tmp_path / "lift.hdf5", instruction="a")
    write_robomimic(tmp_path / "lift.hdf5")
    refused("None of the 2 episodes", tmp_path / "lift.hdf5")
    refused("says 20 actions per second", tmp_path / "lift.hdf5", instruction="a", hz=10.0)
    refused("has no 'joints'.*There are .*robot0_eef_pos", tmp_path / "lift.hdf5", state=["joints"])
    write_maniskill(tmp_path / "b.h5")
    refused("no instruction", tmp_path / "b.h5")
    refused("different layouts", tmp_path, instruction="a")
    (tmp_path / "b.json").unlink()
    refused("b.json is missing", tmp_path / "b.h5", instruction="a")
    refused("There are no HDF5 files", tmp_path / "nothing")
    (tmp_path / "c.h5").write_bytes(b"no hdf5")
    refused("no HDF5 file, or damaged", tmp_path / "c.h5")
    with h5py.File(tmp_path / "d.h5", "w") as f:
        f["weights"] = 1
    refused("no known layout.*It holds weights", tmp_path / "d.h5")
    assert not (tmp_path / "set").exists()


def test_actions_are_clipped_where_the_controller_clips_them(tmp_path):
    file = tmp_path / "lift.hdf5"
    for changes, clipped in (
        ({}, True),
        ({"controller_configs": {"type": "OSC_POSE", "control_delta": False}}, False),
        ({"controller_configs": {}}, False),
    ):
        write_robomimic(file, **changes)
        with h5py.File(file, "a") as f:
            f["data/demo_0/actions"][2, :3] = [3.75, -3.75, 0.5]
        said = []
        out = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        import_hdf5(file, out, instruction="lift it", say=said.append)
        wanted = [1.0, -1.0, 0.5] if clipped else [3.75, -3.75, 0.5]
        assert load_demonstrations(out, 1).actions[2, :3].tolist() == wanted
        words = "1 of 15 actions reach beyond [-1, 1] and are clipped, as OSC_POSE does"
        assert any(words in text for text in said) == clipped


def test_what_people_did_in_robosuite(tmp_path):
    """Files that robosuite ships: refused as they are, imported once they hold observations."""
    pytest.importorskip("robosuite", reason="the extra libero is not installed")
    file = robosuite_demonstrations()
    with pytest.raises(UserError, match=r"no observations.*convert_robosuite\.py"):
        import_hdf5(file, tmp_path / "set", instruction="lift it")
    add_observations(file, tmp_path / "low_dim.hdf5")
    said = []
    written = import_hdf5(
        tmp_path / "low_dim.hdf5", tmp_path / "set", instruction="lift it", say=said.append
    )
    assert written == {"episodes": 3, "frames": 1384, "solved": 3, "left_out": 0}
    assert "actions reach beyond [-1, 1] and are clipped" in said[-1]
    demos = load_demonstrations(tmp_path / "set", 4, spec=spec("Lift", "osc_pose", {}, 9, 7))
    with h5py.File(file) as f:
        actions = np.concatenate([f[f"data/demo_{n}/actions"][()] for n in (1, 2, 3)])
    assert actions.max() > 3
    np.testing.assert_allclose(demos.actions, actions.clip(-1, 1), rtol=1e-6)
    # The hand goes down, and comes up with the cube between the fingers, which are 4 cm apart.
    height, width = demos.proprio[:, 2], demos.proprio[:, 7] - demos.proprio[:, 8]
    assert height[0] > 1 > height[-1] > 0.84 and abs(width[-1] - 0.04) < 0.005


def test_actions_of_an_unknown_meaning_stay_unknown(tmp_path):
    write_robomimic(tmp_path / "lift.hdf5", controller_configs={})
    out = tmp_path / "set"
    import_hdf5(tmp_path / "lift.hdf5", out, instruction="lift", say=lambda text: None)
    assert open_dataset(out).origin == {}
    assert "does not say its control mode" in " ".join(verify_dataset(out).notes)


def test_what_maniskill_records_itself_fits_this_projects_env(tmp_path):
    """Its own ``RecordEpisode``, in the env's state mode."""
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("mani_skill.envs", reason="the extra maniskill is not installed")
    from mani_skill.utils.wrappers.record import RecordEpisode

    from embodyrl.build import make_env
    from embodyrl.config import env_config

    inner = gymnasium.make(
        "PushCube-v1", obs_mode="state", control_mode="pd_ee_delta_pos", sim_backend="cpu"
    )
    env = RecordEpisode(inner, str(tmp_path), trajectory_name="pushed", save_video=False)
    seen = []
    for seed in range(2):
        seen.append(env.reset(seed=seed)[0])
        for _ in range(4):
            env.step(env.action_space.sample())
    env.close()
    quiet = {"instruction": "push the cube", "say": lambda text: None}
    assert import_hdf5(tmp_path / "pushed.h5", tmp_path / "set", **quiet)["frames"] == 8
    ours = make_env(env_config("maniskill", ["env.task=PushCube-v1", "env.num_envs=1"]), "cpu")
    try:
        demos = load_demonstrations(tmp_path / "set", 2, spec=ours.spec, keep="all")
    finally:
        ours.close()
    assert demos.remarks == []
    np.testing.assert_allclose(demos.proprio[0], np.asarray(seen[0]).reshape(-1), rtol=1e-6)
