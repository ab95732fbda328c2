"""Changes the content of a checkpoint or a run at random, and signs it anew.

    python -m benchmarks.faults files

Every reader must then succeed or raise ``UserError``.
"""

import contextlib
import copy
import io
import json
import random
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.faults.kills import SECTIONS
from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.cli.main import main as command
from embodyrl.config import resolve
from embodyrl.errors import UserError
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.real_robot.twin.config import twin_config
from embodyrl.storage import checkpoint
from embodyrl.training import hub
from embodyrl.training.runner import train

SECONDS = 60
"""No reader may take longer; the machine may be busy."""
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
JUNK = (
    None, True, 0, -1, 3, 10**6, 10**12, 2**70, 10**400, 0.5, -2.5, 1e30, float("nan"), float("inf"),
    "", "x", "../../etc/passwd", "/etc/passwd", "${oc.env:HOME}", "???", "mujoco", "ppo", "\0", "9" * 5000,
    [], [1], ["x"], [[1, 2], [3, 4]], {}, {"name": "x"}, {"a": {"b": None}}, {"tensor": "x"},
    {"dict": 1}, {"list": [{"tensor": 3}]}, {"tuple": [[1]], "list": []}, DEEP,
)  # fmt: skip


def nodes(data: Any, found: list | None = None) -> list[tuple[Any, Any]]:
    """All (container, key) of nested plain data."""
    found = [] if found is None else found
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in list(items):
        found.append((data, key))
        nodes(value, found)
    return found


def mutate(data: Any, rng: random.Random) -> tuple[Any, str]:
    """The data with one random change, and what was changed."""
    data = copy.deepcopy(data)
    places = nodes(data)
    if not places or rng.random() < 0.03:
        return copy.deepcopy(rng.choice(JUNK)), "the whole"
    container, key = rng.choice(places)
    action = rng.choice(("replace", "replace", "replace", "delete", "wrap", "copy"))
    what = f"{action} {key!r}"
    if action == "replace":
        junk = copy.deepcopy(rng.choice(JUNK))
        container[key] = junk
        what += f" by {str(junk)[:40]!r}"
    elif action == "delete":
        del container[key]
    elif action == "wrap":
        container[key] = [container[key]]
    elif isinstance(container, dict):
        container[rng.choice(("x", "name", "../y"))] = container[key]
    else:
        container.append(copy.deepcopy(container[key]))
    return data, what


def mutate_tensors(file: Path, rng: random.Random) -> str:
    """Changes one tensor of a file."""
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    action = rng.choice(("shape", "dtype", "nan", "delete", "rename", "empty", "huge"))
    changed = {
        "shape": lambda: torch.cat([value.flatten(), value.flatten()[:1]]),
        "dtype": lambda: value.to(torch.int32 if value.is_floating_point() else torch.float32),
        "nan": lambda: torch.full(value.shape, float("nan")),
        "empty": lambda: value.flatten()[:0],
        "huge": lambda: torch.full(value.shape, 3e38),
    }
    del tensors[name]
    if action == "rename":
        tensors[f"{name}x"] = value
    elif action != "delete":
        tensors[name] = changed[action]()
    save_file(tensors, file)
    return f"{action} {name}"


def sign(folder: Path) -> None:
    """Writes the hashes of a checkpoint anew."""
    (folder / checkpoint.MANIFEST).write_text(checkpoint._manifest(folder))


def change(run: Path, rng: random.Random) -> str:
    """One change to a file of a run."""
    saved = checkpoint.find(run)
    files = sorted(saved.glob("*.safetensors")) + sorted(saved.glob("*.json")) * 3
    files += [run / "meta.json", run / "config.yaml", run / "metrics.jsonl"]
    files += sorted((run / "evals").glob("*.json"))
    file = rng.choice(files)
    if file.suffix == ".safetensors":
        what = mutate_tensors(file, rng)
    elif file.suffix == ".jsonl":
        lines = file.read_text().splitlines()
        number = rng.randrange(len(lines))
        data, what = mutate(json.loads(lines[number]), rng)
        lines[number] = json.dumps(data)
        file.write_text("\n".join(lines) + "\n")
    elif file.suffix == ".yaml":
        import yaml

        data, what = mutate(yaml.safe_load(file.read_text()), rng)
        file.write_text(json.dumps(data))
    else:
        data, what = mutate(json.loads(file.read_text()), rng)
        file.write_text(json.dumps(data))
    sign(saved)
    return f"{file.name}: {what}"


def say(*words: str) -> Callable[[Path], Any]:
    """A command of the command line, whose arguments name the run as ``RUN``."""
    return lambda run: command([word.replace("RUN", str(run)) for word in words])


def resume(run: Path) -> None:
    """``embodyrl train`` with the user's own config."""
    options = [f"run.out={run.parent}", f"run.name={run.name}", "run.iterations=4"]
    train(resolve(SECTIONS, options))


def begin(run: Path) -> None:
    """A run that starts from the changed one."""
    new = run.with_name("next")
    shutil.rmtree(new, ignore_errors=True)
    options = [f"run.out={run.parent}", "run.name=next", "run.iterations=1", "run.eval_every=0"]
    train(resolve(SECTIONS, [*options, f"run.init_checkpoint={run}"]))


def beside(run: Path, name: str) -> Path:
    """A folder that a reader writes, empty of what an earlier one wrote."""
    folder = run.with_name(name)
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def report_of_two(run: Path) -> Any:
    """A report that compares the changed run with the one that it was."""
    whole = run.with_name(run.name.removesuffix("_broken"))
    page = run.with_name("both.html")
    return command(["report", str(whole), str(run), "--out", str(page)])


def collect(run: Path) -> Any:
    """``embodyrl collect`` with the run's policy."""
    env = ["mujoco", "env.task=reach", "env.renderer=none", "env.num_envs=2", "env.num_threads=1"]
    options = ["--policy", str(run), "--episodes", "2", "--keep-failures"]
    return command(["collect", *env, *options, "--out", str(beside(run, "collected"))])


def loop(run: Path) -> Any:
    """``embodyrl world loop``, whose first round records what the run's policy does.

    It ends in words there: without cameras there is nothing to dream of.
    """
    env = "env_overrides=[env.task=reach,env.renderer=none,env.num_envs=2,env.num_threads=1]"
    settings = [f"policy={run}", "dream=dream_ppo", "env=mujoco", env, "first_episodes=2", "near=0"]
    return command(["world", "loop", "mujoco_pick", *settings, f"out={beside(run, 'loop')}"])


def deploy(run: Path) -> Any:
    """``embodyrl deploy`` on the simulated arm, an episode whose commands are not sent."""
    options = ["--robot", "twin", "--dry-run", "--latency", "0", "--episodes", "1"]
    return command(["deploy", str(run), *options, "--out", str(beside(run, "deployed"))])


def stage(run: Path) -> None:
    """What ``embodyrl push`` reads and writes before it sends."""
    _, meta = checkpoint.load_run(checkpoint.find(run), "config", "position")
    evaluations = hub._evaluations(run, meta["position"]["iteration"])
    hub.card("me/x", {**meta, "config": hub.to_dict(load_config(str(run)))}, evaluations, run)


READERS: dict[str, Callable[[Path], Any]] = {
    "eval": say("eval", "RUN", "run.device=cpu", "--episodes", "1", "--json"),
    "report": say("report", "RUN", "--out", "RUN.html"),
    "report of two": report_of_two,
    "collect": collect,
    "loop": loop,
    "deploy": deploy,
    "export": say("export", "RUN", "RUN.lerobot"),
    "dry run": say("train", "RUN/config.yaml", "--dry-run"),
    "resume": resume,
    "begin": begin,
    "push": stage,
    "serve": lambda run: CheckpointPolicy(str(run), "cpu"),
    "twin": lambda run: twin_config(str(run), ()),
    "policy": lambda run: load_policy(
        str(run), load_config(str(run)).policy, load_spec(str(run)), 0
    ),
}


def campaign(run: Path, tries: int, seed: int, readers: dict[str, Callable[[Path], Any]] | None = None,
             changed: Callable[[Path, random.Random], str] = change) -> dict[str, Any]:  # fmt: skip
    """Changes a copy of a run, and reads it, ``tries`` times; a failure names its change."""
    readers = readers or READERS
    rng = random.Random(seed)
    counts = {"tries": 0, "read": 0, "refused": 0}
    failures: list[str] = []
    signal.signal(signal.SIGALRM, _too_slow)
    for number in range(tries):
        broken = run.with_name(f"{run.name}_broken")
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(run, broken)
        what = changed(broken, rng)
        name = list(readers)[number % len(readers)]
        counts["tries"] += 1
        signal.alarm(SECONDS)
        quiet = io.StringIO()
        try:
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                status = readers[name](broken)
            counts["refused" if status == 1 else "read"] += 1
        except UserError:
            counts["refused"] += 1
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(
                f"{name} after {what}: {type(error).__name__}: {str(error)[:150]} "
                f"({Path(where.filename).name}:{where.lineno})"
            )
        finally:
            signal.alarm(0)
    return {**counts, "failures": failures}


def _too_slow(*_: object) -> None:
    raise TimeoutError("the reader takes too long")


def tiny_run(folder: Path) -> Path:
    """A trained run with a checkpoint and evaluations."""
    torch.set_num_threads(1)
    config = resolve(SECTIONS, [f"run.out={folder}", "run.name=run"])
    with contextlib.redirect_stdout(io.StringIO()):
        return train(config)


def survive(tries: int, seed: int) -> dict[str, int]:
    """Changes a run ``tries`` times; survived is what was read or refused in words."""
    with tempfile.TemporaryDirectory() as folder:
        return count(campaign(tiny_run(Path(folder)), tries, seed))


def count(found: dict[str, Any]) -> dict[str, int]:
    """The numbers of a campaign; its failures are printed."""
    for line in found["failures"]:
        print(line, flush=True)
    survived = found["tries"] - len(found["failures"])
    return {"tries": found["tries"], "survived": survived, "refused in words": found["refused"]}
