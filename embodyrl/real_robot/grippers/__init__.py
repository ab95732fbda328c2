"""Grippers beside the arm: what they share (``interface``), and Robotiq's 2F by Modbus RTU."""
