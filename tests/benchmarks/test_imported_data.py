"""Episodes written in each published layout by the benchmark's own writers, and imported again."""

from functools import partial

import numpy as np
import pytest

from benchmarks import published_layouts as layouts
from benchmarks.published_layouts import LIBERO_SKIPPED, Played
from embodyrl.data.importers.hdf5 import import_hdf5
from embodyrl.data.importers.rlds import import_rlds
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.sims.libero.base import CONVENTIONS
from embodyrl.types import EnvSpec

SIZE = 32
LENGTHS = (9, 12)
SPEC = EnvSpec(
    "libero/libero_object",
    1,
    7,
    8,
    "osc_pose",
    20.0,
    50,
    {"agentview": (SIZE, SIZE), "wrist": (SIZE, SIZE)},
    conventions=CONVENTIONS,
)


def played(steps: int) -> Played:
    """Pictures get brighter downwards and to the right; the gripper closes half-way."""
    rng = np.random.default_rng(steps)
    slope = np.linspace(0, 60, SIZE)
    base = slope[:, None] + 2 * slope[None, :]
    frames = base[None] + 3 * np.arange(steps + 1)[:, None, None]
    actions = rng.uniform(-1, 1, size=(steps, 7)).astype(np.float32)
    actions[:, -1] = np.where(np.arange(steps) < steps // 2, -1.0, 1.0)
    pictures = np.repeat(frames[..., None], 3, axis=-1).astype(np.uint8)
    return Played(
        {"agentview": pictures, "wrist": pictures + 5},
        rng.normal(size=(steps + 1, 8)).astype(np.float32),
        actions,
        np.arange(steps) == steps - 1,
        -1,
        "pick it up",
    )


EPISODES = [played(n) for n in LENGTHS]
QUIET = {"say": lambda text: None}
CAMERAS = {"agentview": "image", "wrist": "wrist_image"}


def check(data, *, lost: int = 0, **options):
    """What is read is what was played, but for the first frames of every episode."""
    demos = load_demonstrations(data, 1, spec=SPEC, **options)
    assert len(demos) == sum(n - lost for n in LENGTHS)
    assert demos.sentences == ["pick it up"]
    for values, wanted in (
        (demos.actions, [e.actions[lost:] for e in EPISODES]),
        (demos.proprio, [e.proprio[lost:-1] for e in EPISODES]),
    ):
        np.testing.assert_allclose(values, np.concatenate(wanted), rtol=1e-6)
    for name, frames in demos.images.items():
        wanted = np.concatenate([e.images[name][lost:-1] for e in EPISODES])
        assert np.abs(frames.astype(int) - wanted).max() < 12, name


def test_libero_s_files(tmp_path):
    (tmp_path / "files").mkdir()
    layouts.write_libero(EPISODES, tmp_path / "files")
    import_hdf5(tmp_path / "files", tmp_path / "set", **QUIET)
    # The first observation of a file was made by the sixth action.
    check(tmp_path / "set", lost=LIBERO_SKIPPED + 1)


def test_robomimic_s_files(tmp_path):
    layouts.write_robomimic(EPISODES, tmp_path / "a.hdf5", "Lift")
    options = {"state": ["flat"], "hz": 20.0, "instruction": "pick it up", **QUIET}
    import_hdf5(tmp_path / "a.hdf5", tmp_path / "set", **options)
    check(tmp_path / "set")


def test_libero_in_rlds_has_mirrored_pictures_and_libero_s_own_gripper(tmp_path):
    layouts.write_rlds(EPISODES, tmp_path / "libero/1.0.0", CAMERAS, turned=True)
    import_rlds(tmp_path / "libero/1.0.0", tmp_path / "set", hz=20.0, **QUIET)
    check(tmp_path / "set", profile="libero_rlds")
    # That is what the loader of OpenVLA makes of these files: other keys, another gripper.
    with pytest.raises(UserError, match=r"has no .state."):
        load_demonstrations(tmp_path / "set", 1, spec=SPEC, profile="libero_openvla")


@pytest.mark.parametrize("write", [layouts.write_lerobot_v21, layouts.write_lerobot_v3])
def test_lerobot_s_files(tmp_path, write):
    if write is layouts.write_lerobot_v3:
        pytest.importorskip("lerobot.datasets", reason="the extra vla is not installed")
    partial(write, hz=20)(EPISODES, tmp_path / "set")
    check(tmp_path / "set")
