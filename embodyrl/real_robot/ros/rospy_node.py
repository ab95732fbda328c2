"""A rospy node that speaks rosbridge's protocol over its pipes, one JSON object per line.

ROS 1 has its own Python (3.8 in Noetic, 3.11 in Debian). So this file imports nothing of this
project, and is written for Python 3.8. It ends when its parent does.
"""

# pyright: reportMissingImports=false
import base64
import json
import os
import sys
import threading
import time

import rosgraph
import roslib.message
import rospy
from genpy.message import fill_message_args

# stdout belongs to the protocol, but rospy prints to it too: its prints go to stderr instead.
_out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
_lock = threading.Lock()


def tell(message):
    """Writes one message to the parent; ends if there is no parent any more."""
    data = json.dumps(message).encode() + b"\n"
    try:
        with _lock:
            _out.write(data)
            _out.flush()
    except OSError:
        os._exit(1)


def to_fields(value):
    """A message as a dict, the way rosbridge writes it: byte arrays in base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "secs"):
        return {"secs": value.secs, "nsecs": value.nsecs}
    if hasattr(value, "__slots__"):
        return {name: to_fields(getattr(value, name)) for name in value.__slots__}
    if isinstance(value, (list, tuple)):
        return [to_fields(each) for each in value]
    return value


def watch_master():
    """Reports when roscore is gone. Known topics would go on without it, but no new ones come."""
    while True:
        time.sleep(0.5)
        if not rosgraph.is_master_online():
            tell({"op": "status", "level": "error", "msg": "roscore does not answer any more"})
            return


def serve(lines):
    """Carries out the parent's requests until the parent is gone."""
    publishers = {}
    for line in lines:
        request = json.loads(line)
        topic = request["topic"]
        if request["op"] == "advertise":
            publishers[topic] = rospy.Publisher(
                topic, roslib.message.get_message_class(request["type"]), queue_size=1
            )
        elif request["op"] == "subscribe":

            def hear(message, topic=topic):
                tell({"op": "publish", "topic": topic, "msg": to_fields(message)})

            kind = roslib.message.get_message_class(request["type"])
            rospy.Subscriber(topic, kind, hear, queue_size=1, buff_size=2**24, tcp_nodelay=True)
        elif request["op"] == "publish":
            message = publishers[topic].data_class()
            fields = request["msg"]
            if message._type in ("sensor_msgs/Image", "sensor_msgs/CompressedImage"):
                fields["data"] = base64.b64decode(fields["data"])
            fill_message_args(message, [fields])
            publishers[topic].publish(message)


if __name__ == "__main__":
    if not rosgraph.is_master_online():
        why = "no roscore answers at " + rosgraph.get_master_uri()
        tell({"op": "status", "level": "error", "msg": why})
        sys.exit(1)
    rospy.init_node(sys.argv[1], anonymous=True, disable_signals=True)
    tell({"op": "status", "level": "info", "msg": "connected"})
    threading.Thread(target=watch_master, daemon=True).start()
    try:
        serve(sys.stdin)
    except Exception as error:
        tell({"op": "status", "level": "error", "msg": type(error).__name__ + ": " + str(error)})
    os._exit(0)
