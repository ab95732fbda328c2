"""ROS 2's definitions of the messages in a log: readers need neither ROS nor this project."""

from __future__ import annotations

# As in ROS 2's interface packages (common_interfaces, rcl_interfaces), without their comments.
_TEXTS = {
    "builtin_interfaces/Time": "int32 sec\nuint32 nanosec",
    "rcl_interfaces/Log": """uint8 DEBUG=10
uint8 INFO=20
uint8 WARN=30
uint8 ERROR=40
uint8 FATAL=50
builtin_interfaces/Time stamp
uint8 level
string name
string msg
string file
string function
uint32 line""",
    "sensor_msgs/CompressedImage": "std_msgs/Header header\nstring format\nuint8[] data",
    "sensor_msgs/Image": """std_msgs/Header header
uint32 height
uint32 width
string encoding
uint8 is_bigendian
uint32 step
uint8[] data""",
    "sensor_msgs/JointState": """std_msgs/Header header
string[] name
float64[] position
float64[] velocity
float64[] effort""",
    "std_msgs/Bool": "bool data",
    "std_msgs/Float32MultiArray": "std_msgs/MultiArrayLayout layout\nfloat32[] data",
    "std_msgs/Float64MultiArray": "std_msgs/MultiArrayLayout layout\nfloat64[] data",
    "std_msgs/Header": "builtin_interfaces/Time stamp\nstring frame_id",
    "std_msgs/MultiArrayDimension": "string label\nuint32 size\nuint32 stride",
    "std_msgs/MultiArrayLayout": "std_msgs/MultiArrayDimension[] dim\nuint32 data_offset",
    "std_msgs/String": "string data",
}
_BETWEEN = f"\n{'=' * 80}\nMSG: "


def definition(kind: str) -> str:
    """The ``ros2msg`` schema of a message type: its definition, and those of the types inside it.

    Args:
        kind: ``package/Name``.

    Raises:
        KeyError: logs have no such message.
    """
    inner = [line.split()[0].removesuffix("[]") for line in _TEXTS[kind].splitlines()]
    return "".join(
        [
            _TEXTS[kind],
            *(f"{_BETWEEN}{each}\n{definition(each)}" for each in inner if each in _TEXTS),
        ]
    )
