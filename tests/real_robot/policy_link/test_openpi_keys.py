"""Observations as openpi's example clients send them (examples/simple_client, libero, aloha_sim, droid)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from embodyrl.real_robot.parsing import MessageError
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.policy_link.openpi_keys import from_openpi
from embodyrl.real_robot.policy_link.server import PolicyServer, check_observation

RNG = np.random.default_rng(0)


def picture(*shape: int) -> np.ndarray:
    return RNG.integers(256, size=shape or (224, 224, 3), dtype=np.uint8)


def metadata(proprio_dim: int, **cameras: tuple[int, int]) -> dict[str, Any]:
    return {"cameras": cameras, "proprio_dim": proprio_dim, "horizon": 5, "action_dim": 7}


LIBERO = {
    "observation/state": RNG.random(8),
    "observation/image": picture(),
    "observation/wrist_image": picture(),
    "prompt": "do something",
}
ALOHA = {
    "state": np.ones((14,)),
    "images": {
        name: picture(3, 224, 224)
        for name in ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
    },
    "prompt": "do something",
}
DROID = {
    "observation/exterior_image_1_left": picture(),
    "observation/wrist_image_left": picture(),
    "observation/joint_position": RNG.random(7),
    "observation/gripper_position": RNG.random(1),
    "prompt": "do something",
}
CASES = {
    "libero": (LIBERO, metadata(8, agentview=(128, 128), wrist=(128, 128))),
    "libero, no camera on the hand": (LIBERO, metadata(8, front=(224, 224))),
    "aloha": (
        ALOHA,
        metadata(14, **dict.fromkeys(("cam_high", "cam_left_wrist", "cam_right_wrist"), (96, 128))),
    ),
    "droid": (DROID, metadata(8, eye_in_hand=(90, 160), front=(90, 160))),
}


@pytest.mark.parametrize("case", CASES)
def test_openpis_clients_are_answered(case: str) -> None:
    sent, told = CASES[case]
    seen: list[dict[str, Any]] = []

    def infer(observation: dict[str, Any]) -> dict[str, Any]:
        seen.append(observation)
        return {"actions": np.zeros((5, 7), np.float32)}

    server = PolicyServer(infer, told, port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = PolicyClient(f"127.0.0.1:{server.port}")
    try:
        assert client.infer(sent)["actions"].shape == (5, 7)
    finally:
        client.close()
        server.close()
        thread.join(timeout=10)
    (got,) = seen
    assert got["prompt"] == "do something" and got["proprio"].dtype == np.float32
    assert {name: image.shape[:2] for name, image in got["images"].items()} == told["cameras"]


def test_each_picture_and_number_goes_to_its_place() -> None:
    told = metadata(8, wrist=(224, 224), agentview=(224, 224))
    got = from_openpi(LIBERO, told)
    assert np.array_equal(got["images"]["agentview"], LIBERO["observation/image"])
    assert np.array_equal(got["images"]["wrist"], LIBERO["observation/wrist_image"])
    np.testing.assert_allclose(got["proprio"], LIBERO["observation/state"], rtol=1e-6)
    # Equal names come first, whatever else they look like.
    told = metadata(8, wrist_image=(224, 224), image=(224, 224))
    assert np.array_equal(
        from_openpi(LIBERO, told)["images"]["wrist_image"], LIBERO["observation/wrist_image"]
    )
    got = from_openpi(ALOHA, metadata(14, cam_low=(224, 224), cam_right_wrist=(224, 224)))
    expected = ALOHA["images"]["cam_right_wrist"].transpose(1, 2, 0)
    assert np.array_equal(got["images"]["cam_right_wrist"], expected)
    got = from_openpi(DROID, metadata(8, front=(224, 224)))
    parts = [DROID[f"observation/{name}_position"] for name in ("joint", "gripper")]
    np.testing.assert_allclose(got["proprio"], np.concatenate(parts), rtol=1e-6)
    # Floats in [0, 1] are the same picture.
    floats = {**LIBERO, "observation/image": LIBERO["observation/image"] / 255}
    got = from_openpi(floats, metadata(8, front=(224, 224)))
    assert np.array_equal(got["images"]["front"], LIBERO["observation/image"])


@pytest.mark.parametrize(
    ("changes", "cameras", "word"),
    [
        (
            {},
            ("left", "right"),
            "no picture is camera left's.*image, wrist_image.*observation/left",
        ),
        ({"observation/image": picture(224, 224)}, ("front",), "image is no colour picture"),
        ({"observation/image": picture(3, 0, 224)}, ("front",), "empty picture"),
        ({"observation/image": picture() / 2.0}, ("front",), r"floats outside of \[0, 1\]"),
        ({"observation/image": np.zeros((8, 8, 3), int)}, ("front",), "not uint8"),
        ({"observation/state": np.array(["a"])}, ("front",), "state is no list of numbers"),
        ({"observation/state": np.full(8, np.nan)}, ("front",), "proprio is not finite"),
        ({"observation/state": np.zeros(9)}, ("front",), r"proprio must be \(8,\)"),
        ({"images": 3}, ("front",), "images is not a map"),
    ],
)
def test_what_does_not_fit_is_said(changes: Any, cameras: tuple[str, ...], word: str) -> None:
    told = metadata(8, **dict.fromkeys(cameras, (8, 8)))
    with pytest.raises(MessageError, match=word):
        check_observation(from_openpi(LIBERO | changes, told), told)


def test_other_requests_are_left_alone() -> None:
    told = metadata(3)
    for message in (None, [1], {}, {"proprio": np.zeros(3, np.float32)}, {3: "a"}):
        assert from_openpi(message, told) is message
