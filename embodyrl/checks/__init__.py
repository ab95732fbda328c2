"""Checks whether an env, a policy or an algorithm keeps its contract, and says what is wrong."""

from embodyrl.checks.algorithm import check_algorithm
from embodyrl.checks.env import check_env
from embodyrl.checks.error import CheckError
from embodyrl.checks.policy import check_policy

__all__ = ["CheckError", "check_algorithm", "check_env", "check_policy"]
