"""What the tests of the pretrained policies share: an env's spec, observations, and LeRobot's own half."""

import torch

from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 3, 4, 6, "ee_delta_pos", 25.0, 20, {"front": (24, 32)}, privileged_dim=5)
SENTENCES = ["pick up the red block", "go", "push the blue block, slowly"]


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observation(spec: EnvSpec = SPEC) -> Obs:
    g, n = gen(), spec.num_envs
    images = {k: torch.randint(0, 256, (n, *s, 3), generator=g, dtype=torch.uint8) for k, s in spec.cameras.items()}
    proprio, privileged = torch.randn(n, spec.proprio_dim, generator=g), torch.randn(n, 5, generator=g)
    return Obs(images, proprio, (SENTENCES * n)[:n], privileged)


def lerobot_from(folder):
    """Policy, pre- and post-processor as LeRobot itself loads them."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    return policy, *make_pre_post_processors(config, folder)


def lerobot_batch(obs: Obs) -> dict:
    images = {f"observation.images.{k}": v.permute(0, 3, 1, 2) / 255.0 for k, v in obs.images.items()}
    return {**images, "observation.state": obs.proprio, "task": obs.instruction}


def stir(policy, generator: torch.Generator) -> None:
    """Moves every weight, so that those which start at zero matter too."""
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
