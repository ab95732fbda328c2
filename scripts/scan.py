"""Looks for secrets in the files that git keeps, and for packages that the lock files do not pin by hash.

    python scripts/scan.py

Part of `make lint`. A line that is no secret ends in the comment `pragma: allowlist secret`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from detect_secrets import SecretsCollection
from detect_secrets.core.scan import get_plugins
from detect_secrets.settings import transient_settings

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = (
    "AWSKeyDetector", "AzureStorageKeyDetector", "BasicAuthDetector", "DiscordBotTokenDetector",
    "GitHubTokenDetector", "GitLabTokenDetector", "JwtTokenDetector", "NpmDetector",
    "OpenAIDetector", "PrivateKeyDetector", "PypiTokenDetector", "SlackDetector",
    "StripeDetector", "TwilioKeyDetector",
)  # fmt: skip
"""Of detect-secrets. Those that go by entropy alone would name every hash of the lock files."""
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")
"""Of the Hugging Face hub, which detect-secrets 1.5 does not know."""
MADE = ("requirements/", "docs/images/", "docs/javascripts/katex/", "benchmarks/imagination")
"""Large, and written by programs."""
PINNED = re.compile(r"[A-Za-z0-9._-]+(?:\[[^\]]+\])?==[^\s;]+(?:\s*;[^\\]*)?")


def secrets(files: list[str], root: Path = ROOT) -> Iterator[str]:
    """Lines that look like a key, a token or a password."""
    found = SecretsCollection(root=str(root))
    with transient_settings({"plugins_used": [{"name": name} for name in PLUGINS]}):
        patterns = [p for plugin in get_plugins() for p in getattr(plugin, "denylist", ())]
        for name in files:
            text = (root / name).read_bytes().decode(errors="ignore")
            # It looks at each line with each plugin, so a file without any match is left out.
            if any(pattern.search(text) for pattern in patterns):
                found.scan_file(name)
    for name, secret in found:
        yield f"{name}:{secret.line_number}: looks like a secret ({secret.type})."
    for name in files:
        text = (root / name).read_bytes().decode(errors="ignore")
        for match in HUB_TOKEN.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: looks like a secret (a token of the Hugging Face hub)."


def unpinned(name: str, text: str) -> Iterator[str]:
    """Requirements of a lock file without a version or a SHA-256."""
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    for line in lines:
        requirement = line.split("#")[0].strip()
        if not requirement or requirement.startswith("--"):
            continue
        what, *hashes = re.split(r"\s+--hash=", requirement)
        good = hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", h.strip()) for h in hashes)
        if not (good and PINNED.fullmatch(what.strip())):
            yield f"{name}: {what.strip()!r} is not pinned to a version and its SHA-256."


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    wrong = list(secrets([n for n in names if (ROOT / n).is_file() and not n.startswith(MADE)]))
    for lock in sorted((ROOT / "requirements").glob("*.txt")):
        wrong += unpinned(str(lock.relative_to(ROOT)), lock.read_text())
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
