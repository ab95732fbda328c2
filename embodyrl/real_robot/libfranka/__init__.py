"""An arm by libfranka itself, without ROS: its 1 kHz loop runs in a process of its own.

Importing this imports no ``pylibfranka``.
"""
