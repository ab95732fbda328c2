"""The twin, a simulated robot: in this process, as a ROS node, or with libfranka's simulator."""
