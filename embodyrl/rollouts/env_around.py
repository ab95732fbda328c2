"""``EnvAround``: what envs around another env have in common."""

from __future__ import annotations

from typing import Any

from embodyrl.env import VecEnv


class EnvAround:
    """A VecEnv around another one; what a subclass does not change is the other one's.

    Args:
        env: the one inside.

    Attributes:
        env: the one inside.
        spec: its spec.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.spec = env.spec

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.env, name)

    def close(self) -> None:
        """See ``VecEnv.close``."""
        self.env.close()
