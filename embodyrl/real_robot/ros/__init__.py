"""A robot behind ROS 2 (rclpy), ROS 1 (rospy) or a rosbridge server.

``robot`` is the arm. It sees topics through ``bus`` and does not know which ROS carries them.
"""
