import av
import numpy as np
import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.storage.video import enlarge, write_video


def read(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264" and stream.codec_context.pix_fmt == "yuv420p"
        return float(stream.average_rate), np.stack(
            [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        )


def test_small_frames_are_enlarged_and_keep_their_colours(tmp_path):
    frames = np.zeros((12, 64, 64, 3), dtype=np.uint8)
    frames[:, 16:32, 16:48] = (200, 30, 40)
    for t in range(12):
        frames[t, 48:, 4 * t : 4 * t + 8] = (40, 60, 220)
    fps, back = read(write_video(torch.from_numpy(frames), tmp_path / "videos" / "a.mp4", fps=25))
    assert fps == 25 and back.shape == (12, 256, 256, 3)
    assert np.abs(back.astype(int) - enlarge(frames)).mean() < 4
    assert [p.name for p in (tmp_path / "videos").iterdir()] == ["a.mp4"]


def test_odd_sizes_and_single_frames(tmp_path):
    assert read(write_video(np.full((1, 301, 411, 3), 99, np.uint8), tmp_path / "a.mp4", 20))[
        1
    ].shape == (
        1,
        300,
        410,
        3,
    )
    assert read(write_video(np.full((2, 65, 129, 3), 99, np.uint8), tmp_path / "b.mp4", 20))[
        1
    ].shape == (
        2,
        194,
        386,
        3,
    )


def test_a_rate_that_is_no_whole_number_is_kept(tmp_path):
    frames = np.zeros((5, 64, 64, 3), np.uint8)
    assert read(write_video(frames, tmp_path / "a.mp4", fps=12.5))[0] == 12.5
    assert read(write_video(frames, tmp_path / "b.mp4", fps=100 / 3))[0] == pytest.approx(100 / 3)


def test_the_index_comes_first(tmp_path):
    data = write_video(np.zeros((3, 64, 64, 3), np.uint8), tmp_path / "a.mp4", 20).read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize(
    "frames",
    [np.zeros((0, 8, 8, 3), np.uint8), np.zeros((2, 8, 8, 3)), np.zeros((8, 8, 3), np.uint8)],
)
def test_other_arrays_are_refused(tmp_path, frames):
    with pytest.raises(UserError, match=r"\(T, h, w, 3\) in uint8"):
        write_video(frames, tmp_path / "a.mp4", 20)
    assert list(tmp_path.iterdir()) == []
