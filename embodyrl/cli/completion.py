"""``embodyrl completion``: a script with which a shell completes commands, options and names.

The script is made from the parser, so it knows what ``--help`` knows, and asks no program while a
person types. Presets and envs are those that are installed when it is made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

SCRIPT = """# Completion of embodyrl for {shell}; `embodyrl completion {shell}` makes it anew.
{head}_embodyrl() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} said="" words="" other
    for other in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$other" in -*|*=*) ;; *) said="$said $other" ;; esac
    done
    case "$said " in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [ ${{#COMPREPLY[@]}} = 0 ] && COMPREPLY=($(compgen -f -- "$word"))
}}
complete -F _embodyrl embodyrl
"""
HEADS = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def add_completion_verb(verb: Any, build_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds ``embodyrl completion`` to the parser."""
    text = "Prints a script with which a shell completes commands, options and presets."
    examples = (
        "examples:\n"
        "  embodyrl completion bash    print it; put it into "
        "~/.local/share/bash-completion/completions/embodyrl\n"
        "  embodyrl completion zsh     print it; put it into a file that ~/.zshrc reads\n"
        "It works in a new shell. Make it anew after an update.\n"
    )
    sub = verb(
        "completion", lambda a: print(completion(a.shell, build_parser()), end=""), text, examples
    )
    sub.add_argument("shell", choices=list(HEADS), help="the shell")


def completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script for a shell, from a parser with commands."""
    from embodyrl import registry

    names = {
        "preset": registry.preset_names(),
        "env": {**registry.names("envs"), **registry.preset_names()},
    }
    rows = {said: _words(one, names) for said, one in _commands(parser, "")}
    # The longest commands first: a case ends with the first pattern that fits.
    cases = [
        f'        "{said} "*) words="{" ".join(words)}" ;;'
        for said, words in sorted(rows.items(), key=lambda row: -len(row[0].split()))
    ]
    return SCRIPT.format(shell=shell, head=HEADS[shell], cases="\n".join(cases))


def _commands(
    parser: argparse.ArgumentParser, said: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each parser, with the words that lead to it."""
    yield said, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _commands(inner, f"{said} {name}")


def _words(parser: argparse.ArgumentParser, names: dict[str, Any]) -> list[str]:
    """Options, commands, choices and names that may follow."""
    found: list[str] = []
    for action in parser._actions:
        found += [option for option in action.option_strings if option.startswith("--")]
        if action.choices is not None and not action.option_strings:
            found += map(str, action.choices)
        found += names.get(action.dest, ())
    return list(dict.fromkeys(found))
