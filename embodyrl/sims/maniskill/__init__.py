"""ManiSkill's tasks as a ``VecEnv``: CPU processes or the GPU back end, states or camera images."""
