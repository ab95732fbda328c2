"""Demonstrations that a person records by teleoperation: ``embodyrl record``."""
