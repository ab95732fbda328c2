"""Grippers beside the arm: what they share (``gripper``), and Robotiq's 2F by Modbus RTU."""
