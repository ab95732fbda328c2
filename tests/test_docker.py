"""The image has what ``make setup`` needs: system packages, Python and files."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
SETUP = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
VULKAN = (ROOT / "scripts/install_vulkan.sh").read_text(encoding="utf-8")
COPIED = {
    word
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE)
    for word in line.split()[:-1]
    if not word.startswith("--")
}


def test_it_installs_the_system_packages_that_setup_installs_for_simulators():
    """In the image ``make setup`` is no root, and only says what is missing."""
    [apt] = re.findall(r"apt-get install -y --no-install-recommends ([^&]+)", DOCKERFILE)
    [opengl] = re.findall(r"opengl=\(([^)]+)\)", SETUP)
    [vulkan] = re.findall(r"^PACKAGE=(\S+)$", VULKAN, re.MULTILINE)
    assert {*opengl.split(), vulkan} <= set(apt.split())


def test_its_python_is_the_one_of_the_lock_file():
    [version] = re.findall(r"^readonly PYTHON_VERSION=(\S+)", SETUP, re.MULTILINE)
    assert f"ARG BASE=python:{version}-slim" in DOCKERFILE


def test_it_copies_what_setup_reads():
    """Whatever the scripts and make's target name must be there, and get past ``.dockerignore``."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [needed] = re.findall(r"^\$\(STAMP\): (.+)$", makefile, re.MULTILINE)
    named = {*needed.split(), *re.findall(r"(?:scripts|requirements)/[\w.]+", SETUP)}
    folders = {str(Path(name).parent) for name in named} & COPIED
    assert {n for n in named if str(Path(n).parent) not in folders} <= COPIED
    assert not {name for name in COPIED if not (ROOT / name).exists()}
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    let_in = {line[1:] for line in ignore if line.startswith("!")}
    assert "*" in ignore
    assert {name.split("/")[0] for name in COPIED} == let_in
