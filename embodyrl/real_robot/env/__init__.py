"""The robot as an environment (``VecEnv``), for evaluation and reinforcement learning on it."""
