"""LeRobot evaluates our checkpoint in our env: with the same noise every episode is the same."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from vla_models import gen, lerobot_from, stir

from embodyrl.build import make_policy
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.errors import UserError
from embodyrl.functional.intervals import wilson
from embodyrl.policies.vla.make_small import make_small_smolvla
from embodyrl.policies.vla.policy import VLAConfig
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.types import ActionSample, EnvSpec, Obs

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("num2words", reason="the extra vla is not installed")

TINY = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "vision_layers": 1,
    "image_size": 16,
    "patch_size": 4,
    "max_dim": 8,
}
EPISODES, BATCH = 24, 8


class Dot(SteppedVecEnv):
    """A dot in a picture; it is touched by an action close to its place, whatever came before."""

    def __init__(self, num_envs):
        spec = EnvSpec(
            "test/dot",
            num_envs,
            2,
            3,
            "point",
            10.0,
            7,
            {"eye": (16, 16)},
            num_init_states=EPISODES,
        )
        super().__init__(spec, EnvConfig(num_envs=num_envs))
        self.place = torch.zeros(num_envs, 2)

    def _reset(self, env_ids, inits):
        for k, init in zip(env_ids, inits, strict=True):
            self.place[k] = torch.from_numpy(
                np.random.default_rng(init).uniform(-0.8, 0.8, 2).astype(np.float32)
            )

    def _step(self, actions, active):
        distance = (actions - self.place).norm(dim=1)
        never = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        return Tick(-distance, never, distance < 0.3, never.clone())

    def _observe(self, env_ids):
        n = self.spec.num_envs
        picture = torch.zeros(n, 16, 16, 3, dtype=torch.uint8)
        at = ((self.place + 1) * 7.5).round().long()
        picture[torch.arange(n), at[:, 0], at[:, 1]] = 255
        return Obs(
            {"eye": picture},
            torch.cat([self.place, self.place[:, :1]], dim=1),
            ["touch the dot"] * n,
        )


class Still:
    """A policy that starts from no noise, where the two sides would draw different ones."""

    def __init__(self, policy):
        self.policy = policy

    def sample(self, obs, *, generator, mode):
        context = self.policy.encode(obs)
        return ActionSample(
            self.policy.decode(context, torch.zeros(len(obs), *self.policy.flow_shape))
        )


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Our policy, and the folder of its export."""
    folder = make_small_smolvla(tmp_path_factory.mktemp("small"), ["touch the dot"], **TINY)
    settings = {
        "pretrained": str(folder),
        "horizon": 5,
        "execute": 3,
        "num_denoise_steps": 3,
        "random_weights": True,
    }
    policy = make_policy(VLAConfig(**settings), dataclasses.replace(Dot(1).spec), 0)
    stir(policy, gen(1))
    policy.fit_inputs(
        torch.rand(200, 3, generator=gen(2)) * 2 - 1, torch.rand(200, 2, generator=gen(3)) * 2 - 1
    )
    return policy, policy.save_lerobot(tmp_path_factory.mktemp("export") / "checkpoint")


def theirs(folder, noise=None) -> dict:
    """LeRobot's own evaluation of a checkpoint, ``lerobot_eval.eval_policy``."""
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.scripts.lerobot_eval import eval_policy

    from embodyrl.sims.lerobot_plugin import LeRobotVectorEnv

    policy, pre, post = lerobot_from(folder)
    if noise is not None:
        policy.model.sample_noise = noise
    none = PolicyProcessorPipeline(steps=[])
    env = LeRobotVectorEnv(Dot(BATCH))
    return eval_policy(env, policy, none, none, pre, post, EPISODES, start_seed=0)


def test_with_the_same_noise_every_episode_is_the_same(both):
    policy, folder = both
    ours = evaluate(Dot(BATCH), Still(policy), range(EPISODES)).episodes
    found = theirs(folder, lambda shape, device: torch.zeros(shape, device=device))["per_episode"]
    assert [e["seed"] for e in found] == [e.init for e in ours]
    assert [e["success"] for e in found] == [e.success for e in ours]
    assert 0 < sum(e.success for e in ours) < EPISODES
    torch.testing.assert_close(
        [e["sum_reward"] for e in found], [e.reward for e in ours], atol=1e-4, rtol=1e-4
    )


def test_with_noise_of_their_own_the_rates_agree(both):
    policy, folder = both
    ours = evaluate(Dot(BATCH), policy, range(EPISODES)).successes
    torch.manual_seed(0)
    found = sum(e["success"] for e in theirs(folder)["per_episode"])
    low, high = wilson(ours, EPISODES)
    assert low <= found / EPISODES <= high, (ours, found)


def test_more_episodes_than_there_are_states_are_refused():
    from embodyrl.sims.lerobot_plugin import LeRobotVectorEnv

    with pytest.raises(UserError, match="has 24 initial states, and the seed 24 asks for another"):
        LeRobotVectorEnv(Dot(2)).reset(seed=[23, 24])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_line(tmp_path):
    """``lerobot-eval`` on an env of ours, by its name."""
    from embodyrl.sims.lerobot_plugin import EmbodyrlEnv

    env = EmbodyrlEnv(
        preset="mujoco", overrides=["env.task=reach", "env.max_episode_steps=4"]
    ).create_envs(1)
    spec = env["embodyrl"][0].env.spec
    folder = make_small_smolvla(tmp_path / "small", ["reach"], **TINY)
    settings = {
        "pretrained": str(folder),
        "horizon": 3,
        "execute": 2,
        "num_denoise_steps": 2,
        "random_weights": True,
    }
    policy = make_policy(VLAConfig(**settings), spec, 0)
    policy.fit_inputs(torch.randn(50, spec.proprio_dim), torch.rand(50, spec.action_dim) * 2 - 1)
    policy.save_lerobot(tmp_path / "out")
    command = [
        *(
            sys.executable,
            "-m",
            "lerobot.scripts.lerobot_eval",
            f"--policy.path={tmp_path / 'out'}",
        ),
        *(
            "--env.discover_packages_path=embodyrl.sims.lerobot_plugin",
            "--env.type=embodyrl",
            "--env.preset=mujoco",
        ),
        *(
            "--env.overrides=[env.task=reach,env.max_episode_steps=4]",
            "--seed=0",
            "--eval.batch_size=2",
        ),
        *("--eval.n_episodes=2", "--policy.device=cpu", f"--output_dir={tmp_path / 'eval'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    info = json.loads((tmp_path / "eval" / "eval_info.json").read_text())
    assert info["overall"]["n_episodes"] == 2
