"""Writes ``docs/config_keys.md``: every key of every config, from the config dataclasses.

python scripts/config_table.py           # write
python scripts/config_table.py --check   # only say whether the page is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from embodyrl import registry
from embodyrl.cli.config_keys import Key, config_classes, keys_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config_keys.md"
HEAD = """# Every key and its default

Look up what a key means, what it may be, and what it is by default. The command line has the same:

```sh
embodyrl config run.patience       # one key
embodyrl config algorithm.ppo      # all keys of PPO
embodyrl config mujoco_pick_ppo    # every key of a preset, and where it differs
```

A number out of its range is refused before anything is built. A setting that nothing reads is refused too.
This page is written by `scripts/config_table.py` from the config classes.
"""
TITLES = {
    "run": "Run",
    "data": "Data",
    "env": "Env",
    "policy": "Policy",
    "algorithm": "Algorithm",
    "world": "Training of a world model (`embodyrl world train`)",
    "loop": "Loop (`embodyrl world loop`)",
}


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    shown = set()
    for section, name, cls in config_classes():
        if name and name not in registry.BUILT_IN[f"{section}s".replace("policys", "policies")]:
            continue  # of another package that happens to be installed
        if section not in shown:
            shown.add(section)
            lines += [f"## {TITLES[section]}", ""]
        if name:
            lines += [f"### `{section}.name={name}`", ""]
        bare = section in ("world", "loop")
        lines += [
            "| Key | Is | Default | Meaning |",
            "| --- | --- | --- | --- |",
            *(_row(key, bare) for key in keys_of(section, name, cls)),
            "",
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _row(key: Key, bare: bool) -> str:
    name = key.key.partition(".")[2] if bare else key.key
    kind = f"{key.type}, {key.range}" if key.range else key.type
    cells = [f"`{name}`", kind, f"`{key.default}`", key.meaning.replace("``", "`")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if it differs")
    new = page()
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != new
    if parser.parse_args().check:
        print(
            f"{PAGE.name} is out of date: python scripts/config_table.py" if stale else "", end=""
        )
        sys.exit(stale)
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
