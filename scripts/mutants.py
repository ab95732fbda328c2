"""Mutation tests: every small change of the maths must make a test fail.

    .venv-mutants/bin/python scripts/mutants.py [PART ...]

``make mutants`` calls it. A part is the room ``functional``, or a file of ``algorithms`` by its name
(``nft``); without any it is those of ``DEFAULT``. mutmut makes the changes ("mutants") of each
function and runs, for each, the tests that call that function: those of the room, or of the file.
Golden traces and learning curves are no such tests: they notice almost anything, and do not say
what is wrong. A mutant that no test notices must stand in ``tests/mutants.toml`` with the reason why
none can. The exit status is 1 if another one is left.

Results stay in ``.mutants/``. Where a function did not change, killed mutants are not tried again,
and survivors always are. Remove the folder to begin anew.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from mutmut.configuration import reset_config
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = ROOT / "tests/mutants.toml"
DEFAULT = ("functional",)
"""Parts of which every mutant is killed or explained."""
MORE_TESTS = {
    "dsrl": ["test_rlpd_dsrl.py"],
    "rlpd": ["test_rlpd_dsrl.py"],
    "wsrl": ["test_rlpd_dsrl.py"],
    "sac_flow": ["test_sac_flow_targets.py"],
    "optim": ["test_microbatches.py", "test_ppo.py"],
}
"""Tests of a file of algorithms/ beside those that are named as it is."""
UNNOTICED = ("survived", "no tests", "suspicious", "not checked")
SETTINGS = """
[tool.mutmut]
source_paths = ["embodyrl"]
only_mutate = ["{sources}"]
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-m", "not slow and not gpu", "-p", "no:cacheprovider"]
# What is said to a user is no maths.
do_not_mutate_patterns = ["raise \\\\w*Error\\\\(", "refuse_unread\\\\(", "print\\\\("]
# Workers are forked from a process in which PyTorch has not computed anything yet.
process_isolation = "forkserver"
use_git_change_detection = false
use_setproctitle = false
"""


def work_folder(part: str) -> Path:
    """Where mutmut works: links to the sources, and the project's settings with those above."""
    folder = ROOT / ".mutants" / part
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("embodyrl", "tests"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    sources, tests = f"embodyrl/algorithms/{part}.py", ["tests/functional"]
    if part == "functional":
        sources = "embodyrl/functional/*.py"
    else:
        names = [f"test_{part}.py", *MORE_TESTS.get(part, ())]
        tests = [f"tests/algorithms/{n}" for n in names if (ROOT / "tests/algorithms" / n).exists()]
    settings = SETTINGS.format(sources=sources, tests=json.dumps(tests))
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)
    return folder


def results(folder: Path) -> dict[str, tuple[str, Path]]:
    """Mutant -> its status, and the source file."""
    found = {}
    for meta in sorted(folder.glob("mutants/embodyrl/**/*.meta")):
        source = meta.relative_to(folder / "mutants").with_suffix("")
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            found[name] = (status_by_exit_code[code], source)
    return found


def forget_survivors(folder: Path) -> None:
    """Has mutmut try them again, because tests may have been added."""
    for meta in folder.glob("mutants/embodyrl/**/*.meta"):
        data = json.loads(meta.read_text())
        codes = data["exit_code_by_key"]
        for name, code in codes.items():
            if status_by_exit_code[code] in UNNOTICED:
                codes[name] = None
        meta.write_text(json.dumps(data))


def change(name: str, source: Path) -> tuple[str, str]:
    """The lines that a mutant replaces, and what it puts in their place."""
    lines = get_diff_for_mutant(name, path=source).splitlines()
    old = [x[1:].strip() for x in lines if x.startswith("-") and not x.startswith("---")]
    new = [x[1:].strip() for x in lines if x.startswith("+") and not x.startswith("+++")]
    return " ".join(old), " ".join(new)


def function_of(name: str) -> str:
    """The dotted name of the function that a mutant changes."""
    module, _, mangled = name.rpartition(".")
    mangled = mangled.partition("__mutmut_")[0]
    if mangled.startswith("x_"):
        return f"{module}.{mangled[2:]}"
    _, owner, method = mangled.split("ǁ")
    return f"{module}.{owner}.{method}"


def is_explained(function: str, old: str, new: str, rule: dict[str, str]) -> bool:
    """Whether a rule of the list names this change."""
    if not fnmatch.fnmatchcase(function, rule["function"]):
        return False
    return rule.get("from", "") in old and rule.get("to", "") in new


def report(part: str, folder: Path, rules: list[dict[str, str]], used: set[int]) -> int:
    """Prints the counts and the survivors without a reason; returns how many those are."""
    os.chdir(folder)
    reset_config()
    counts: Counter[str] = Counter()
    unexplained = 0
    for name, (status, source) in results(folder).items():
        if status not in UNNOTICED:
            counts["killed"] += 1
            continue
        function = function_of(name)
        old, new = change(name, source)
        reasons = [i for i, r in enumerate(rules) if is_explained(function, old, new, r)]
        used.update(reasons)
        if reasons:
            counts["explained"] += 1
            continue
        unexplained += 1
        print(f"\n{function}  ({status}: {name})\n  - {old}\n  + {new}")
    total = counts.total() + unexplained
    print(
        f"\n{part}: {total} mutants, {counts['killed']} killed, {counts['explained']} explained in "
        f"{EXPLAINED.relative_to(ROOT)}, {unexplained} left."
    )
    return unexplained


def main() -> int:
    """Runs the parts that are named, or all."""
    parts = sys.argv[1:] or list(DEFAULT)
    known = sorted(p.stem for p in (ROOT / "embodyrl/algorithms").glob("[a-z]*.py"))
    if unknown := set(parts) - {"functional", *known}:
        print(f"No part is named {', '.join(unknown)}; they are functional, {', '.join(known)}.")
        return 2
    rules = tomllib.loads(EXPLAINED.read_text()).get("survivor", [])
    mutmut = Path(sys.executable).with_name("mutmut")
    used: set[int] = set()
    left = 0
    for part in parts:
        folder = work_folder(part)
        forget_survivors(folder)
        done = subprocess.run([mutmut, "run", "--max-children", "1"], cwd=folder)
        if done.returncode:
            print(f"mutmut ended with status {done.returncode}: the tests of {part} must pass.")
            return 2
        left += report(part, folder, rules, used)
    for i, rule in enumerate(rules):
        if i not in used and any(f".{part}." in rule["function"] for part in parts):
            print(f"No survivor needs this reason any more: {rule}")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
