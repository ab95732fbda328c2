"""RLDS's TFRecord files, written by the protobuf library and an own checksum."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.published_layouts import crc32c, write_records
from embodyrl.cli.main import main
from embodyrl.data.importers.rlds import import_rlds
from embodyrl.data.importers.tfrecord import read_examples
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.verify import verify_dataset
from embodyrl.errors import UserError
from embodyrl.types import EnvSpec

SIZE = 32
FILE = "toy_set-train.tfrecord-0000{}-of-00002"


def test_the_checksum_of_these_tests():
    assert crc32c(b"123456789") == 0xE3069283  # CRC-32C's check value


def picture(value: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (SIZE, SIZE), (value,) * 3 if mode == "RGB" else value).save(out, kind)
    return out.getvalue()


def episode(steps: int, seed: int, solved: bool = True, **changes) -> dict:
    rng = np.random.default_rng(seed)
    last = np.arange(steps) == steps - 1
    return {
        "steps/action": rng.uniform(-1, 1, size=(steps, 7)).astype(np.float32),
        "steps/observation/state": rng.normal(size=(steps, 8)).astype(np.float32),
        "steps/observation/joint_state": rng.normal(size=(steps, 7)).astype(np.float32),
        "steps/observation/image": [picture(10 * t + seed) for t in range(steps)],
        "steps/observation/wrist_image": [picture(5 * t, "JPEG") for t in range(steps)],
        "steps/observation/depth": [picture(7 * t, mode="I;16") for t in range(steps)],
        "steps/language_instruction": [b"put it down"] * steps,
        "steps/reward": (last & solved).astype(np.float32),
        "steps/is_first": (np.arange(steps) == 0).astype(np.int64),
        "steps/is_last": last.astype(np.int64),
        "steps/discount": np.ones(steps, np.float32),
        "episode_metadata/file_path": [b"a.hdf5"],
    } | changes


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "toy_set" / "1.0.0"
    path.mkdir(parents=True)
    write_records(path / FILE.format(0), [episode(5, 0), episode(6, 1, solved=False)])
    write_records(path / FILE.format(1), [episode(4, 2)])
    (path / "features.json").write_text("{}")
    return path


def test_examples_are_read_as_protobuf_wrote_them(tmp_path):
    given = {
        "floats": np.array([1.5, -2.0, np.inf], np.float32),
        "numbers": np.array([0, 1, -1, 2**62, -(2**63)], np.int64),
        "words": [b"", "ä".encode(), bytes(range(256)) * 300],
        "": [b"x"],
    }
    write_records(tmp_path / "a.tfrecord", [given, given])
    found = list(read_examples(tmp_path / "a.tfrecord"))
    assert len(found) == 2 and found[0].keys() == given.keys()
    for key, values in given.items():
        if isinstance(values, list):
            assert found[1][key] == values
        else:
            assert np.array_equal(found[1][key], values) and found[1][key].dtype == values.dtype


def test_rlds(folder, tmp_path, capsys):
    out = tmp_path / "set"
    assert main(["data", "from-rlds", str(folder), "--hz", "10", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Left aside are depth, joint_state." in said
    assert f"Wrote 3 episodes, 2 of them solved, to {out}; left out: 0." in said
    verdict = verify_dataset(out)
    assert verdict.faults == [] and verdict.fps == 10 and open_dataset(out).origin == {}
    assert any("does not say its control mode" in text for text in verdict.notes)
    size = (SIZE, SIZE)
    spec = EnvSpec("arm", 1, 7, 8, "x", 10.0, 50, {"image": size, "wrist_image": size})
    demos = load_demonstrations(out, 3, spec=spec, keep="all")
    assert demos.sentences == ["put it down"] and demos.success.tolist() == [
        *[True] * 5, *[False] * 6, *[True] * 4,
    ]  # fmt: skip
    whole = [episode(5, 0), episode(6, 1), episode(4, 2)]
    for key, values in (
        ("steps/action", demos.actions),
        ("steps/observation/state", demos.proprio),
    ):
        np.testing.assert_allclose(values, np.concatenate([e[key] for e in whole]), rtol=1e-6)
    shown = demos.images["image"][:, 3, 3, 0].astype(int)
    expected = [10 * t + seed for seed, steps in ((0, 5), (1, 6), (2, 4)) for t in range(steps)]
    assert np.abs(shown - expected).max() <= 3


def test_the_state_may_be_made_of_other_keys(folder, tmp_path):
    options = {"hz": 10.0, "say": lambda text: None}
    import_rlds(folder, tmp_path / "set", state=["joint_state", "state"], **options)
    assert load_demonstrations(tmp_path / "set", 1).proprio.shape[1] == 15


def test_an_episode_that_cannot_be_used_is_left_out_with_a_word(tmp_path):
    cut = picture(3)[:40]
    bad = {
        "the action has 34 numbers in 5 steps": {"steps/action": np.zeros(34, np.float32)},
        "a picture of image cannot be decoded": {"steps/observation/image": [cut] * 5},
        "camera image has 4 rows for 5 actions": {"steps/observation/image": [picture(1)] * 4},
        "its state hold NaN": {"steps/observation/state": np.full((5, 8), np.nan, np.float32)},
        "it has no instruction": {"steps/language_instruction": [b" "] * 5},
    }
    write_records(
        tmp_path / "a.tfrecord", [episode(5, 0), *(episode(5, 1, **c) for c in bad.values())]
    )
    said = []
    written = import_rlds(tmp_path / "a.tfrecord", tmp_path / "set", hz=5.0, say=said.append)
    assert (written["episodes"], written["left_out"]) == (1, len(bad))
    for text, words in zip(said[1:], bad, strict=True):
        assert words in text and "is left out" in text


def test_what_is_missing_or_damaged_is_said(folder, tmp_path):
    def refused(match, path=folder, **options):
        with pytest.raises(UserError, match=match):
            import_rlds(path, tmp_path / "set", **{"hz": 10.0, "say": lambda t: None, **options})
        assert not (tmp_path / "set").exists()

    refused("does not say how many actions a second.*--hz", hz=0.0)
    refused("no 'joints'.*There are .*state", state=["joints"])
    refused("There are no TFRecord files", tmp_path)
    parts = {"steps/action/world_vector": np.zeros(15, np.float32)}
    whole = episode(5, 0) | parts
    del whole["steps/action"]
    write_records(tmp_path / "b.tfrecord", [whole])
    refused("steps/action/world_vector: only actions in one array", tmp_path / "b.tfrecord")
    file = folder / FILE.format(0)
    data = file.read_bytes()
    file.write_bytes(data[:-9])
    refused("Record 1 of .* is cut")
    file.write_bytes(data[:5])
    refused("Record 0 of .* is cut")
    file.write_bytes(b"\x01" + data[1:])
    refused("does not begin as one of a TFRecord file")
    file.write_bytes(data[:12] + b"\xff" * 40 + data[52:])
    refused("is no tf.train.Example")
