"""Episodes of every length and pictures of every size can be recorded, read and found sound."""

import numpy as np
import pytest
from bound_by_rights import run
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from embodyrl.data.collect import collect_dataset
from embodyrl.data.lerobot_write import LEAST, require_recordable, write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.recording import Recording
from embodyrl.data.verify import verify_dataset
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.config import MujocoConfig
from embodyrl.storage.paths import FileAccessError
from embodyrl.types import EnvSpec


def spec_of(height, width):
    return EnvSpec("test/arm", 1, 2, 3, "ee_delta_pos", 10.0, 8, {"front": (height, width)})


def recording(number, length, height, width):
    """Pictures of one grey each, so that every frame can be told from the others."""
    grey = (16 * (np.arange(length) + 3 * number) % 240).astype(np.uint8)
    return Recording(
        images={"front": np.tile(grey[:, None, None, None], (1, height, width, 3))},
        proprio=np.full((length, 3), number, np.float32),
        actions=np.zeros((length, 2), np.float32),
        reward=np.zeros(length, np.float32),
        solved=np.arange(length) == length - 1,
        init=number,
        task="reach",
        instruction="reach it",
    )


@pytest.mark.parametrize(
    ("lengths", "height", "width"),
    [
        ((3, 1, 4, 1, 1, 2), 64, 64),
        ((1, 4), 64, 64),
        ((2, 3), 257, 301),
        ((2, 1, 2), 256, 322),
        ((2,), 65, 63),
        ((1,), LEAST, LEAST + 1),
    ],
)
def test_what_was_recorded_comes_back(tmp_path, lengths, height, width):
    recordings = [recording(k, n, height, width) for k, n in enumerate(lengths)]
    path = write_dataset(tmp_path / "set", recordings, spec_of(height, width))
    assert verify_dataset(path).faults == []
    demos = load_demonstrations(path, 2, spec=spec_of(height, width))
    assert demos.num_episodes == len(lengths) and len(demos) == sum(lengths)
    true = np.concatenate([r.images["front"] for r in recordings]).astype(int)
    assert np.abs(demos.images["front"].astype(int) - true).max() <= 6
    # LeRobot's own reader sees the same.
    own = LeRobotDataset("local/set", root=path, video_backend="pyav")
    assert own.num_episodes == len(lengths) and len(own) == sum(lengths)
    for k in (0, len(own) - 1):
        picture = own[k]["observation.images.front"]
        assert picture.shape == (3, height, width)
        assert np.abs((255 * picture).permute(1, 2, 0).numpy() - true[k]).max() <= 6


def test_what_cannot_be_written_is_refused_before_anything_is_recorded(tmp_path):
    config = MujocoConfig(task="reach", image_size=LEAST - 1, num_envs=1, max_episode_steps=2)
    with pytest.raises(UserError, match=f"{LEAST - 1} pixels along an edge"):
        require_recordable(tmp_path / "set", spec_of(LEAST - 1, LEAST))
    with pytest.raises(UserError, match=f"env.image_size is {LEAST - 1}, but it must be from"):
        collect_dataset(config, tmp_path / "set", num_episodes=1, keep_failures=True)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_loses_no_picture_silently(tmp_path):
    """LeRobot only logs that a picture could not be written, and would go on without it."""
    noise = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    episode = recording(0, 3, 64, 64)
    episode.images["front"] = noise
    write_dataset(tmp_path / "sound", [episode], spec_of(64, 64))

    def write() -> int:
        with pytest.raises(FileAccessError, match=r"set reached the largest size .* is intact"):
            write_dataset(tmp_path / "set", [episode], spec_of(64, 64))
        return 0

    status, text = run(write, tmp_path / "said", largest_file=9_000)
    assert status == 0, text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["said", "sound"]


def test_pictures_too_small_for_a_video_are_refused(tmp_path):
    with pytest.raises(UserError, match="1 pixels along an edge"):
        write_dataset(tmp_path / "set", [recording(0, 2, 1, 1)], spec_of(1, 1))
