"""Input ablations: of actors whose inputs are known, they say which ones these are."""

from __future__ import annotations

import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.rollouts.ablated_env import AblatedEnv
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.rollouts.history_env import remembering
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.training.ablate import ablate_actor, print_ablation
from embodyrl.training.ablation_cases import ablation_cases
from embodyrl.types import ActionSample

GAP = slice(18, 21)
"""Columns of MuJoCo's privileged state with the way from the hand to the ball."""
INITS = list(range(5, 69))


def key_of(image: torch.Tensor) -> bytes:
    return image.numpy().tobytes()


class ByHeart:
    """Knows where the ball is in each first picture of the front camera, and goes there.

    It reads the hand's position in proprio, and with ``listens`` moves only if it is told of a
    ball. It never looks at the wrist camera.
    """

    def __init__(self, env: MujocoEnv, inits: list[int], listens: bool = False) -> None:
        self.listens = listens
        self.book = {}
        self.goal = torch.zeros(env.spec.num_envs, 3)
        n = env.spec.num_envs
        for start in range(0, len(inits), n):
            obs = env.reset(range(len(inits[start : start + n])), init=inits[start : start + n])
            for k in range(len(inits[start : start + n])):
                goal = obs.proprio[k, :3] + obs.privileged[k, GAP]
                self.book[key_of(obs.images["front"][k])] = goal

    def sample(self, obs, *, generator, mode):
        for k, image in enumerate(obs.images["front"]):
            known = self.book.get(key_of(image))
            # A picture of one colour is in no book: then nothing is known of the goal.
            if known is not None:
                self.goal[k] = known
            elif image.float().std(dim=(0, 1)).max() == 0:
                self.goal[k] = obs.proprio[k, :3]
        move = ((self.goal - obs.proprio[:, :3]) / (3 * 0.035)).clamp(-1, 1)
        if self.listens:
            move = move * torch.tensor([[float("ball" in s)] for s in obs.instruction])
        grip = torch.ones(len(obs), 1)
        return ActionSample(torch.cat([move, grip], dim=1)[:, None].repeat(1, 3, 1))


def make_env(task: str, cameras: tuple[str, ...] = ("front", "wrist"), **settings) -> MujocoEnv:
    config = MujocoConfig(task=task, num_envs=32, split="eval", cameras=cameras, **settings)
    return MujocoEnv(config)


@pytest.fixture(scope="module")
def looks():
    env = make_env("reach")
    found = ablate_actor(env, ByHeart(env, INITS), INITS)
    yield found
    env.close()


def test_what_it_reads_is_used_and_what_it_does_not_read_is_not_needed(looks, capsys):
    assert looks["as_is"]["success_rate"] > 0.9
    assert {name: case["verdict"] for name, case in looks["cases"].items()} == {
        "camera front": "uses",
        "camera wrist": "not needed",
        "all cameras": "uses",
        "other picture": "uses",
        "still picture": "not needed",
        "no instruction": "not needed",
        "proprio": "uses",
    }
    assert looks["cases"]["camera wrist"]["difference"] == 0
    print_ablation(looks | {"env": "e", "split": "eval", "execute": 3, "horizon": 3})
    said = capsys.readouterr().out
    assert "it uses the camera front" in said and "it does not need the camera wrist" in said
    assert "not applicable: every episode has the instruction 'move the gripper to" in said


def test_an_instruction_that_is_listened_to_is_used():
    env = make_env("reach,pick", ("front",))
    found = ablate_actor(env, ByHeart(env, INITS, listens=True), INITS)
    env.close()
    assert 0.4 < found["as_is"]["success_rate"] < 0.6  # it never picks
    assert found["cases"]["other instruction"]["about"] == "the instruction of another task"
    for name in ("other instruction", "no instruction"):
        assert found["cases"][name]["verdict"] == "uses"
        assert found["cases"][name]["score"]["successes"] == 0
    assert found["not_applicable"] == {"all cameras": "the env has one camera"}


class Still:
    def sample(self, obs, *, generator, mode):
        return ActionSample(torch.zeros(len(obs), 5, 4))


def test_nothing_is_called_not_needed_where_nothing_is_solved():
    env = MujocoEnv(MujocoConfig(task="pick", num_envs=16, renderer="none"))
    found = ablate_actor(env, Still(), list(range(16)))
    assert not found["could_fall"]
    assert {case["verdict"] for case in found["cases"].values()} == {"undecided"}
    assert found["not_applicable"] == dict.fromkeys(
        ("camera", "other picture", "still picture"), "the env has no cameras"
    )
    # Sentences name colours, so another episode's sentence is another one.
    assert found["cases"]["other instruction"]["about"] == "the instruction of another episode"
    with pytest.raises(UserError, match="give --episodes 2 or more"):
        ablate_actor(env, Still(), [0])
    env.supervised = True
    with pytest.raises(UserError, match="no robot is moved blind"):
        ablate_actor(env, Still(), [0, 1])


class Spy:
    """Keeps what it is shown."""

    def __init__(self):
        self.seen = []

    def sample(self, obs, *, generator, mode):
        self.seen.append(obs)
        return ActionSample(0.5 * torch.ones(len(obs), 3, 4))


def test_each_change_is_what_it_says():
    base = make_env("pick", max_episode_steps=6)
    env = AblatedEnv(remembering(base, 2))
    inits = [3, 9, 4]
    evaluate(env, Still(), inits)
    cases, _ = ablation_cases(env.spec, env.first)
    first = env.first

    def shown(name):
        env.change = cases[name].change
        spy = Spy()
        evaluate(env, spy, inits)
        return spy.seen

    real = AblatedEnv(remembering(base, 2))
    plain = Spy()
    evaluate(real, plain, inits)
    for name in cases:
        for obs, was in zip(shown(name), plain.seen, strict=True):
            # The frame before it is changed, too.
            for now, then in zip(obs.frames(), was.frames(), strict=True):
                blank = {"camera front": {"front"}, "camera wrist": {"wrist"}}.get(name, set())
                blank = {"front", "wrist"} if name == "all cameras" else blank
                for camera in ("front", "wrist"):
                    picture = now.images[camera][:3]
                    mean = torch.stack(
                        [o.images[camera].float().mean((0, 1, 2)) for o in first.values()]
                    )
                    if camera in blank:
                        assert torch.equal(picture[0, 0, 0], mean.mean(0).round().to(torch.uint8))
                        assert (picture == picture[:1, :1, :1]).all()
                    elif name in ("other picture", "still picture"):
                        order = [9, 4, 3] if name == "other picture" else inits
                        of = torch.cat([first[i].images[camera] for i in order])
                        assert torch.equal(picture, of)
                    else:
                        assert torch.equal(picture, then.images[camera][:3])
                start = torch.cat([first[i].proprio for i in inits])
                expected = start if name == "proprio" else then.proprio[:3]
                assert torch.equal(now.proprio[:3], expected)
                if name == "no instruction":
                    assert set(now.instruction) == {""}
                elif name == "other instruction":
                    assert all(
                        a != b for a, b in zip(now.instruction, then.instruction, strict=True)
                    )
                else:
                    assert now.instruction == then.instruction
    base.close()
