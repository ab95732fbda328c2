"""A transport that is not there, or not installed, is told in words."""

import importlib.util

import pytest

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.ros.connect_bus import connect


def test_nobody_there_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"No rosbridge server answers at ws://127.0.0.1:1 "):
        connect("rosbridge", "127.0.0.1:1")
    with pytest.raises(UserError, match="There is no transport 'ros3'"):
        connect("ros3")
    if importlib.util.find_spec("rclpy") is None:
        with pytest.raises(MissingDependencyError, match="rclpy cannot be imported"):
            connect("ros2")
    monkeypatch.setenv("ROS1_PYTHON", "/nonexistent")
    with pytest.raises(MissingDependencyError, match="No Python with rospy"):
        connect("ros1")
