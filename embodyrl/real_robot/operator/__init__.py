"""A person beside the robot: what they see, and what they tell it."""

from embodyrl.real_robot.operator.page import OperatorPage

__all__ = ["OperatorPage"]
