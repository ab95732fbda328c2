"""ROS 2: a node of this process."""

# pyright: reportMissingImports=false
# rclpy comes with a ROS installation, or with the extra ``ros``.
from __future__ import annotations

import array
import importlib
import threading
from collections.abc import Callable
from typing import Any

from embodyrl.errors import MissingDependencyError
from embodyrl.real_robot.ros.bus import Fields


class RclpyBus:
    """See ``Bus``. Callbacks run in one thread; the middleware publishes in threads of its own.

    Args:
        name: of the node.

    Raises:
        MissingDependencyError: there is no rclpy.
    """

    ros = 2

    def __init__(self, name: str) -> None:
        try:
            import rclpy
            from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
            from rclpy.signals import SignalHandlerOptions
        except ImportError as error:
            raise MissingDependencyError(
                f"ROS 2's rclpy cannot be imported ({error}). Source a ROS installation of this "
                "Python's version, or install the third-party builds: pip install 'embodyrl[ros]'."
            ) from error
        self._context = rclpy.Context()  # type: ignore[attr-defined]
        # Ctrl-C goes to the control loop, which stops the arm first.
        rclpy.init(context=self._context, signal_handler_options=SignalHandlerOptions.NO)
        self._node = rclpy.create_node(name, context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._trouble = ""
        self._ended = (ExternalShutdownException,)
        self._thread = threading.Thread(target=self._spin, name="rclpy", daemon=True)
        self._thread.start()

    def subscribe(self, topic: str, kind: str, callback: Callable[[Fields], None]) -> None:
        """See ``Bus``."""
        # Best effort, which hears reliable publishers too.
        from rclpy.qos import qos_profile_sensor_data

        self._node.create_subscription(
            message_class(kind),
            topic,
            lambda message: callback(to_fields(message)),
            qos_profile_sensor_data,
        )

    def advertise(self, topic: str, kind: str) -> Callable[[Fields], None]:
        """See ``Bus``."""
        cls = message_class(kind)
        publisher = self._node.create_publisher(cls, topic, 1)
        return lambda fields: publisher.publish(from_fields(cls, fields))

    def trouble(self) -> str:
        """See ``Bus``. ROS 2 has no master, so a node that is gone shows only by its silence."""
        return self._trouble

    def close(self) -> None:
        """See ``Bus``."""
        if self._context.ok():
            self._context.shutdown()
            self._thread.join(timeout=5.0)
            self._node.destroy_node()

    def _spin(self) -> None:
        try:
            self._executor.spin()
        except self._ended:
            pass
        except Exception as error:  # of a callback or the middleware: it becomes a fault
            self._trouble = f"ROS 2's thread ended: {type(error).__name__}: {error}"


def message_class(kind: str) -> Any:
    """The class of ``package/Name``."""
    package, _, name = kind.partition("/")
    return getattr(importlib.import_module(f"{package}.msg"), name)


def to_fields(message: Any) -> Fields:
    """A message as a dict."""
    return {name: _plain(getattr(message, name)) for name in message.get_fields_and_field_types()}


def _plain(value: Any) -> Any:
    if hasattr(value, "get_fields_and_field_types"):
        return to_fields(value)
    if isinstance(value, array.array) and value.typecode == "B":
        return value.tobytes()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def from_fields(cls: Any, fields: Fields) -> Any:
    """A message of the class; fields that are not given keep their defaults."""
    message = cls()
    kinds = cls.get_fields_and_field_types()
    for name, value in fields.items():
        kind = kinds[name]
        inner = kind.removeprefix("sequence<").removesuffix(">")
        if isinstance(value, dict):
            value = from_fields(message_class(kind), value)
        elif isinstance(value, list) and "/" in inner:
            value = [from_fields(message_class(inner), each) for each in value]
        elif isinstance(value, bytes):
            value = array.array("B", value)  # rclpy would check a list byte by byte
        setattr(message, name, value)
    return message
