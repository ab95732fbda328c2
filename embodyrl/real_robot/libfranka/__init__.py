"""An arm by libfranka itself, without ROS.

``robot`` is the arm as the control loop sees it. Its 1 kHz loop runs in ``control_process``, a
process of its own, and its gripper in ``gripper_process``. Only these import ``pylibfranka``.
"""
