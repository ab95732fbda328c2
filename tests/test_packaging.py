"""The installed wheel: it is complete, starts fast and imports nothing heavy."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {
    "mujoco", "mujoco_warp", "warp", "mani_skill", "sapien", "libero", "robosuite", "jax",
    "transformers", "diffusers", "lerobot", "datasets", "ray", "wandb", "trackio", "tensorboard",
    "matplotlib", "wordllama",
}  # fmt: skip


def run(*command: str | Path, cwd: Path, timeout: float = 240) -> str:
    """Standard output; a failure shows both streams."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def clean(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel and none of its dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    [wheel] = dist.glob("*.whl")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    return folder


def fresh(code: str, cwd: Path) -> str:
    return run(sys.executable, "-c", code, cwd=cwd)


def test_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    [wheel] = dist.glob("*.whl")
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    tracked = set(run("git", "ls-files", "-co", "--exclude-standard", "embodyrl", cwd=ROOT).split())
    assert packed == {name for name in tracked if (ROOT / name).exists()}
    assert "embodyrl/py.typed" in packed


def test_sdist_builds_without_the_links(dist: Path) -> None:
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {m.name.split("/", 1)[1] for m in members if "/" in m.name}
    assert not [m.name for m in members if m.issym() or m.islnk()]
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "embodyrl/__init__.py",
        "tests/test_packaging.py",
    } <= names
    assert not {n.split("/")[0] for n in names} & {"sims", "policies", "configs", ".venv", "runs"}


def test_clean_venv_imports_and_prints_help(clean: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", run(clean / "bin/python", "-c", IMPORT, cwd=clean))
    assert "quickstart" in run(clean / "bin/embodyrl", "--help", cwd=clean)


IMPORT = "import embodyrl; print(embodyrl.__version__)"


def test_installed_wheel_works_with_its_dependencies(clean: Path) -> None:
    # The wheel's own files with the packages of this environment: what `pip install embodyrl`
    # gives, without 8 GB more.
    packages = json.loads(
        fresh("import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))", ROOT)
    )
    [site] = clean.glob("lib/python*/site-packages")
    code = (
        f"import sys; sys.path.append({packages!r}); import embodyrl.config as c; print(c.__file__)"
    )
    assert Path(run(clean / "bin/python", "-c", code, cwd=clean).strip()).is_relative_to(site)


def test_importing_is_light() -> None:
    code = """
import json, sys, time, torch
start = time.process_time()
import embodyrl.env, embodyrl.policy, embodyrl.registry, embodyrl.types
print(json.dumps([time.process_time() - start, sorted(sys.modules)]))
"""
    seconds, modules = json.loads(fresh(code, ROOT))
    assert not HEAVY & set(modules)
    assert (
        seconds < 0.5
    )  # of processor time beside torch's own import, which takes as long as it takes
    alone = json.loads(
        fresh("import json, sys, embodyrl; print(json.dumps(sorted(sys.modules)))", ROOT)
    )
    assert not (HEAVY | {"torch", "numpy"}) & set(alone)


def test_import_and_help_are_fast(clean: Path) -> None:
    def fastest(*command: str | Path) -> float:
        """Processor seconds, the best of five: they hold on a busy machine, too."""
        times = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run(*command, cwd=clean)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times)

    script = Path(sys.executable).parent / "embodyrl"
    assert fastest(sys.executable, "-c", "import embodyrl") < 2.0
    assert fastest(script, "--help") < 0.5


def test_base_install_names_what_the_package_imports_at_the_top() -> None:
    """No module of the base install imports the package of an extra at its top.

    Plug-ins may: LeRobot loads them.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"torch", "mujoco", "wordllama"} <= {
        re.split(r"[\[<>=]", d)[0] for d in project["dependencies"]
    }
    only_extras = {
        "mani_skill",
        "sapien",
        "libero",
        "robosuite",
        "lerobot",
        "transformers",
        "diffusers",
        "jax",
        "ray",
    }
    pattern = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
    offenders = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in (ROOT / "embodyrl").rglob("*.py")
        if path.name not in ("lerobot_plugin.py", "picture_step.py")
        and path.parent.name != "lerobot_plugin"
        and (found := only_extras & set(pattern.findall(path.read_text())))
    }
    assert not offenders


def test_locks_pin_by_hash_and_name_no_host() -> None:
    for lock in (ROOT / "requirements").glob("*.txt"):
        text = lock.read_text()
        assert "://" not in text and "--index-url" not in text and "--find-links" not in text, lock
        entries = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
        bare = [
            e.splitlines()[0]
            for e in entries
            if "==" in e.split("\n")[0] and "--hash=sha256:" not in e
        ]
        assert not bare, lock


def test_links_lead_to_the_package() -> None:
    for name in ("sims", "world_models", "policies", "real_robot", "configs"):
        link, target = ROOT / name, ROOT / "embodyrl" / name
        assert link.is_symlink() == any(
            p.suffix != ".pyc" for p in target.rglob("*") if p.is_file()
        ), name
        if link.is_symlink():
            assert link.readlink() == Path("embodyrl") / name
