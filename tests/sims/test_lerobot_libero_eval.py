"""``lerobot-eval --env.type=libero`` and ``embodyrl eval`` of one checkpoint: every frame, every action."""

import json
import sys
from collections import defaultdict

import numpy as np
import pytest
import torch
from vla_models import gen, stir

from embodyrl.build import make_env, make_policy
from embodyrl.config import compose, to_dict
from embodyrl.functional.flow import randn
from embodyrl.policies.vla.make_small import make_libero_smolvla
from embodyrl.rollouts.evaluation import _generator
from embodyrl.rollouts.presented_env import PresentedEnv
from embodyrl.sims.libero import suites
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.training.evaluate import evaluate_checkpoint
from embodyrl.training.export import export

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("robosuite")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SUITE, TASKS, EACH, STEPS, SIZE = "libero_object", (0, 3), 2, 8, 64
INITS = {task: [t + len(TASKS) * k for k in range(EACH)] for t, task in enumerate(TASKS)}
"""Task -> numbers of its first initial states, as ``embodyrl eval`` counts them."""
CAMERAS = {"agentview": "observation.images.image", "wrist": "observation.images.image2"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A checkpoint of a run on LIBERO, which started from a small public SmolVLA."""
    folder = tmp_path_factory.mktemp("agree")
    sentences = [task.instruction for task in suites.load_suite(SUITE)]
    sizes = {"width": 32, "heads": 2, "image_size": 32, "patch_size": 4}
    public = make_libero_smolvla(folder / "public", sentences, n_action_steps=3, **sizes)
    config = compose("libero_object_vla_ppo", [
        f"policy.pretrained={public}", "policy.precision=float32", "env.backend=robosuite",
        f"env.task_ids=[{','.join(map(str, TASKS))}]", f"env.image_size={SIZE}",
        f"env.max_episode_steps={STEPS}", "env.num_envs=2", "run.device=cpu",
    ])  # fmt: skip
    env = make_env(config.env)
    policy = make_policy(config.policy, env.spec, 0)
    stir(policy, gen(1))
    state = {"policy": policy.state_dict()}
    meta = {"spec": spec_to_json(env.spec), "config": to_dict(config)}
    env.close()
    checkpoint.save(folder / "step_000001", state, meta)
    return folder / "step_000001"


def ours(run, folder, monkeypatch):
    """Initial state -> observations, actions, and the result of each episode."""
    seen, done, numbers = defaultdict(list), defaultdict(list), {}
    reset, step = PresentedEnv.reset, PresentedEnv.step

    def note(self, obs, rows):
        for k in rows:
            seen[numbers[k]].append((
                {name: image[k].clone() for name, image in obs.images.items()},
                obs.proprio[k].clone(), obs.instruction[k],
            ))  # fmt: skip

    def watched_reset(self, env_ids=None, *, seed=None, init=None):
        obs = reset(self, env_ids, seed=seed, init=init)
        rows = list(range(self.spec.num_envs)) if env_ids is None else list(map(int, env_ids))
        numbers.update(zip(rows, init, strict=True))
        note(self, obs, rows)
        return obs

    def watched_step(self, actions):
        result = step(self, actions)
        rows = result.valid[:, 0].nonzero().flatten().tolist()
        for k in rows:
            done[numbers[k]].append(actions[k, 0].clone())
        note(self, result.obs, rows)
        return result

    monkeypatch.setattr(PresentedEnv, "reset", watched_reset)
    monkeypatch.setattr(PresentedEnv, "step", watched_step)
    # Filmed episodes are drawn at every action.
    total = EACH * len(TASKS)
    result = evaluate_checkpoint(
        str(run), [f"run.videos={total}"], episodes=total, video=str(folder)
    )
    return seen, done, {row["init"]: row for row in result["results"]}


def theirs(folder, out, monkeypatch):
    """The same of LeRobot's command, in this process."""
    from lerobot.envs import libero
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy, VLAFlowMatching
    from lerobot.scripts import lerobot_eval

    seen, done, rollouts = defaultdict(list), defaultdict(list), iter(INITS.values())
    now = {}
    # The installed package holds the official states as numbers, where LeRobot would unpickle.
    tasks = suites.load_suite(SUITE)
    monkeypatch.setattr(
        libero, "get_task_init_states", lambda _, i, **__: suites.official_states(tasks[i])
    )
    reset, select, step = SmolVLAPolicy.reset, SmolVLAPolicy.select_action, libero.LiberoEnv.step

    def watched_reset(self):
        # Once when it is built, and once before each rollout.
        if "envs" in now:
            now["inits"] = next(rollouts)
            now["noise"] = [_generator(0, init) for init in now["inits"]]
        return reset(self)

    def watched_select(self, batch):
        for k, init in enumerate(now["inits"]):
            images = {name: batch[key][k].clone() for name, key in CAMERAS.items()}
            seen[init].append((images, batch["observation.state"][k].clone(), batch["task"][k]))
        return select(self, batch)

    def watched_step(self, action):
        done[INITS[self.task_id][self.episode_index]].append(action.copy())
        return step(self, action)

    make = lerobot_eval.make_pre_post_processors

    def watched_make(**settings):
        now["envs"] = True
        return make(**settings)

    monkeypatch.setattr(lerobot_eval, "make_pre_post_processors", watched_make)
    monkeypatch.setattr(SmolVLAPolicy, "reset", watched_reset)
    monkeypatch.setattr(SmolVLAPolicy, "select_action", watched_select)
    monkeypatch.setattr(libero.LiberoEnv, "step", watched_step)
    # The same noise: each episode's own, where LeRobot draws that of all from one stream.
    noise = lambda self, shape, device: randn(tuple(shape), now["noise"])  # noqa: E731
    monkeypatch.setattr(VLAFlowMatching, "sample_noise", noise)
    command = [
        "lerobot-eval", f"--policy.path={folder}", "--policy.device=cpu", "--env.type=libero",
        f"--env.task={SUITE}", f"--env.task_ids=[{','.join(map(str, TASKS))}]",
        f"--env.observation_height={SIZE}", f"--env.observation_width={SIZE}",
        f"--env.episode_length={STEPS}", f"--eval.n_episodes={EACH}", f"--eval.batch_size={EACH}",
        "--eval.use_async_envs=false", "--seed=0", f"--output_dir={out}",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    lerobot_eval.eval_main()
    return seen, done, json.loads((out / "eval_info.json").read_text())


def test_frames_actions_and_scores_are_the_same(run, tmp_path, monkeypatch):
    out = export(str(run), tmp_path / "out")
    their_seen, their_actions, info = theirs(out, tmp_path / "eval", monkeypatch)
    seen, actions, results = ours(run, tmp_path / "films", monkeypatch)
    assert sorted(seen) == sorted(their_seen) == sorted(i for row in INITS.values() for i in row)
    for init in seen:
        assert len(their_actions[init]) == len(actions[init]) == STEPS
        for k in range(STEPS):
            images, state, sentence = seen[init][k]
            other_images, other_state, other_sentence = their_seen[init][k]
            for name in CAMERAS:
                frame = images[name].permute(2, 0, 1).float() / 255
                assert torch.equal(frame, other_images[name]), (init, k, name)
            np.testing.assert_allclose(actions[init][k], np.clip(their_actions[init][k], -1, 1), atol=1e-5)
