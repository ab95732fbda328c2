"""The pool of worker processes, on a small MuJoCo simulation from another package."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch

from embodyrl import registry
from embodyrl.errors import UserError
from embodyrl.rollouts import fault_watch
from embodyrl.sims.workers import handle
from embodyrl.sims.workers.pool import PooledVecEnv

PLUGIN = '''
"""A pendulum in MuJoCo; the config says in which initial state it misbehaves, and how."""
import os, signal, time
from dataclasses import dataclass
import mujoco, numpy as np, torch
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.errors import MissingDependencyError
from embodyrl.rollouts import fault_watch
from embodyrl.types import EnvSpec, Obs

XML = """<mujoco><option timestep="0.01"/>
<worldbody><body><joint name="j" type="hinge" axis="0 1 0"/>
<geom type="capsule" fromto="0 0 0 0 0 1" size=".05"/></body></worldbody>
<actuator><motor joint="j"/></actuator></mujoco>"""

@dataclass(frozen=True)
class Config(EnvConfig):
    name: str = "pendulum_plugin"
    sizes: tuple[int, ...] = (4, 6)
    num_workers: int = 1
    bad_init: int = -1
    how: str = "raise"
    where: str = "step"

class Expert:
    def __init__(self, env, noise, seed):
        self.env, self.noise = env, noise
        self.rngs = [np.random.default_rng(seed + k) for k in range(env.spec.num_envs)]
        self.resets = 0
    def reset(self, env_ids=None):
        self.resets += 1
    def act(self):
        angle = torch.tensor([d.qpos[0] for d in self.env.data], dtype=torch.float32)
        noise = torch.tensor([r.normal() for r in self.rngs]) * self.noise
        return (-angle + noise).clamp(-1, 1)[:, None].float()

class PendulumEnv(SteppedVecEnv):
    Config = Config
    def __init__(self, config):
        if config.how == "missing":
            raise MissingDependencyError("The pendulum's spring is missing; install it.")
        tasks, cameras = ("swing", "hold"), {"cam": config.sizes}
        spec = EnvSpec("pendulum", config.num_envs, 1, 2, "torque", 100.0, 20, cameras, 3, tasks)
        super().__init__(spec, config)
        self.config = config
        self.model = mujoco.MjModel.from_xml_string(XML)
        self.data = [mujoco.MjData(self.model) for _ in range(config.num_envs)]
    def _misbehave(self, k, where):
        if self.init[k] != self.config.bad_init or where != self.config.where:
            return
        if self.config.how == "raise":
            raise ValueError("the pendulum fell off")
        if self.config.how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.config.how == "hang":
            time.sleep(1000)
        if self.config.how == "input":
            input("password: ")
    def _reset(self, env_ids, inits):
        for k, i in zip(env_ids, inits):
            self._misbehave(k, "reset")
            mujoco.mj_resetData(self.model, self.data[k])
            self.data[k].qpos[0] = np.random.default_rng(i).uniform(-1, 1)
            mujoco.mj_forward(self.model, self.data[k])
    def _step(self, actions, active):
        for k in active.nonzero().flatten().tolist():
            self._misbehave(k, "step")
            self.data[k].ctrl[0] = float(actions[k, 0])
            mujoco.mj_step(self.model, self.data[k])
        q = torch.tensor([d.qpos[0] for d in self.data], dtype=torch.float32)
        zero = torch.zeros(len(q), dtype=torch.bool)
        reward = -q.abs()
        if self.config.how == "nan":
            reward[torch.from_numpy(self.init == self.config.bad_init)] = torch.nan
        return Tick(reward, q.abs() > 3, q.abs() < 0.02, zero)
    def _observe(self, env_ids):
        q = torch.tensor([[d.qpos[0], d.qvel[0]] for d in self.data], dtype=torch.float32)
        h, w = self.config.sizes
        grey = ((q[:, 0].abs() * 80) % 255).to(torch.uint8).view(-1, 1, 1, 1)
        image = grey.expand(-1, h, w, 3).contiguous()
        instruction = [self.spec.task_of(int(i)) for i in self.init]
        if self.config.how == "shape" and (self.init == self.config.bad_init).any():
            q = q[:, :1]  # would fill two columns of shared memory without a word
        return Obs({"cam": image}, q, instruction, torch.cat([q, q[:, :1] ** 2], 1))
    def make_expert(self, noise=0.0, seed=0):
        return Expert(self, noise, seed)
'''


@pytest.fixture(scope="module")
def config_class(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "pendulum_plugin.py").write_text(PLUGIN)
    info = folder / "pendulum_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pendulum-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[embodyrl.envs]\npendulum_plugin = pendulum_plugin:PendulumEnv\n"
    )
    sys.path.insert(0, str(folder))
    yield registry.load("envs", "pendulum_plugin").Config
    sys.path.remove(str(folder))


@pytest.fixture
def pool(config_class):
    made = []

    def make(num_workers=2, timeouts=None, **config):
        env = PooledVecEnv(
            "pendulum_plugin",
            config_class(**{"num_envs": 5, **config}),
            num_workers=num_workers,
            **(timeouts or {}),
        )
        made.append(env)
        return env

    yield make
    for env in made:
        env.close()


def in_process(config):
    return registry.load("envs", "pendulum_plugin")(config)


def actions_of(seed, num_envs=5, horizon=4):
    return torch.rand(num_envs, horizon, 1, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def assert_same(a, b):
    """Two Steps, or two Obs, are bit-identical."""
    for name in ("reward", "terminated", "truncated", "valid", "success"):
        if hasattr(a, name):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    a, b = getattr(a, "obs", a), getattr(b, "obs", b)
    assert torch.equal(a.proprio, b.proprio) and torch.equal(a.privileged, b.privileged)
    assert torch.equal(a.images["cam"], b.images["cam"]) and a.instruction == b.instruction


def pids(env):
    return [worker.process.pid for worker in env._workers]


def test_pool_equals_one_process_bit_for_bit(pool, config_class):
    env, plain = pool(num_workers=3, seed=7), in_process(config_class(num_envs=5, seed=7))
    assert env.spec == plain.spec
    assert_same(env.reset(), plain.reset())
    for t in range(
        6
    ):  # across the time limit of 20 steps: ended envs wait masked, then some are reset
        horizon = 4 if t != 3 else 40  # a longer chunk than the shared memory was made for
        a, b = env.step(actions_of(t, horizon=horizon)), plain.step(actions_of(t, horizon=horizon))
        assert_same(a, b)
        assert torch.equal(a.log["steps"], b.log["steps"])
        if t == 4:
            assert_same(env.reset([1, 4]), plain.reset([1, 4]))
            assert_same(env.reset([0], seed=3), plain.reset([0], seed=3))
            assert_same(env.reset([2], init=[9]), plain.reset([2], init=[9]))
    assert (env.init == plain.init).all()


def test_expert_runs_beside_the_simulator(pool, config_class):
    env, plain = pool(), in_process(config_class(num_envs=5))
    env.reset(), plain.reset()
    expert, plain_expert = env.make_expert(noise=0.1, seed=5), plain.make_expert(noise=0.1, seed=5)
    expert.reset([0, 4])
    for _ in range(2):
        step, actions = expert.rollout(6)
        plain_step, plain_actions = plain.rollout(plain_expert.act, 6)
        assert_same(step, plain_step)
        assert torch.equal(actions, plain_actions)


def test_killed_worker_costs_one_masked_chunk(pool, config_class):
    env, untouched = pool(), in_process(config_class(num_envs=5))
    env.reset(), untouched.reset()
    before = env.step(actions_of(0))
    untouched.step(actions_of(0))
    os.kill(pids(env)[0], signal.SIGKILL)
    step, reference = env.step(actions_of(1)), untouched.step(actions_of(1))
    lost, rest = slice(0, 2), slice(2, 5)
    assert (
        step.truncated[lost].all()
        and not step.terminated[lost].any()
        and not step.valid[lost].any()
    )
    assert step.fault.tolist() == [True, True, False, False, False]
    assert not step.reward[lost].any() and not step.success[lost].any()
    assert torch.equal(step.obs.proprio[lost], before.obs.proprio[lost])
    assert_rows_equal(step, reference, rest)
    # until they are reset the lost envs stay masked, and the others go on
    step, reference = env.step(actions_of(2)), untouched.step(actions_of(2))
    assert not step.valid[lost].any() and not step.truncated[lost].any()
    assert_rows_equal(step, reference, rest)
    start = time.monotonic()
    env.reset([0, 1]), untouched.reset([0, 1])
    assert time.monotonic() - start < 60
    step, reference = env.step(actions_of(3)), untouched.step(actions_of(3))
    assert_rows_equal(step, reference, slice(0, 5))


def assert_rows_equal(a, b, rows):
    for name in ("reward", "terminated", "truncated", "valid", "success"):
        assert torch.equal(getattr(a, name)[rows], getattr(b, name)[rows]), name
    assert torch.equal(a.obs.proprio[rows], b.obs.proprio[rows])
    assert torch.equal(a.obs.images["cam"][rows], b.obs.images["cam"][rows])


def test_killed_in_mid_step(pool):
    env = pool(bad_init=77, how="hang", timeouts={"step_timeout": 60})
    env.reset(init=[77, 0, 1, 2, 3])
    victim = pids(env)[0]
    threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
    start = time.monotonic()
    step = env.step(actions_of(0))
    assert time.monotonic() - start < 10
    assert step.fault.tolist() == [True, True, False, False, False]
    assert not psutil.pid_exists(victim)


def test_stopped_worker_is_found_within_its_deadline(pool):
    env = pool(timeouts={"step_timeout": 2})
    env.reset()
    os.kill(pids(env)[1], signal.SIGSTOP)
    start = time.monotonic()
    step = env.step(actions_of(0))
    assert 1.9 < time.monotonic() - start < 3
    assert step.fault.tolist() == [False, False, True, True, True]
    env.reset(step.done)
    assert env.step(actions_of(1)).valid[step.done].any()


@pytest.fixture
def two_faults(monkeypatch):
    """Two faults are too many: each costs a worker that must be started anew."""
    monkeypatch.setattr(fault_watch, "MAX_FAULTS", 2)


def test_segfault_names_the_signal_and_repeated_faults_stop_the_run(pool, two_faults):
    env = pool(bad_init=4, how="segfault", num_envs=2)
    with pytest.raises(
        UserError, match=r"(?s)broke 2 times.*initial state 4, swing.*SIGSEGV.*Fatal Python error"
    ):
        for _ in range(2):
            env.reset(init=[4, 1])
            env.step(actions_of(0, num_envs=2))
    assert not any(psutil.pid_exists(pid) for pid in pids(env))


def test_the_error_is_told_however_much_was_written_after_it(tmp_path):
    stacks = "\n".join(f'  File "simulator.py", line {n} in step' for n in range(200))
    modules = "Extension modules: " + ", ".join(f"module_{n}" for n in range(400))
    with (tmp_path / "log").open("w+b") as log:
        log.write(
            f"words\nFatal Python error: Segmentation fault\n\n{stacks}\n{modules}\n".encode()
        )
        told = handle._last_words(log)
    assert told.startswith("Fatal Python error: Segmentation fault")
    assert "module_" not in told and len(told) <= 2000


def test_a_worker_that_breaks_in_reset_is_tried_again_until_the_limit(pool, two_faults):
    env = pool(bad_init=4, how="segfault", where="reset", num_envs=2)
    env.reset(init=[2, 1])
    with pytest.raises(UserError, match=r"(?s)broke 2 times.*SIGSEGV"):
        env.reset([0], init=[4])


def test_exception_comes_across_as_text_and_only_its_worker_is_remade(pool, config_class):
    env, plain = pool(bad_init=4), in_process(config_class(num_envs=5))
    before = pids(env)
    obs = env.reset(init=[4, 0, 1, 2, 3])
    plain.reset(init=[5, 0, 1, 2, 3])
    step, reference = env.step(actions_of(0)), plain.step(actions_of(0))
    assert step.fault.tolist() == [True, True, False, False, False]
    assert torch.equal(step.obs.proprio[:2], obs.proprio[:2])
    assert_rows_equal(step, reference, slice(2, 5))
    assert pids(env) == before  # the process lives on
    env.reset([0, 1], init=[5, 0])
    plain.reset([0, 1], init=[5, 0])
    assert_rows_equal(env.step(actions_of(1)), plain.step(actions_of(1)), slice(0, 5))
    with pytest.raises(UserError, match=r"(?s)ValueError: the pendulum fell off"):
        for _ in range(4):
            env.reset([0, 1], init=[4, 0])
            env.step(actions_of(0))


def test_a_number_that_is_none_costs_one_env_of_a_worker_alone(pool, config_class, capfd):
    env, plain = pool(bad_init=4, how="nan"), in_process(config_class(num_envs=5))
    obs = env.reset(init=[4, 0, 1, 2, 3])
    plain.reset(init=[5, 0, 1, 2, 3])
    step, reference = env.step(actions_of(0)), plain.step(actions_of(0))
    assert step.fault.tolist() == [True, False, False, False, False] == step.truncated.tolist()
    assert not step.valid[0].any() and not step.reward[0].any()
    assert torch.equal(step.obs.proprio[0], obs.proprio[0])
    assert_rows_equal(step, reference, slice(1, 5))
    said = capfd.readouterr().err
    assert "env 0 (initial state 4, swing) of pendulum broke: reward[0] is nan" in said
    env.reset([0], init=[5])
    plain.reset([0], init=[5])
    assert_rows_equal(env.step(actions_of(1)), plain.step(actions_of(1)), slice(0, 5))
    with pytest.raises(
        UserError, match=r"broke 5 times.*env 0 \(initial state 4.*reward.0. is nan"
    ):
        for _ in range(4):
            env.reset([0], init=[4])
            env.step(actions_of(0))


def test_a_wrong_shape_in_a_worker_is_named(pool, capfd):
    env = pool(bad_init=4, how="shape", num_envs=2)
    with pytest.raises(UserError, match=r"(?s)broke 5 times.*proprio is \(1, 1\) of float32, not"):
        env.reset(init=[4, 1])


def test_a_question_on_stdin_is_an_error_and_no_wait(pool):
    env = pool(bad_init=4, how="input", num_envs=2)
    env.reset(init=[4, 1])
    assert env.step(actions_of(0, num_envs=2)).fault.tolist() == [True, False]


def test_user_errors_keep_their_class_and_words(pool):
    with pytest.raises(
        UserError, match=r"^The pendulum's spring is missing; install it\.$"
    ) as caught:
        pool(how="missing")
    assert type(caught.value).__name__ == "MissingDependencyError"
    env = pool()
    with pytest.raises(UserError, match="no initial state -1"):
        env.reset([0], init=[-1])
    env.reset()
    with pytest.raises(UserError, match="NaN"):
        env.step(torch.full((5, 4, 1), torch.nan))
    assert not env.step(actions_of(0)).fault.any()


SCRIPT = """
import os, signal, sys, time, torch
# A background job of a shell inherits SIGINT as ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from embodyrl import registry
from embodyrl.sims.workers.pool import PooledVecEnv
config = registry.load("envs", "pendulum_plugin").Config(num_envs=2, bad_init=3, how="hang")
env = PooledVecEnv("pendulum_plugin", config, num_workers=2)
env.reset(init=[3, 1])
print(*[w.process.pid for w in env._workers], flush=True)
env.step(torch.zeros(2, 1, 1))
"""


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_orphans_whatever_ends_the_parent(config_class, sig):
    path = os.pathsep.join(sys.path)
    script = textwrap.dedent(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    ) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2 and all(psutil.pid_exists(pid) for pid in workers)
        time.sleep(0.5)
        parent.send_signal(sig)
        parent.wait(60)
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
