"""A hook of MkDocs: what the site holds beside ``docs/``.

- The figures of ``benchmarks/`` that pages show, under the same address.
- The reference: a page for each room of the package, and a page with every key of every config.
  Both are made from the docstrings, so a module that moves or is new needs no change here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import griffe
from mkdocs.structure.files import File

from embodyrl import ranges

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(r"\]\((?:\.\./)+benchmarks/([\w.]+\.png)\)")

# Rooms in the order in which a rollout passes them. "core" are the modules at the top.
ROOMS = {
    "core": "Core: types, env, policy, config, registry",
    "functional": "Functional: flows, losses, returns, intervals",
    "rollouts": "Rollouts",
    "algorithms": "Algorithms",
    "policies": "Policies",
    "sims": "Simulators",
    "data": "Data",
    "world_models": "World models",
    "dreams": "Dreams",
    "training": "Training and evaluation",
    "storage": "Storage",
    "distributed": "Distributed",
    "real_robot": "Robots",
    "improve": "Rounds of help on a robot",
    "report": "Report",
    "cli": "Command line",
}

# Rooms whose functions are for their own use: the reference shows their classes alone.
CLASSES_ONLY = {
    "sims",
    "policies",
    "world_models",
    "dreams",
    "distributed",
    "real_robot",
    "improve",
    "cli",
}

# The parts of a config in the order of the page: title, the prefix of its keys, its classes' paths.
SECTIONS = {
    "preset": ("A preset's sections", "", ("config.Config",)),
    "run": ("Run", "run.", ("config.RunConfig",)),
    "data": ("Data", "data.", ("config.DataConfig",)),
    "env": ("Env", "env.", ("env.", "sims.", "world_models.config.WorldModel", "real_robot.env.")),
    "policy": ("Policy", "policy.", ("policies.",)),
    "algorithm": ("Algorithm", "algorithm.", ("algorithms.",)),
    "world": ("Training of a world model", "", ("world_models.config.WorldTrain",)),
    "loop": ("Loop", "", ("dreams.",)),
    "helper": ("A scripted helper", "helper.", ("improve.scripted_helper.",)),
    "arm": ("In LeRobot's commands: the arm", "--robot.", ("real_robot.lerobot_plugin.arm.",)),
    "person": ("In LeRobot's commands: you", "--teleop.", ("real_robot.lerobot_plugin.person.",)),
    "robot": ("A robot's file", "", ("real_robot.",)),
    "reflector": ("Reflectors", "", ("world_models.reflectors.",)),
    "other": ("Others", "", ("",)),
}
NUMBERS = {
    name: get_args(kind)[0].__name__
    for name, kind in vars(ranges).items()
    if get_origin(kind) is Annotated
}
"""Alias of ``embodyrl.ranges`` -> the type without its range."""
CONFIG_CLASS = re.compile(
    r"Config$|^Topics$|^Franka$|^Leader$|^(OpenCV|Uvc|RealSense)Camera$|^RobotiqGripper$"
)


def on_config(config: Any) -> Any:
    """Puts the pages of the reference that exist here into the navigation."""
    package = _load()
    pages: list[Any] = [{"Every config key": "reference/config.md"}]
    pages += [{ROOMS[room]: f"reference/{room}.md"} for room in _rooms(package)]
    for entry in config["nav"]:
        if "Reference" in entry:
            entry["Reference"] = pages
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages of the reference, and the figures that pages show."""
    package = _load()
    files.append(File.generated(config, "reference/config.md", content=config_page(package)))
    for room, modules in _rooms(package).items():
        content = room_page(ROOMS[room], modules)
        files.append(File.generated(config, f"reference/{room}.md", content=content))
    for name in _figures(Path(config["docs_dir"])):
        path = str(ROOT / "benchmarks" / name)
        files.append(File.generated(config, f"benchmarks/{name}", abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns a link to ``benchmarks/`` of the repository into one to the site's own copy."""
    up = "../" * page.file.src_uri.count("/")
    return FIGURE.sub(lambda match: f"]({up}benchmarks/{match[1]})", markdown)


def room_page(title: str, modules: list[Any]) -> str:
    """A heading for the room, and for each module its public classes and functions."""
    lines = [f"# {title}", ""]
    for module in modules:
        members = ", ".join(name for name, member in module.members.items() if _is_shown(member))
        lines += [
            f"::: {module.path}",
            f"    options: {{heading_level: 2, members: [{members}]}}",
            "",
        ]
    return "\n".join(lines)


def config_page(package: Any) -> str:
    """A table of keys, types and defaults for each config class."""
    lines = [
        "# Every config key",
        "",
        "Set a key behind the name of a preset; `--dry-run` prints the config that comes of it:",
        "",
        "```sh",
        "embodyrl train mujoco_pick_ppo algorithm.lr=3e-5 --dry-run",
        "```",
        "",
    ]
    left = [
        cls
        for module in _modules(package)
        for cls in module.classes.values()
        if not cls.is_alias and CONFIG_CLASS.search(cls.name) and _fields(cls)
    ]
    for title, prefix, paths in SECTIONS.values():
        starts = tuple(f"embodyrl.{path}" for path in paths)
        mine = [cls for cls in left if cls.path.startswith(starts)]
        left = [cls for cls in left if cls not in mine]
        lines += [f"## {title}", ""] if mine else []
        for cls in mine:
            lines += _config_section(cls, prefix)
    return "\n".join(lines)


def _config_section(cls: Any, prefix: str) -> list[str]:
    fields = _fields(cls)
    name = str(fields["name"].value).strip("'\"") if "name" in fields else ""
    named = name and prefix in ("env.", "policy.", "algorithm.")
    title = f"{cls.name}: `{prefix}name={name}`" if named else cls.name
    anchor = cls.path.removeprefix("embodyrl.").replace(".", "-")
    rows = [
        f"| `{prefix}{key}` | `{_escape(_plain_type(field))}` | {_default(field)} "
        f"| {_meaning(cls, key)} |"
        for key, field in fields.items()
        if key != "name" or not named
    ]
    return [
        f"### {title} {{ #config-{anchor} }}",
        "",
        f"`{cls.path}`. {cls.docstring.value.splitlines()[0] if cls.docstring else ''}",
        "",
        "| Key | Type | Default | Meaning |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _plain_type(field: Any) -> str:
    """A field's type without its range, which ``docs/config_keys.md`` has in words."""
    text = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", str(field.annotation))
    return re.sub(r"\w+", lambda word: NUMBERS.get(word[0], word[0]), text)


def _fields(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass, those of its bases first."""
    owners = [*reversed(_mro(cls)), cls]
    members = {key: member for owner in owners for key, member in owner.members.items()}
    # A class attribute without annotation is no field.
    return {
        key: member
        for key, member in members.items()
        if member.is_attribute and member.annotation is not None and not key.startswith("_")
    }


def _mro(cls: Any) -> list[Any]:
    try:
        return list(cls.mro())
    except ValueError:
        return []


def _default(field: Any) -> str:
    text = str(field.value)
    if field.value is None or text.startswith("MISSING"):
        return "required"
    factory = re.search(r"default_factory=([\w.]+)", text)
    return f"`{_escape(factory.group(1) + '()' if factory else text)}`"


def _meaning(cls: Any, key: str) -> str:
    """What the nearest docstring says of a key."""
    for owner in [cls, *_mro(cls)]:
        for part in owner.docstring.parsed if owner.docstring else ():
            if part.kind.value == "attributes":
                for row in part.value:
                    if row.name == key:
                        return _escape(" ".join(row.description.split())).replace("``", "`")
    return ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _figures(docs: Path) -> set[str]:
    """The figures of ``benchmarks/`` that pages show; MkDocs warns of those that do not exist."""
    texts = [page.read_text(encoding="utf-8") for page in docs.rglob("*.md")]
    named = {name for text in texts for name in FIGURE.findall(text)}
    return {name for name in named if (ROOT / "benchmarks" / name).exists()}


@functools.cache
def _load() -> Any:
    return griffe.load("embodyrl", search_paths=[str(ROOT)], docstring_parser="google")


def _rooms(package: Any) -> dict[str, list[Any]]:
    """Room -> its modules that show something, in the order of ``ROOMS``."""
    rooms: dict[str, list[Any]] = {room: [] for room in ROOMS}
    for module in _modules(package):
        parts = module.path.split(".")
        top = package.members[parts[1]]
        room = parts[1] if top.is_subpackage else "core"
        if any(_is_shown(member) for member in module.members.values()):
            rooms.setdefault(room, []).append(module)
            ROOMS.setdefault(room, room)
    return {room: modules for room, modules in rooms.items() if modules}


def _is_shown(member: Any) -> bool:
    if member.is_alias or member.name.startswith("_") or not member.docstring:
        return False
    room = member.path.split(".")[1]
    return member.is_class or (member.is_function and room not in CLASSES_ONLY)


def _modules(parent: Any) -> Iterator[Any]:
    for _, member in sorted(parent.members.items()):
        if not member.is_alias and member.is_module:
            yield member
            yield from _modules(member)
