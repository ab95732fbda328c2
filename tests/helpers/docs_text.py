"""Takes the documentation apart: code blocks, commands, words in backticks, links, headings."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown.extensions.toc import slugify

from embodyrl.cli.main import build_parser

ROOT = Path(__file__).parents[2]
SHELL = {"sh", "bash", "console", "text", ""}
FENCE = re.compile(r"^ *```")
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: *\{ *#([\w-]+) *\})?$")
ASSIGNMENT = re.compile(r"^[A-Z][A-Z0-9_]*=")


@dataclass
class Document:
    """A text, and what is in it; code blocks and prose are apart."""

    name: str
    text: str
    blocks: list[tuple[str, str]] = field(default_factory=list)
    prose: str = ""

    def __post_init__(self) -> None:
        """Parts the text at its fences."""
        prose: list[str] = []
        block: list[str] | None = None
        language = ""
        for line in self.text.splitlines():
            if FENCE.match(line):
                if block is None:
                    block = []
                    language = line.strip()[3:].split()[0] if line.strip()[3:] else ""
                else:
                    self.blocks.append((language, "\n".join(block)))
                    block = None
            elif block is not None:
                block.append(line)
            else:
                prose.append(line)
        self.prose = "\n".join(prose)

    def words(self) -> list[str]:
        """What stands in backticks."""
        return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", self.prose)

    def links(self) -> list[str]:
        """Targets that are on this machine."""
        return [t for t in LINK.findall(self.prose) if not re.match(r"[a-z]+:", t)]

    def anchors(self) -> set[str]:
        """Of the headings, as the site and GitHub make them."""
        found = set()
        for line in self.prose.splitlines():
            if match := HEADING.match(line):
                plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).replace("`", "")
                found.add(match[2] or slugify(plain, "-"))
        return found


def documents() -> list[Document]:
    """The pages that tell how things are; the notebook tells how they were."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        Document(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
        for page in pages
        if "notebook" not in page.parts
    ]


def help_texts() -> list[Document]:
    """What ``--help`` of each verb prints behind its options."""
    return [
        Document(
            f"{parser.prog} --help", f"{parser.description}\n```\n{parser.epilog or ''}\n```\n"
        )
        for parser in _parsers(build_parser())
    ]


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _parsers(sub)


def command_lines(document: Document) -> Iterator[list[str]]:
    """The words of every command in a shell's code blocks."""
    for language, block in document.blocks:
        if language in SHELL:
            for line in block.replace("\\\n", " ").splitlines():
                yield from _commands(line.strip().removeprefix("$ "))


def _commands(line: str) -> Iterator[list[str]]:
    # Help texts and some pages tell behind several spaces what a command does.
    line = re.split(r" {2,}(?=[^-\s])", line)[0] if not line.startswith("#") else ""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    command: list[str] = []
    try:
        tokens = list(lexer)
    except ValueError:  # an apostrophe: this is prose
        return
    for token in [*tokens, ";"]:
        if token and set(token) <= set("&|;"):
            while command and ASSIGNMENT.match(command[0]):
                command = command[1:]
            if command:
                yield command
            command = []
        else:
            command.append(token)


def embodyrl_arguments(command: list[str]) -> list[str] | None:
    """The arguments of ``embodyrl``, however it is started; None for other programs."""
    words = command[:-1] if command[-1] == "..." else command
    words = words[: words.index(">")] if ">" in words else words
    if Path(words[0]).name == "embodyrl":
        return words[1:]
    if "-m" in words and "embodyrl.cli" in words:
        return words[words.index("embodyrl.cli") + 1 :]
    # What stands behind the image's name are the arguments of its entry point.
    if words[:2] == ["docker", "run"] and "embodyrl" in words and "--entrypoint" not in words:
        return words[words.index("embodyrl") + 1 :]
    return None
