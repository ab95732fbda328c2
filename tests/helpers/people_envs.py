"""Gymnasium envs as people register them: ``embodyrl_people:Name-v0`` after ``register_people``."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

LIMIT = 20


class Flicker(gymnasium.Env):
    """Solved at step 5, unsolved again from step 8 on; never terminates by itself."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.start = self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32)
        return self.observe(), {"is_success": False}

    def observe(self):
        return self.start + np.float32(self.t / 100)

    def step(self, action):
        self.t += 1
        return self.observe(), 0.0, False, False, {"is_success": 5 <= self.t < 8}


class Breaks(Flicker):
    """Raises in the third step of its third episode."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.episodes == 3 and self.t == 2:
            raise RuntimeError("simulation is unstable")
        return super().step(action)


class Early(Flicker):
    """Truncates after 3 steps, long before its registered limit."""

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, self.t == 3, info


class Pixels(Flicker):
    """Pictures alone, as CarRacing has them."""

    observation_space = Box(0, 255, (32, 40, 3), np.uint8)

    def observe(self):
        picture = np.full((32, 40, 3), int(200 * abs(self.start[0])), np.uint8)
        picture[:8, : 1 + self.t] = 255
        return picture


class Goal(Flicker):
    """Goal-conditioned, as Gymnasium-Robotics has them."""

    observation_space = Dict(
        observation=Box(-1, 1, (3,)), achieved_goal=Box(-1, 1, (2,)), desired_goal=Box(-1, 1, (2,))
    )

    def observe(self):
        return {
            "observation": np.full(3, 0.1, np.float32),
            "achieved_goal": self.start,
            "desired_goal": np.full(2, 0.3, np.float32),
        }


class Shows(Flicker):
    """Shows whatever it is given, in a space of its own."""

    def __init__(self, space, value):
        self.observation_space = space
        self.value = value

    def observe(self):
        return self.value


class Acts(Flicker):
    """Takes other actions, and keeps the last one."""

    def __init__(self, space):
        self.action_space = space

    def step(self, action):
        self.taken = action
        return super().step(action)


class Says(Flicker):
    """Gives the rest of its step as it is told: a function of obs and t."""

    def __init__(self, step, reset_info=True):
        self.answer = step
        self.reset_info = reset_info

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return (obs, info) if self.reset_info else obs

    def step(self, action):
        self.t += 1
        return self.answer(self.observe(), self.t)


ALL = (Flicker, Breaks, Early, Pixels, Goal, Shows, Acts, Says)


def register_people():
    """Registers them for this process and, as ``people_envs:Name-v0``, for its workers."""
    for cls in ALL:
        gymnasium.register(
            f"{cls.__name__}-v0",
            entry_point=cls,
            max_episode_steps=None if cls is Says else LIMIT,
            order_enforce=False,
        )


register_people()
