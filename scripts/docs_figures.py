"""A hook of MkDocs: what the site holds beside the pages of ``docs/``.

- The figures of ``benchmarks/`` that pages show, under the same address.
- The reference: a page for each room of the package, and a page with every key of every config. Both
  are made from the docstrings, so a module that moves or is new needs no change here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

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
    "report": "Report",
    "cli": "Command line",
}

# Rooms whose functions are for their own use: the reference shows their classes alone.
CLASSES_ONLY = {"sims", "policies", "world_models", "dreams", "distributed", "real_robot", "cli"}

# Which configs a person writes, and what stands before their keys. The rest are named by `name`.
PREFIXES = {
    "RunConfig": "run.",
    "DataConfig": "data.",
    "WorldTrainConfig": "",
    "LoopConfig": "",
}


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
        "Set a key behind the name of a preset: `embodyrl train mujoco_pick_ppo algorithm.lr=3e-5`.",
        "`--dry-run` prints the config that comes of it.",
        "",
    ]
    for module in _modules(package):
        for cls in module.classes.values():
            if not cls.is_alias and _is_config(cls):
                lines += _config_section(cls)
    return "\n".join(lines)


def _config_section(cls: Any) -> list[str]:
    fields = _fields(cls)
    name = str(fields["name"].value).strip("'\"") if "name" in fields else ""
    section = _section(cls)
    title = f"{cls.name}: `{section}.name={name}`" if name and section else cls.name
    rows = [
        f"| `{_prefix(cls, section)}{key}` | `{_escape(str(field.annotation))}` "
        f"| {_default(field)} | {_meaning(cls, key)} |"
        for key, field in fields.items()
        if key != "name"
    ]
    return [
        f"## {title} {{ #config-{cls.path.removeprefix('embodyrl.').replace('.', '-')} }}",
        "",
        f"`{cls.path}`. {cls.docstring.value.splitlines()[0] if cls.docstring else ''}",
        "",
        "| Key | Type | Default | Meaning |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _is_config(cls: Any) -> bool:
    named = cls.name.endswith("Config") or cls.path.startswith("embodyrl.real_robot.")
    frozen = any("frozen=True" in str(d.value) for d in cls.decorators)
    return named and frozen and not cls.name.startswith("_") and bool(_fields(cls))


def _section(cls: Any) -> str:
    """The section of a preset that this class checks, by the room that it lies in."""
    bases = {cls.name, *(base.name for base in _mro(cls))}
    if "EnvConfig" in bases:
        return "env"
    room = cls.path.split(".")[1]
    return {"algorithms": "algorithm", "policies": "policy"}.get(room, "")


def _prefix(cls: Any, section: str) -> str:
    return PREFIXES.get(cls.name, f"{section}." if section else "")


def _fields(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass, those of its bases first."""
    fields: dict[str, Any] = {}
    for owner in [*reversed(_mro(cls)), cls]:
        for key, member in owner.members.items():
            # A class attribute without annotation is no field.
            if member.is_attribute and member.annotation is not None and not key.startswith("_"):
                fields[key] = member
    return fields


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
    """The figures of ``benchmarks/`` that pages link to and that exist; MkDocs warns of the others."""
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
    for member in parent.members.values():
        if not member.is_alias and member.is_module:
            yield member
            yield from _modules(member)
