"""How many threads a run takes: told, kept, or measured."""

import time

import pytest
import torch

from embodyrl.config import compose
from embodyrl.storage.run_files import read_meta
from embodyrl.training import threads
from embodyrl.training.runner import train
from embodyrl.types import EnvSpec

SPEC = EnvSpec("test/arm", 4, 2, 3, "ee", 20.0, 9, {"front": (8, 8)}, privileged_dim=5)


class Work:
    """An algorithm whose gradient step takes so long with so many threads."""

    def __init__(self, **seconds):
        self.seconds = {int(k[1:]): v for k, v in seconds.items()}
        self.policy = torch.nn.Linear(1, 1)
        self.config = None
        self.calls = []

    def rehearse(self, obs, generator):
        assert obs.images["front"].shape == (64, 8, 8, 3) and obs.privileged.shape == (64, 5)
        self.calls.append(torch.get_num_threads())
        time.sleep(self.seconds[self.calls[-1]])


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "BUDGET", 0.3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"t1": 0.06, "t2": 0.03, "t4": 0.015}, 4),
        ({"t1": 0.02, "t2": 0.06, "t4": 0.1}, 1),
        ({"t1": 0.08, "t2": 0.03, "t4": 0.0299}, 2),  # two more threads gain nothing
    ],
)
def test_the_fewest_threads_that_are_about_the_fastest_are_taken(seconds, chosen, capsys):
    work = Work(**seconds)
    began = time.monotonic()
    assert threads.set_threads(work, SPEC) == chosen == torch.get_num_threads()
    assert set(work.calls) == {1, 2, 4}
    assert time.monotonic() - began < 5
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"run.threads={chosen} ") and "1: " in line and "4: " in line


def test_a_net_that_takes_the_whole_time_gets_all_cores():
    work = Work(t4=0.4)
    assert threads.set_threads(work, SPEC) == 4
    assert work.calls == [4]


def test_a_run_that_goes_on_keeps_its_number_where_it_can():
    assert threads.set_threads(Work(), SPEC, before=3) == 3 == torch.get_num_threads()
    fast = Work(t1=0.0, t2=0.1, t4=0.1)
    assert threads.set_threads(fast, SPEC, before=8) == 1  # this machine has fewer cores


def test_what_the_environment_says_is_taken(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    now = torch.get_num_threads()
    assert threads.set_threads(Work(), SPEC) == now


def test_candidates_are_powers_of_two_and_all_cores():
    assert threads.candidates(2) == [1, 2]
    assert threads.candidates(6) == [1, 2, 4, 6]
    assert threads.candidates(8) == [1, 2, 4, 8]


def test_a_run_notes_its_number_and_keeps_it_when_it_is_made_longer(tmp_path, capsys):
    settings = (
        "env.name=mujoco", "env.task=reach", "env.renderer=none", "env.num_envs=2", "env.num_threads=1",
        "env.max_episode_steps=10", "policy.name=flow_mlp", "policy.width=8", "policy.layers=1",
        "algorithm.name=sac_flow", "algorithm.warmup_chunks=4", "algorithm.batch_size=8", "algorithm.num_chunks=10",
        "algorithm.capacity=100", "run.device=cpu", "run.eval_every=0", "run.eval_before=false",
        "run.eval_episodes=2", "run.videos=0", f"run.out={tmp_path}",
    )  # fmt: skip
    folder = train(compose("gymnasium_sac_flow", [*settings, "run.threads=0", "run.iterations=1"]))
    chosen = read_meta(folder / "meta.json")["threads"]
    said = capsys.readouterr().out
    assert f"run.threads={chosen} is fastest here" in said and chosen in (1, 2, 4)
    torch.set_num_threads(3)
    train(compose("gymnasium_sac_flow", [*settings, "run.threads=0", "run.iterations=2"]))
    assert "is fastest here" not in capsys.readouterr().out
    assert torch.get_num_threads() == chosen == read_meta(folder / "meta.json")["threads"]
