"""Write an env of your own, and let ``check_env`` say whether it keeps the promises.

You learn: an env is three methods (``_reset``, ``_step``, ``_observe``) and a spec; the base class
makes chunks, masks and time limits of them. And what ``check_env`` says when a promise is broken.

Costs: 5 s. Prints: that the env is sound, and what is wrong with a broken one.
Next: ``examples/plugin`` makes a package of an env, so that ``embodyrl train`` finds it.
"""

from dataclasses import dataclass

import numpy as np
import torch

from embodyrl.checks import CheckError, check_env
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class CartConfig(EnvConfig):
    """Settings of ``Cart``; the base class has ``num_envs``, ``split`` and ``seed``."""

    name: str = "cart"


class Cart(SteppedVecEnv):
    """A cart on a rail must stop at the middle; an action in [-1, 1] accelerates it."""

    def __init__(self, config: CartConfig) -> None:
        self.state = torch.zeros(config.num_envs, 2)  # position and speed
        self.first_state = {"train": 0, "eval": 1_000_000}[config.split]  # splits share no state
        spec = EnvSpec("cart", config.num_envs, 1, 2, "acceleration", 10.0, 40, cameras={})
        super().__init__(spec, config)

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        for k, init in zip(env_ids, inits, strict=True):
            rng = np.random.default_rng(self.first_state + init)
            self.state[k] = torch.tensor([rng.uniform(-1, 1), 0.0])

    def _step(self, actions: torch.Tensor, active: torch.Tensor) -> Tick:
        position, speed = self.state.unbind(1)
        after = torch.stack([position + 0.2 * speed, speed + 0.2 * actions[:, 0]], dim=1)
        self.state = torch.where(active[:, None], after.clamp(-1.5, 1.5), self.state)
        solved = self.state.abs().amax(1) < 0.1
        never = torch.zeros_like(solved)
        reward = solved.float() - 0.05 * self.state[:, 0].abs()
        return Tick(reward, terminated=solved, success=solved, fault=never)

    def _observe(self, env_ids: list[int] | None) -> Obs:
        return Obs({}, self.state.clone(), ["stop at the middle"] * self.spec.num_envs)


class ForgetfulCart(Cart):
    """A mistake that is easily made: the initial state is drawn from a global generator."""

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        self.state[env_ids] = torch.rand(len(env_ids), 2)


if __name__ == "__main__":
    check_env(Cart(CartConfig(num_envs=3)))
    print("Cart keeps all promises.")
    try:
        check_env(ForgetfulCart(CartConfig(num_envs=3)))
    except CheckError as error:
        print(f"ForgetfulCart does not: {error}")
