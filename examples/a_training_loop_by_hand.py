"""Train a policy by PPO without the runner: env, policy, algorithm, player, and a short loop.

You learn: which object does what, what a rollout holds (with all shapes), and how a policy is
scored. The env is the one of ``write_an_env.py``.

Costs: 25 s. Prints: the shapes of the first rollout, the success of every fifth rollout, and the
success on held-out initial states before and after.
"""

import torch
from write_an_env import Cart, CartConfig

from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.functional.intervals import format_rate
from embodyrl.policies.flow_mlp import FlowMLP, FlowMLPConfig
from embodyrl.rollouts.batches import RolloutBatch
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.rollouts.seeding import seeded

ITERATIONS = 25


def print_shapes(batch: RolloutBatch) -> None:
    print("A rollout of T=20 chunks in N=64 envs; H=2 actions in a chunk, K=4 denoising steps:")
    for name in ("value", "reward", "valid", "terminated", "logprob"):
        print(f"  {name:12} {tuple(getattr(batch, name).shape)}")
    print(f"  {'obs.proprio':12} {tuple(batch.obs.proprio.shape)}")
    print(f"  {'trace.x':12} {tuple(batch.trace.x.shape)}")


def main() -> None:
    env = Cart(CartConfig(num_envs=64))
    held_out = Cart(CartConfig(num_envs=64, split="eval"))

    # The policy acts, the algorithm learns, and the player gives it episodes to play.
    torch.manual_seed(0)  # of the initial weights
    policy = FlowMLP(FlowMLPConfig(horizon=2, width=64, critic_width=64), env.spec)
    learning = PPOConfig(num_chunks=20, lr=3e-3, lr_warmup=0, warmup_iterations=1)
    algorithm = PPO(learning, policy)
    player = Player(env, seed=0)
    before = evaluate(held_out, policy, range(128)).successes

    for iteration in range(ITERATIONS):
        player.begin(iteration)  # new initial states, which depend on seed and iteration alone
        generator = seeded(0, iteration)  # of the policy's noise and the minibatches
        batch = algorithm.collect(player, generator=generator)
        row = algorithm.update(batch, progress=iteration / ITERATIONS, generator=generator)
        if iteration == 0:
            print_shapes(batch)
        if iteration % 5 == 0 or iteration == ITERATIONS - 1:
            success = f"{batch.success_rate:.2f}"
            print(f"iteration {iteration:2}: success {success}, mean return {row['return']:.2f}")

    after = evaluate(held_out, policy, range(128)).successes
    print(f"held-out success {format_rate(before, 128)} -> {format_rate(after, 128)}")


if __name__ == "__main__":
    main()
