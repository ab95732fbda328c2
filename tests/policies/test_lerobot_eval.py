"""LeRobot evaluates our checkpoint in our env: with the same noise every episode is the same."""

import json
import subprocess
import sys

import pytest
import torch
from vla_models import Dot, gen, lerobot_from, stir

from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.functional.intervals import wilson
from embodyrl.policies.vla.make_small import make_small_smolvla
from embodyrl.policies.vla.policy import VLAConfig
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.types import ActionSample

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


def dots(num_envs):
    """Long episodes of a small dot, from few initial states."""
    return Dot(num_envs, steps=7, reach=0.3, num_init_states=EPISODES)


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
    policy = make_policy(VLAConfig(**settings), dots(1).spec, 0)
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
    env = LeRobotVectorEnv(dots(BATCH))
    return eval_policy(env, policy, none, none, pre, post, EPISODES, start_seed=0)


def test_with_the_same_noise_every_episode_is_the_same(both):
    policy, folder = both
    ours = evaluate(dots(BATCH), Still(policy), range(EPISODES)).episodes
    found = theirs(folder, lambda shape, device: torch.zeros(shape, device=device))["per_episode"]
    assert [e["seed"] for e in found] == [e.init for e in ours]
    assert [e["success"] for e in found] == [e.success for e in ours]
    assert 0 < sum(e.success for e in ours) < EPISODES
    torch.testing.assert_close(
        [e["sum_reward"] for e in found], [e.reward for e in ours], atol=1e-4, rtol=1e-4
    )


def test_with_noise_of_their_own_the_rates_agree(both):
    policy, folder = both
    ours = evaluate(dots(BATCH), policy, range(EPISODES)).successes
    torch.manual_seed(0)
    found = sum(e["success"] for e in theirs(folder)["per_episode"])
    low, high = wilson(ours, EPISODES)
    assert low <= found / EPISODES <= high, (ours, found)


def test_more_episodes_than_there_are_states_are_refused():
    from embodyrl.sims.lerobot_plugin import LeRobotVectorEnv

    with pytest.raises(UserError, match="has 24 initial states, and the seed 24 asks for another"):
        LeRobotVectorEnv(dots(2)).reset(seed=[23, 24])


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
