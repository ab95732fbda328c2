"""What the tests of the pretrained policies share: envs, observations, settings, and LeRobot's own half."""

from functools import partial
from importlib import import_module

import numpy as np
import torch

from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.policies.sample_path import given_prefix
from embodyrl.policies.vla.make_small import (
    make_libero_smolvla,
    make_small_smolvla,
    write_libero_checkpoint,
)
from embodyrl.real_robot.policy_link.real_time_chunking import sample_after
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 3, 4, 6, "ee_delta_pos", 25.0, 20, {"front": (24, 32)}, privileged_dim=5)
VOCABULARY, WIDTH = 1024, 16
"""Of the small pi0, pi0.5 and pi0-FAST."""
SENTENCES = ["pick up the red block", "go", "push the blue block, slowly"]


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observation(spec: EnvSpec = SPEC) -> Obs:
    g, n = gen(), spec.num_envs
    images = {
        k: torch.randint(0, 256, (n, *s, 3), generator=g, dtype=torch.uint8)
        for k, s in spec.cameras.items()
    }
    proprio, privileged = (
        torch.randn(n, spec.proprio_dim, generator=g),
        torch.randn(n, 5, generator=g),
    )
    return Obs(images, proprio, (SENTENCES * n)[:n], privileged)


def lerobot_from(folder):
    """Policy, pre- and post-processor as LeRobot itself loads them."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies import get_policy_class, make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config, strict=True)
    return policy, *make_pre_post_processors(config, folder)


def lerobot_batch(obs: Obs) -> dict:
    images = {
        f"observation.images.{k}": v.permute(0, 3, 1, 2) / 255.0 for k, v in obs.images.items()
    }
    return {**images, "observation.state": obs.proprio, "task": obs.instruction}


def stir(policy, generator: torch.Generator) -> None:
    """Moves every weight, so that those which start at zero matter too."""
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))


def check_times(policy) -> None:
    """The same time for every action is the chunk's time, bit for bit; a given prefix moves the actions after it."""
    g, (chunk, dims) = gen(), policy.flow_shape
    x, t = torch.randn(3, 2, chunk, dims, generator=g), torch.rand(3, 2, generator=g)
    with torch.no_grad():
        context = policy.encode(observation())
        velocity = policy.velocity(context, x, t)
        assert torch.equal(policy.velocity(context, x, t[..., None].expand(3, 2, chunk)), velocity)
        seen = []
        for clean in (torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0])):
            given, times = given_prefix(x[:, 0], t[:, 0], clean, torch.full((3,), 2))
            seen.append(policy.velocity(context, given[:, None], times[:, None])[:, 0, 2:])
            same_time = policy.velocity(context, given[:, None], t[:, :1])[:, 0, 2:]
            assert (seen[-1] - same_time).abs().amax(
                (1, 2)
            ).min() > 1e-4  # that they are given matters
        assert (seen[0] - seen[1]).abs().amax((1, 2)).min() > 1e-4  # and what they are


def check_goes_on(policy, steps: int) -> None:
    """Trained on episodes half of which go one way and half the other, with nothing but the actions to say which."""
    g, h = gen(), policy.config.horizon
    way = (
        torch.where(torch.rand(40, generator=g) < 0.5, 0.6, -0.6)
        .repeat_interleave(10)[:, None]
        .expand(400, 4)
    )
    episode, zeros = torch.arange(40).repeat_interleave(10), torch.zeros(400, dtype=torch.long)
    images = {"front": np.zeros((400, 24, 32, 3), np.uint8)}
    demos = Demonstrations(
        h, images, torch.zeros(400, 6), way.clone(), episode, zeros, [SENTENCES[1]]
    )
    sft = SFT(
        SFTConfig(steps_per_iteration=steps, batch_size=32, lr=5e-3, warmup=0.0, ema=0.9, shift=0),
        policy,
    )
    sft.update(demos, progress=0.0, generator=g)
    n = 64
    black = {"front": torch.zeros(n, 24, 32, 3, dtype=torch.uint8)}
    obs = Obs(black, torch.zeros(n, 6), [SENTENCES[1]] * n, None)
    for sign in (0.6, -0.6):
        actions = sample_after(sft.result, obs, torch.full((n, h, 4), sign), 2, g)[:, 0]
        torch.testing.assert_close(actions[:, :2], torch.full((n, 2, 4), sign))
        went_on = ((actions[:, 2:] * sign) > 0).all(2).all(1).float().mean()
        assert went_on > 0.8, went_on  # half of them would by chance


def shrink(name, patch) -> None:
    """Makes LeRobot build pi0, pi0.5 and pi0-FAST with a thousandth of the parameters.

    It has no smaller variant than 300 M, and fixes vocabulary and image encoder in its code: the
    configs are shrunk on their way into transformers.
    """
    modeling = import_module(f"lerobot.policies.{name}.modeling_{name}")
    patch.setattr(
        modeling, "get_gemma_config", lambda _: modeling.GemmaConfig(WIDTH, 2, 32, 8, 1, 4)
    )
    for cls in ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM"):
        if not hasattr(modeling, cls):  # pi0-FAST has no action expert
            continue
        patch.setattr(modeling, cls, partial(_build_small, getattr(modeling, cls)))


def public_libero(name: str, folder, patch, sentences=SENTENCES):
    """A small checkpoint in the layout of LeRobot's LIBERO checkpoints on the hub."""
    from lerobot.policies import make_policy_config
    from lerobot.processor import TokenizerProcessorStep

    if name == "smolvla":
        return make_libero_smolvla(
            folder, sentences, width=16, heads=2, image_size=16, patch_size=4
        )
    shrink(name, patch)
    if name == "pi0_fast":
        import transformers.dynamic_module_utils as modules
        from fast_models import public_pi0_fast

        # LeRobot runs the code of the tokenizer's folder from a copy.
        patch.setattr(modules, "HF_MODULES_CACHE", str(folder / "modules"))
        return public_pi0_fast(folder, sentences)
    make_small_smolvla(folder / "words", sentences, width=16, heads=2)
    words = str(folder / "words" / "vlm")
    local = lambda **k: TokenizerProcessorStep(**{**k, "tokenizer_name": words})  # noqa: E731
    processing = import_module(f"lerobot.policies.{name}.processor_{name}")
    patch.setattr(processing, "TokenizerProcessorStep", local)
    config = make_policy_config(name, device="cpu", n_action_steps=10, image_resolution=(28, 28))
    return write_libero_checkpoint(config, folder)


def _build_small(cls, config):
    getattr(config, "text_config", config).vocab_size = VOCABULARY
    if vision := getattr(config, "vision_config", None):
        vision.hidden_size = vision.intermediate_size = vision.projection_dim = WIDTH
        vision.num_hidden_layers, vision.num_attention_heads = 1, 2
        vision.image_size = 28
    return cls(config)


class Dot(SteppedVecEnv):
    """A dot in a picture; an action touches it that is closer than ``reach``, whatever came before."""

    def __init__(self, num_envs=4, *, steps=4, reach=0.4, num_init_states=None):
        spec = EnvSpec(
            "test/dot",
            num_envs,
            2,
            3,
            "point",
            10.0,
            steps,
            {"eye": (16, 16)},
            privileged_dim=2,
            num_init_states=num_init_states,
        )
        super().__init__(spec, EnvConfig(num_envs=num_envs))
        self.reach = reach
        self.place = torch.zeros(num_envs, 2)

    def _reset(self, env_ids, inits):
        for k, init in zip(env_ids, inits, strict=True):
            self.place[k] = torch.from_numpy(
                np.random.default_rng(init).uniform(-0.8, 0.8, 2).astype(np.float32)
            )

    def _step(self, actions, active):
        distance = (actions - self.place).norm(dim=1)
        never = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        return Tick(-distance, never, distance < self.reach, never.clone())

    def _observe(self, env_ids):
        n = self.spec.num_envs
        picture = torch.zeros(n, 16, 16, 3, dtype=torch.uint8)
        at = ((self.place + 1) * 7.5).round().long()
        picture[torch.arange(n), at[:, 0], at[:, 1]] = 255
        return Obs({"eye": picture}, torch.zeros(n, 3), ["touch the dot"] * n, self.place.clone())


def demonstrations(horizon):
    env = Dot(16)
    obs = env.reset(init=list(range(16)))
    images, instruction = {"eye": obs.images["eye"].numpy()}, torch.zeros(16, dtype=torch.long)
    return Demonstrations(
        horizon,
        images,
        obs.proprio,
        env.place.clone(),
        torch.arange(16),
        instruction,
        ["touch the dot"],
    )


ALGORITHMS = {
    "sft": {"steps_per_iteration": 2, "batch_size": 8, "shift": 0},
    "ppo": {"num_chunks": 2, "epochs": 1, "warmup_iterations": 0, "critic_epochs": 1},
    "grpo": {
        "num_episodes": 8,
        "group_size": 4,
        "rewards": ("return",),
        "max_rounds": 1,
        "epochs": 1,
    },
    "nft": {"num_episodes": 8, "group_size": 4, "epochs": 1},
    "dsrl": {
        "warmup_chunks": 4,
        "batch_size": 4,
        "capacity": 16,
        "save_replay": False,
        "critic_width": 8,
    },
    "pa_rl": {
        "warmup_chunks": 4,
        "critic_warmup": 1,
        "mc_steps": 0,
        "batch_size": 4,
        "actor_batch_size": 4,
        "actor_utd": 0.5,
        "capacity": 16,
        "save_replay": False,
        "hindsight_steps": 2,
    },
}
"""Small settings of the algorithms that train any of these policies."""
