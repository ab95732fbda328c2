"""Puts the text of files into the docs' code blocks that name them.

    python scripts/docs_snippets.py           # write
    python scripts/docs_snippets.py --check   # only say which pages are out of date

A block names its file by its title: ``` { .python title="examples/plugin/reach2d/policy.py" }.
So a page is whole wherever it is read, and equals what is tested.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r'^(``` ?\{? ?\.?\w+ title="([^"]+)" ?\}?\n)(.*?)^(```)$', re.M | re.S)


def refreshed(page: str) -> str:
    """The page with the files as they are now."""

    def block(found: re.Match[str]) -> str:
        text = (ROOT / found[2]).read_text(encoding="utf-8").rstrip("\n")
        return f"{found[1]}{text}\n{found[4]}"

    return BLOCK.sub(block, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if any differs"
    )
    check = parser.parse_args().check
    stale = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (new := refreshed(page)) != page:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(new, encoding="utf-8")
    print("\n".join(f"{'stale' if check else 'written'}: {path}" for path in stale))
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
