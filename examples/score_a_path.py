"""Score a path from noise to actions: its log-probability is what PPO's ratio is made of.

You learn: how a flow policy comes to have a likelihood. It takes K denoising steps, each of which
draws Gaussian noise, so the path x_0 (noise), ..., x_K (actions) has a density: a product of K
Gaussians. The ratio of two parameter vectors is the exponential of its change.

Costs: 5 s. Prints: shapes, the same log-probability by hand, and ratios before and after a step.
"""

import torch

from embodyrl.functional.flow import gaussian_log_prob, timesteps
from embodyrl.policies.flow_mlp import FlowMLP, FlowMLPConfig
from embodyrl.types import EnvSpec, Obs

N, K = 5, 4


def main() -> None:
    spec = EnvSpec("toy", N, 2, 3, "delta_position", 10.0, 40, cameras={})
    torch.manual_seed(0)  # of the initial weights
    policy = FlowMLP(FlowMLPConfig(horizon=6, num_denoise_steps=K, width=64), spec)
    obs = Obs({}, torch.randn(N, 3, generator=torch.Generator().manual_seed(1)), [""] * N)

    # In training mode the policy returns its path and how likely each step of it was.
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0), mode="train")
    path, old = sample.trace, sample.logprob
    assert path is not None and old is not None  # mode="eval" is free of noise, and has neither
    print(f"actions {tuple(sample.actions.shape)}: N chunks of H=6 actions with A=2 numbers")
    print(f"path    {tuple(path.x.shape)}: N, K+1 points, H, A")
    print(f"logprob {tuple(old.shape)}: N, K steps")

    # By hand: step k is a Gaussian, whose mean lies along the velocity and whose std is learned.
    with torch.no_grad():
        context = policy.encode(obs)
        times = timesteps(K)
        for k in range(K):
            x, x_next = path.x[:, k], path.x[:, k + 1]
            t = times[k].expand(N, 1)
            velocity, log_std = (y[:, 0] for y in policy.step_inputs(context, x[:, None], t))
            logprob = gaussian_log_prob(x_next, x - velocity / K, log_std.exp())
            print(f"step {k}: by hand {logprob[0]:8.4f}, by the policy {old[0, k]:8.4f}")

    def ratio() -> torch.Tensor:
        """New over old probability of each path: what PPO clips."""
        return (policy.evaluate(obs, path).logprob - old).sum(1).exp()

    # For the parameters that sampled the path, the ratio is 1.
    print("ratio before:", [round(r, 3) for r in ratio().tolist()])

    # One gradient step that makes the first path likelier and the second one less likely.
    loss = -ratio()[0] + ratio()[1]
    loss.backward()
    with torch.no_grad():
        for weight in policy.actor_parameters():
            if weight.grad is not None:
                weight -= 1e-4 * weight.grad
    print("ratio after: ", [round(r, 3) for r in ratio().tolist()])
    print("The other paths move too, because one network serves all observations.")


if __name__ == "__main__":
    main()
