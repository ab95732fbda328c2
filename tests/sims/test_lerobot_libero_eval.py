"""``lerobot-eval --env.type=libero`` and ``embodyrl eval`` of one checkpoint: every frame, every action."""

import json
import sys
from collections import defaultdict

import numpy as np
import pytest
import torch
from vla_models import gen, stir

from embodyrl.build import load_config, load_policy, load_spec, make_env, make_policy
from embodyrl.config import compose, to_dict
from embodyrl.functional.flow import randn
from embodyrl.policies.vla.make_small import make_libero_smolvla
from embodyrl.rollouts.evaluation import _generator
from embodyrl.rollouts.fault_watch import GuardedEnv
from embodyrl.sims.libero import suites
from embodyrl.sims.libero.scene import axis_angle
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.training.evaluate import evaluate_checkpoint
from embodyrl.training.export import export
from embodyrl.types import Obs

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("robosuite")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, SIZE = 8, 64
PLAYED = {"libero_object": (0, 3), "libero_spatial": (2,)}
"""Suite -> the tasks that are played; those of LIBERO-Spatial have a cabinet and a stove."""
KEYS = {"agentview": "observation.images.image", "wrist": "observation.images.image2"}


def numbers(suite, each):
    """Task -> its first initial states, as ``embodyrl eval`` numbers them."""
    tasks = PLAYED[suite]
    return {task: [t + len(tasks) * k for k in range(each)] for t, task in enumerate(tasks)}


def checkpoint_of_a_run(folder, suite, *settings):
    """A checkpoint of a run of the preset, with random weights that all matter."""
    overrides = [
        f"env.suite={suite}", *settings, "policy.precision=float32", "env.backend=robosuite", f"env.image_size={SIZE}",
        f"env.task_ids=[{','.join(map(str, PLAYED[suite]))}]", f"env.max_episode_steps={STEPS}",
        "env.num_envs=1", "run.device=cpu",
    ]  # fmt: skip
    config = compose("libero_object_vla_ppo", overrides)
    env = make_env(config.env)
    policy = make_policy(config.policy, env.spec, 0)
    stir(policy, gen(1))
    if config.policy.random_weights:
        policy.fit_inputs(
            torch.randn(99, 8, generator=gen(2)), 0.4 * torch.randn(99, 7, generator=gen(3))
        )
    state = {"policy": policy.state_dict()}
    meta = {"spec": spec_to_json(env.spec), "config": to_dict(config)}
    env.close()
    checkpoint.save(folder / "step_000001", state, meta)
    return folder / "step_000001"


def ours(run, folder, inits, monkeypatch):
    """Initial state -> observations, actions, result, and the poses of the bodies of its scene."""
    seen, done, playing, poses = defaultdict(list), defaultdict(list), {}, {}
    reset, step = GuardedEnv.reset, GuardedEnv.step

    def note(self, obs, rows):
        for k in rows:
            seen[playing[k]].append((
                {name: image[k].clone() for name, image in obs.images.items()},
                obs.proprio[k].clone(), obs.instruction[k],
            ))  # fmt: skip

    def watched_reset(self, env_ids=None, *, seed=None, init=None):
        obs = reset(self, env_ids, seed=seed, init=init)
        rows = list(range(self.spec.num_envs)) if env_ids is None else list(map(int, env_ids))
        playing.update(zip(rows, init, strict=True))
        inner = self
        while hasattr(inner, "env"):
            inner = inner.env
        for k in rows:
            model = inner.scene(k).model
            poses[playing[k]] = model.body_pos.copy(), model.body_quat.copy()
        note(self, obs, rows)
        return obs

    def watched_step(self, actions):
        result = step(self, actions)
        rows = result.valid[:, 0].nonzero().flatten().tolist()
        for k in rows:
            done[playing[k]].append(actions[k, 0].clone())
        note(self, result.obs, rows)
        return result

    monkeypatch.setattr(GuardedEnv, "reset", watched_reset)
    monkeypatch.setattr(GuardedEnv, "step", watched_step)
    # Filmed episodes are drawn at every action.
    total = sum(len(row) for row in inits.values())
    result = evaluate_checkpoint(
        str(run), [f"run.videos={total}"], episodes=total, video=str(folder)
    )
    return seen, done, {row["init"]: row for row in result["results"]}, poses


def in_float64(_, quat):
    """(B, 3) the rotation vectors of quaternions (B, 4), x, y, z, w."""
    return torch.from_numpy(np.stack([axis_angle(q) for q in np.roll(quat.double(), 1, axis=1)]))


def theirs(folder, out, suite, inits, poses, monkeypatch, *options):
    """Observations and actions of LeRobot's command, in this process, and what it writes."""
    from lerobot.envs import libero
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy, VLAFlowMatching
    from lerobot.processor.env_processor import LiberoProcessorStep
    from lerobot.scripts import lerobot_eval

    seen, done, noise = defaultdict(list), defaultdict(list), {}
    # The installed package holds the official states as numbers, where LeRobot would unpickle.
    tasks = suites.load_suite(suite)
    monkeypatch.setattr(
        libero, "get_task_init_states", lambda _, i, **__: suites.official_states(tasks[i])
    )
    reset, step = libero.LiberoEnv.reset, libero.LiberoEnv.step
    select = SmolVLAPolicy.select_action

    def watched_reset(self, seed=None, **options):
        init = inits[self.task_id][self.init_state_id]
        noise.clear()
        noise[init] = _generator(0, init)
        return reset(self, seed=seed, **options)

    def watched_select(self, batch):
        (init,) = noise
        images = {name: batch[key][0].clone() for name, key in KEYS.items()}
        seen[init].append((images, batch["observation.state"][0].clone(), batch["task"][0]))
        return select(self, batch)

    def watched_step(self, action):
        (init,) = noise
        done[init].append(action.copy())
        return step(self, action)

    monkeypatch.setattr(libero.LiberoEnv, "reset", watched_reset)
    monkeypatch.setattr(libero.LiberoEnv, "step", watched_step)
    monkeypatch.setattr(SmolVLAPolicy, "select_action", watched_select)
    # Cabinets and stoves are no part of the official states. Both sides draw their poses: take ours.
    set_init_state = libero.OffScreenRenderEnv.set_init_state

    def with_our_fixtures(self, state):
        (init,) = noise
        model = self.env.sim.model
        model.body_pos[:], model.body_quat[:] = poses[init]
        return set_init_state(self, state)

    monkeypatch.setattr(libero.OffScreenRenderEnv, "set_init_state", with_our_fixtures)
    # LeRobot computes the hand's rotation in float32 and we in float64. That last bit comes back as
    # 1e-7 in an action, and some actions later as one level of a pixel.
    monkeypatch.setattr(LiberoProcessorStep, "_quat2axisangle", in_float64)
    # The same noise: each episode's own, where LeRobot draws that of all from one stream.
    monkeypatch.setattr(
        VLAFlowMatching,
        "sample_noise",
        lambda self, shape, device: randn(tuple(shape), list(noise.values())),
    )
    command = [
        "lerobot-eval", f"--policy.path={folder}", "--policy.device=cpu", "--env.type=libero",
        f"--env.task={suite}", f"--env.task_ids=[{','.join(map(str, inits))}]",
        f"--env.observation_height={SIZE}", f"--env.observation_width={SIZE}",
        f"--env.episode_length={STEPS}", f"--eval.n_episodes={len(inits[PLAYED[suite][0]])}",
        "--eval.batch_size=1", "--eval.use_async_envs=false", "--seed=0",
        f"--output_dir={out}", *options,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    lerobot_eval.eval_main()
    return seen, done, json.loads((out / "eval_info.json").read_text())


def compare(run, inits, our_side, their_side):
    """Frames bit for bit, states and actions to 1e-5, and the scores."""
    seen, done, results, _ = our_side
    their_seen, their_done, info = their_side
    assert sorted(seen) == sorted(their_seen) == sorted(i for row in inits.values() for i in row)
    config = load_config(str(run))
    processors = load_policy(str(run), config.policy, load_spec(str(run)), 0).processors
    for init in seen:
        actions, their_actions = np.stack(done[init]), np.clip(their_done[init], -1, 1)
        np.testing.assert_allclose(actions, their_actions, atol=1e-5)
        # From step to step they differ, so that equality says something.
        assert len(actions) == STEPS and actions.std(axis=0).mean() > 0.05
        # What the network sees, after all pre-processing.
        for (images, state, words), other in zip(seen[init], their_seen[init], strict=False):
            batch = processors(Obs({k: v[None] for k, v in images.items()}, state[None], [words]))
            for name, key in processors.keys.items():
                assert torch.equal(batch[key][0], other[0][name]), (init, name)
            torch.testing.assert_close(batch["observation.state"][0], other[1], atol=1e-5, rtol=0)
            assert batch["task"][0] == other[2]
    scores = [s for task in info["per_task"] for s in task["metrics"]["successes"]]
    assert scores == [results[i]["success"] for row in inits.values() for i in row]


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A small SmolVLA in the layout of ``smolvla_libero``, which executes 3 of 50 actions."""
    sentences = [task.instruction for suite in PLAYED for task in suites.load_suite(suite)]
    sizes = {"width": 32, "heads": 2, "image_size": 32, "patch_size": 4}
    return make_libero_smolvla(
        tmp_path_factory.mktemp("public"), sentences, n_action_steps=3, **sizes
    )


@pytest.mark.parametrize("suite", PLAYED)
def test_a_public_checkpoint_sees_and_does_the_same_in_both(suite, public, tmp_path, monkeypatch):
    run = checkpoint_of_a_run(tmp_path, suite, f"policy.pretrained={public}")
    assert load_spec(str(run)).conventions.orientation == "mirrored"
    inits = numbers(suite, 2)
    mine = ours(run, tmp_path / "films", inits, monkeypatch)
    out = export(str(run), tmp_path / "out")
    other = theirs(out, tmp_path / "eval", suite, inits, mine[-1], monkeypatch)
    compare(run, inits, mine, other)


def test_so_does_a_policy_that_was_trained_on_upright_pictures(public, tmp_path, monkeypatch):
    settings = (f"policy.pretrained={public}", "policy.random_weights=true", "policy.execute=3")
    run, inits = (
        checkpoint_of_a_run(tmp_path, "libero_object", *settings),
        numbers("libero_object", 1),
    )
    assert load_spec(str(run)).conventions.orientation == "upright"
    mine = ours(run, tmp_path / "films", inits, monkeypatch)
    out = export(str(run), tmp_path / "out", "libero_lerobot")
    step = "--env.discover_packages_path=embodyrl.policies.vla.picture_step"
    other = theirs(out, tmp_path / "eval", "libero_object", inits, mine[-1], monkeypatch, step)
    compare(run, inits, mine, other)
