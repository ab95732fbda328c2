"""A robot behind ROS 2 (rclpy), ROS 1 (rospy) or a rosbridge server, and the simulated one as a node of each.

``bus`` moves messages, ``robot`` is the arm behind it, ``twin_node`` the simulated arm; neither
knows which ROS it is.
"""
