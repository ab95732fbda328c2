"""What the documentation and ``--help`` say is so: commands, keys, names, paths and links."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from docs_text import (
    ROOT,
    Document,
    command_lines,
    documents,
    embodyrl_arguments,
    help_texts,
)

from embodyrl import registry
from embodyrl.cli.main import build_parser
from embodyrl.config import env_config, overridden, resolve
from embodyrl.errors import UserError
from embodyrl.storage.preset_files import apply_overrides, read_preset

PAGES = documents()
TEXTS = PAGES + help_texts()
PARSER = build_parser()
PRESETS = registry.preset_names()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ANCHORS = {page.name: page.anchors() for page in PAGES}
# What the pages call these objects by.
OBJECTS = {
    "env": ("embodyrl.env.VecEnv", "embodyrl.env.SteppedVecEnv"),
    "policy": ("embodyrl.policy.Policy", "embodyrl.policies.flow_base.FlowPolicy"),
    "step": ("embodyrl.types.Step",),
    "obs": ("embodyrl.types.Obs",),
    "spec": ("embodyrl.types.EnvSpec",),
}
# Where the config classes of a section are.
CONFIGS = {
    "env": ("embodyrl.env", "embodyrl.sims", "embodyrl.world_models", "embodyrl.real_robot.env"),
    "policy": ("embodyrl.policies",),
    "algorithm": ("embodyrl.algorithms",),
    "run": ("embodyrl.config",),
    "data": ("embodyrl.config",),
    "world": ("embodyrl.world_models.config",),
    "loop": ("embodyrl.dreams.loop",),
    "helper": ("embodyrl.improve.scripted_helper",),
    "safety": ("embodyrl.real_robot.control",),
    "topics": ("embodyrl.real_robot.ros",),
    "libfranka": ("embodyrl.real_robot.libfranka",),
}
CONFIG_CLASS = re.compile(r"Config$|^Topics$|^Franka$")
PLACEHOLDER = re.compile(r"^[\[A-Z_\]]+$")
TOP_FOLDERS = (
    "docs|benchmarks|tests|embodyrl|scripts|configs|examples|requirements|packages|sims|policies"
    "|world_models|real_robot"
)
PATH = re.compile(rf"(?<![\w/.:-])(?:{TOP_FOLDERS})/[\w./*-]+")
PRESET = re.compile(
    r"^(?:mujoco|maniskill|libero|dream|robot|gymnasium|ogbench)_\w*\*?"
    r"(?:sft|ppo|grpo|fpo|nft|sac_flow|rlpd|wsrl|dsrl|pa_rl|pa_rl_offline|fql)(?:_\d+)?$"
)
KEY = re.compile(r"^(env|policy|algorithm|run|data|helper|safety|topics|libfranka)\.(\w+)(?:=.*)?$")
DOTTED = re.compile(r"(?<![\w/.@-])embodyrl(?:\.\w+)+")
SHORT = re.compile(r"^(\w+(?:\.\w+)+)(?:\(.*\))?$")


def mistakes(document: Document, found: Iterator[str]) -> list[str]:
    """What is wrong with a page, each with its name in front."""
    return [f"{document.name}: {text}" for text in found]


def report(check: Callable[[Document], Iterator[str]], texts: list[Document]) -> None:
    """Fails with all mistakes of all texts at once."""
    wrong = [line for document in texts for line in mistakes(document, check(document))]
    assert not wrong, "\n".join(wrong)


def test_commands_can_be_typed() -> None:
    """Every command parses, its presets exist, and its overrides are keys of the config."""
    report(wrong_commands, TEXTS)


def wrong_commands(document: Document) -> Iterator[str]:
    for command in command_lines(document):
        arguments = embodyrl_arguments(command)
        line = f"embodyrl {' '.join(arguments or [])}"
        if arguments and "--help" not in arguments and f"$ {line}\nembodyrl: " not in document.text:
            try:
                check_command(tuple(arguments))
            except UserError as error:
                yield f"{line}: {error}"


def test_commands_in_a_sentence_exist() -> None:
    """A sentence may leave arguments out, but not name what is not there."""
    report(wrong_words, TEXTS)


def wrong_words(document: Document) -> Iterator[str]:
    for word in document.words():
        if word.startswith("embodyrl ") and "--help" not in word:
            words = [w for w in word.split()[1:] if w != "..." and not w.startswith("[")]
            try:
                check_command(tuple(words))
            except UserError as error:
                if "are required" not in str(error):
                    yield f"`{word}`: {error}"


@functools.cache
def check_command(given: tuple[str, ...]) -> None:
    """Raises UserError for what ``embodyrl`` would refuse before it looks at any file."""
    parsed, rest = PARSER.parse_known_args(given)
    options = [w for w in rest if w.startswith("-") or not hasattr(parsed, "overrides")]
    if options:
        raise UserError(f"There is no option {options[0]!r}.")
    overrides = [*(getattr(parsed, "overrides", None) or []), *rest]
    kind = getattr(parsed, "world_command", None) or parsed.command
    if kind == "train" and parsed.command == "world":
        check_keys("world", overrides)
    elif kind == "loop":
        if not placeholder(parsed.preset):
            check_loop(parsed.preset, overrides)
    elif kind == "train":
        if not placeholder(parsed.preset):
            check_preset(parsed.preset, overrides)
    elif kind in ("collect", "bench"):
        if parsed.env and not placeholder(parsed.env):
            env_config(parsed.env, overrides)
    elif kind == "list" and parsed.env and parsed.env not in registry.names("envs"):
        raise UserError(f"There is no env {parsed.env!r}.")
    else:
        for item in overrides:
            section, _, key = item.partition(".")
            check_keys(section, [key])


def check_preset(preset: str, overrides: list[str]) -> None:
    """As ``train PRESET --dry-run`` does, but for a world model's env, whose import takes long."""
    raw = overridden(preset, overrides)
    if raw.env.name == "world_model":
        check_keys("env", [f"{key}=" for key in raw.env])
        raw.env = {"name": "mujoco"}
    resolve(raw)


def check_loop(preset: str, overrides: list[str]) -> None:
    """A loop needs a policy, and demonstrations where its training in dreams imitates."""
    known = registry.preset_names("loops")
    if preset not in known:
        raise UserError(f"There is no loop {preset!r}.")
    raw = apply_overrides(read_preset(str(known[preset])), overrides)
    check_keys("loop", [f"{key}=" for key in raw])
    imitates = raw.get("dream") and read_preset(str(raw.dream)).algorithm.get("bc_coef", 0.0) > 0
    for key in ("policy", "demos") if imitates else ("policy",):
        if not raw.get(key):
            raise UserError(f"{key} is empty.")


def check_keys(section: str, overrides: list[str]) -> None:
    for item in overrides:
        key = item.partition("=")[0]
        if key not in keys_of(section):
            raise UserError(f"{section} has no key {key!r}.")


def placeholder(name: str) -> bool:
    """``PRESET``, ``my_preset.yaml``: a name that the reader fills in."""
    return bool(PLACEHOLDER.match(name)) or name.endswith(".yaml")


@functools.cache
def keys_of(section: str) -> set[str]:
    """Every key that some config of a section has; read from the code: imports take long."""
    found: set[str] = set()
    for module in modules():
        for name, node in members(module).items():
            here = module.startswith(CONFIGS.get(section, ()))
            if here and isinstance(node, ast.ClassDef) and CONFIG_CLASS.search(name):
                fields = (n for n in node.body if isinstance(n, ast.AnnAssign))
                found |= {ast.unparse(field.target) for field in fields}
    return found


def test_presets_and_keys_exist() -> None:
    report(wrong_presets_and_keys, TEXTS)


def wrong_presets_and_keys(document: Document) -> Iterator[str]:
    known = {*PRESETS, *registry.preset_names("loops"), *registry.names("envs")}
    for word in document.words():
        if PRESET.match(word):
            pattern = re.compile(word.replace("*", r"\w*"))
            if not any(pattern.fullmatch(name) for name in known):
                yield f"there is no preset {word}"
        for part in word.split():
            match = KEY.match(part)
            if match and match[2] not in keys_of(match[1]) and not is_member(match[1], match[2]):
                yield f"`{word}`: there is no key {part}"


def is_member(section: str, name: str) -> bool:
    """Whether ``env.step`` or ``env.check_env`` is code and no key."""
    owners = OBJECTS.get(section, ())
    return any(resolves(f"{owner}.{name}") for owner in (*owners, f"embodyrl.{section}"))


def test_paths_exist() -> None:
    report(wrong_paths, TEXTS)


def wrong_paths(document: Document) -> Iterator[str]:
    texts = [document.prose, *(block for _, block in document.blocks)]
    for path in {p.rstrip(".,/") for text in texts for p in PATH.findall(text)}:
        if not any(ROOT.glob(path)) and not any(ROOT.glob(f"{path}.*")):
            yield f"there is no {path}"
    for word in document.words():
        if re.fullmatch(r"\w+\.(py|json|png)", word) and not is_file(word):
            yield f"there is no file {word}"


def test_pages_that_the_code_names_exist() -> None:
    files = [*(ROOT / "embodyrl").rglob("*.py"), *(ROOT / "embodyrl").rglob("*.yaml")]
    named = {
        p for f in files for p in re.findall(r"docs/[\w/-]+\.md", f.read_text(encoding="utf-8"))
    }
    assert not {path for path in named if not (ROOT / path).exists()}


def is_file(name: str) -> bool:
    """Whether the repository has a file of that name, or the package writes one."""
    return name in file_names() or name in source_text()


@functools.cache
def file_names() -> set[str]:
    tops = ("embodyrl", "benchmarks", "tests", "docs")
    return {path.name for top in tops for path in (ROOT / top).rglob("*.*")}


@functools.cache
def source_text() -> str:
    """All of the package's code: the names of the files that it writes are in there."""
    return "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "embodyrl").rglob("*.py"))


def test_links_lead_somewhere() -> None:
    report(wrong_links, PAGES)


def wrong_links(document: Document) -> Iterator[str]:
    for link in document.links():
        target, _, anchor = link.partition("#")
        path = (ROOT / document.name).parent / target if target else ROOT / document.name
        name = str(path.resolve().relative_to(ROOT))
        if name.startswith("docs/reference/"):
            continue  # made when the site is built, which checks these links
        if not path.exists():
            yield f"links to {link}"
        elif anchor and name in ANCHORS and anchor not in ANCHORS[name]:
            yield f"{link} has no such heading"


def test_names_of_modules_and_classes_exist() -> None:
    report(wrong_names, PAGES)


def wrong_names(document: Document) -> Iterator[str]:
    texts = [document.prose, *(block for _, block in document.blocks)]
    groups = {f"embodyrl.{kind}" for kind in (*registry.BUILT_IN, "presets")}  # of entry points
    for name in {n for text in texts for n in DOTTED.findall(text)} - groups:
        if not resolves(name):
            yield f"there is no {name}"
    for word in document.words():
        match = SHORT.match(word)
        if match and not KEY.match(word) and not is_file(word):
            first, _, rest = match[1].partition(".")
            owners = (*owners_of(first), *OBJECTS.get(first, ()))
            known = any(resolves(f"{owner}.{rest}") for owner in owners)
            if owners and not known and importlib.util.find_spec(first) is None:
                yield f"`{word}` is not there"


def test_python_is_valid() -> None:
    report(wrong_python, PAGES)


def wrong_python(document: Document) -> Iterator[str]:
    for language, block in document.blocks:
        if language == "python":
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("embodyrl"):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                    yield from (f"there is no {name}" for name in names if not resolves(name))


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in (ROOT / "embodyrl").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def members(module: str) -> dict[str, ast.AST]:
    """The names at a module's top."""
    return dict(names_in(ast.parse(modules()[module].read_text(encoding="utf-8")).body))


def names_in(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield ast.unparse(target), node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from names_in(node.body)


@functools.cache
def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or something in one; nothing is imported."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module in modules():
            rest = parts[length:]
            if not rest:
                return True
            node = members(module).get(rest[0])
            return node is not None and (len(rest) == 1 or has_member(node, rest[1]))
    return False


def has_member(node: ast.AST, name: str) -> bool:
    """Of a class, its own or those of its bases in the package."""
    if not isinstance(node, ast.ClassDef):
        return True  # an imported name, or an object: nobody can say without running it
    own = dict(names_in(node.body))
    attributes = {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    if name in own or name in attributes:
        return True
    for base in (ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases):
        for module in modules():
            parent = members(module).get(base)
            if isinstance(parent, ast.ClassDef) and parent is not node and has_member(parent, name):
                return True
    return False


@functools.cache
def owners_of(first: str) -> tuple[str, ...]:
    """Modules, or classes of modules, that a short name such as ``returns.gae`` may begin with."""
    found = [m for m in modules() if m.rpartition(".")[2] == first]
    classes = [m for m in modules() if isinstance(members(m).get(first), ast.ClassDef)]
    return (*found, *(f"{module}.{first}" for module in classes))


def test_targets_and_extras_exist() -> None:
    report(wrong_targets_and_extras, TEXTS)


def wrong_targets_and_extras(document: Document) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    benchmarks = ("NAME", *(path.stem for path in (ROOT / "benchmarks").glob("*.json")))
    targets |= {f"results-{name}" for name in benchmarks}
    commands = [c for c in command_lines(document) if c[0] == "make"]
    commands += [word.split() for word in document.words() if word.startswith("make ")]
    for word in (word for command in commands for word in command[1:]):
        if "=" not in word and word not in targets:
            yield f"make has no target {word}"
    for listed in re.findall(r"(?:embodyrl|[\"']\.)\[([\w, ]+)\]", document.text):
        if wrong := set(re.split(r"[, ]+", listed)) - set(EXTRAS):
            yield f"there is no extra {wrong}"


def test_install_lists_every_extra() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert set(rows) == set(EXTRAS) - {"dev", "docs"}
    parts = re.search(r"\[([\w,]+)\]", EXTRAS["all"][0])
    assert parts and set(rows["all"].strip("`").split()) == set(parts[1].split(","))


def test_every_verb_has_a_row() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for document in help_texts():
        verb = document.name.split()[1]
        assert verb == "--help" or re.search(f"`(embodyrl )?{verb}\\b", page), (
            f"docs/cli.md lacks {verb}"
        )


def test_every_algorithm_has_a_page() -> None:
    for name in registry.BUILT_IN["algorithms"]:
        assert (ROOT / f"docs/algorithms/{name}.md").exists()


def test_files_in_the_docs_are_the_files() -> None:
    command = [sys.executable, str(ROOT / "scripts/docs_snippets.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run python scripts/docs_snippets.py"


def test_json_in_the_docs_is_json() -> None:
    for document in PAGES:
        for language, block in document.blocks:
            if language == "json":
                json.loads(block)


def test_the_checks_find_what_is_wrong() -> None:
    """A test of the test: each kind of falsehood is noticed."""
    for wrong in (
        "train maniskill_pickcube_sac_flow",
        "train mujoco_pick_ppo run.sede=1",
        "collect mujoco --episode-count 3 --out x",
        "eval runs/ppo env.no_such_key=1",
    ):
        with pytest.raises(UserError):
            check_command(tuple(wrong.split()))
    page = Document("page", "`make nothing` [a](b.md) `mujoco_pick_abc_ppo` `docs/nothing.md`")
    checks = (wrong_targets_and_extras, wrong_links, wrong_presets_and_keys, wrong_paths)
    assert [len(list(check(page))) for check in checks] == [1, 1, 1, 1]
    assert not resolves("embodyrl.functional.flow.no_such_name")
    assert not resolves("embodyrl.algorithms.ppo.PPO.no_such_method")
    assert resolves("embodyrl.algorithms.ppo.PPOConfig.gamma")
