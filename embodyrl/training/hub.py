"""Checkpoints to and from the Hugging Face hub, with config, evaluations and a model card.

What is pushed has a run's layout, so that a pulled folder is what ``embodyrl eval``,
``run.init_checkpoint`` and ``embodyrl deploy`` take: ``config.yaml``, ``evals/`` and one
checkpoint, which holds the policy and no optimiser.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embodyrl.build import load_config
from embodyrl.config import to_dict, to_yaml
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.functional.intervals import format_rate, format_return
from embodyrl.storage import checkpoint
from embodyrl.storage.atomic_files import rename_folder
from embodyrl.storage.env_spec import spec_from_json
from embodyrl.storage.paths import explain_os_error, require_writable
from embodyrl.storage.plain_data import inside
from embodyrl.storage.run_files import read_evaluations, read_meta

CARD = """---
library_name: embodyrl
pipeline_tag: robotics
tags: [robotics, reinforcement-learning, vision-language-action]
---

# {title}

A {policy} policy for {env}, trained with {algorithm} by [embodyrl](https://pypi.org/project/embodyrl/).

{results}

It acts with {control}, {hz:g} actions a second{chunk}.{needs}

## Use it

```sh
embodyrl pull {repo} my_policy
embodyrl eval my_policy
```

## Reproduce it

```sh
{command}
```

Commit `{commit}`, seed {seed}{hardware}. `config.yaml` holds every setting:
`embodyrl train config.yaml`.
"""


def push(path: str, repo: str, *, public: bool = False, endpoint: str | None = None) -> str:
    """Uploads a checkpoint in one commit, whole or not at all.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        repo: ``you/name``; made where it does not exist.
        public: whether a repository that is made can be seen by everybody.
        endpoint: of the hub; None is huggingface.co, or what ``HF_ENDPOINT`` says.

    Returns:
        The address of the commit.

    Raises:
        UserError: no such checkpoint, no disk, no network, or no right to write there.
    """
    api = _api(endpoint)
    found = checkpoint.find(path)
    with (
        tempfile.TemporaryDirectory(prefix="embodyrl-push-") as scratch,
        _explained(repo, "written to"),
    ):
        staged = Path(scratch)
        _stage(found, repo, staged)
        if not api.repo_exists(repo):
            api.create_repo(repo, private=not public)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=staged,
            commit_message=f"{found.name} of an embodyrl run",
            delete_patterns="*",
        )
    return commit.commit_url


def preview(path: str, repo: str, *, public: bool = False) -> str:
    """What ``push`` would upload: files with their sizes, and the model card.

    It needs no network and no login.

    Raises:
        UserError: no such checkpoint, no disk, or no name of a repository.
    """
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", repo):
        raise UserError(f"{repo!r} is no name of a repository: give OWNER/NAME.")
    with tempfile.TemporaryDirectory(prefix="embodyrl-push-") as scratch:
        staged = Path(scratch)
        _stage(checkpoint.find(path), repo, staged)
        files = {
            str(file.relative_to(staged)): file.stat().st_size
            for file in sorted(staged.rglob("*"))
            if file.is_file()
        }
        text = (staged / "README.md").read_text()
    kind = "public" if public else "private"
    lines = [f"{size:>13,} bytes  {name}" for name, size in files.items()]
    return "\n".join(
        [
            f"Would upload {len(files)} files, {sum(files.values()):,} bytes, to {repo} ({kind} if "
            "it is new). Other files that are there would be deleted.",
            *lines,
            "",
            "README.md:",
            "",
            text,
        ]
    )


def _stage(found: Path, repo: str, staged: Path) -> None:
    """Writes what is to be uploaded of a checkpoint into an empty folder."""
    states, meta = checkpoint.load_run(found, "config", "position")
    config = load_config(str(found))
    run = found.parent.parent
    checkpoint.save(staged / "checkpoints" / found.name, {"policy": states["policy"]}, meta)
    (staged / "config.yaml").write_text(to_yaml(config))
    evaluations = (
        _evaluations(run, meta["position"]["iteration"])
        if found.parent.name == "checkpoints"
        else {}
    )
    (staged / "evals").mkdir()
    for name, payload in evaluations.items():
        (staged / "evals" / f"{name}.json").write_text(json.dumps(payload))
    (staged / "README.md").write_text(
        card(repo, {**meta, "config": to_dict(config)}, evaluations, run)
    )


def pull(repo: str, folder: str | Path, *, revision: str = "", endpoint: str | None = None) -> Path:
    """Downloads what ``push`` uploaded, and checks every file by its hash.

    Args:
        repo: ``you/name``.
        folder: must not exist.
        revision: a branch, tag or commit.
        endpoint: see ``push``.

    Raises:
        UserError: no such repository, it is gated or holds no checkpoint, no network, no disk, or a
            damaged file. What was downloaded stays in a hidden folder, so that the same command
            goes on.
    """
    api = _api(endpoint)
    folder = Path(folder)
    if folder.exists():
        raise UserError(
            f"{folder} is there already. Give a new folder, so that two checkpoints do not mix."
        )
    require_writable(folder)
    scratch = folder.with_name(f".{folder.name}.pull")
    with _explained(repo, "downloaded"):
        info = api.model_info(repo, revision=revision or None, files_metadata=True)
        files = {s.rfilename: s.size or 0 for s in info.siblings or []}
        if not any(
            name.startswith("checkpoints/") and name.endswith(checkpoint.MANIFEST) for name in files
        ):
            raise UserError(
                f"{repo} holds no checkpoint of embodyrl. If it is one of LeRobot's, give its id "
                "as policy.pretrained."
            )
        for name in files:
            inside(scratch, name)
        scratch.mkdir(parents=True, exist_ok=True)
        needed = sum(files.values())
        free = shutil.disk_usage(scratch).free
        if needed > free:
            raise UserError(
                f"{repo} takes {needed / 1e9:.1f} GB, and {folder.parent} has {free / 1e9:.1f} "
                "left. Free some space."
            )
        api.snapshot_download(repo, revision=info.sha, local_dir=scratch)
    found = sorted((scratch / "checkpoints").iterdir())
    damage = checkpoint.damage(found[0]) if len(found) == 1 else f"{len(found)} checkpoints"
    if damage:
        shutil.rmtree(scratch)
        raise UserError(
            f"The checkpoint of {repo} did not arrive whole ({damage}). Try again, or push it anew."
        )
    try:
        load_config(str(found[0]))
        read_evaluations(scratch)
    except UserError:
        shutil.rmtree(scratch)
        raise
    shutil.rmtree(scratch / ".cache", ignore_errors=True)  # the download's own notes
    rename_folder(scratch, folder)
    return folder


def card(repo: str, meta: dict[str, Any], evaluations: dict[str, Any], run: Path) -> str:
    """The repository's README: what it is, what was measured, and the command that made it."""
    config = meta["config"]
    spec = meta["spec"]
    about = read_meta(run / "meta.json") if (run / "meta.json").exists() else {}
    reports_success = spec_from_json(spec).reports_success

    def score(episodes: list[dict[str, Any]]) -> str:
        if reports_success:
            counted = [bool(e["success"]) for e in episodes if not e.get("person")]
            return format_rate(sum(counted), len(counted))
        return format_return([e["return"] for e in episodes])

    rows = [
        f"| {name} | {e['env_steps']:,} | {e['minutes']:.1f} | {score(e['episodes'])} |"
        for name, e in evaluations.items()
    ]
    what = "success" if reports_success else "mean return"
    head = [
        f"| evaluation | env steps | minutes of training | {what}, 95% interval |",
        "| --- | --- | --- | --- |",
    ]
    name = config["run"]["eval_split"]
    split = f"Initial states of the split `{name}`, which it was never trained on:"
    base = config["policy"].get("pretrained")
    hardware = about.get("hardware", {})
    return CARD.format(
        title=repo.partition("/")[2] or repo,
        policy=config["policy"]["name"],
        env=spec["name"],
        algorithm=config["algorithm"]["name"],
        results="\n".join([split, "", *head, *rows])
        if rows
        else "No evaluation was saved with it.",
        control=spec["control_mode"],
        hz=spec["control_hz"],
        chunk=_chunk(evaluations),
        needs=f" Architecture and tokenizer come from `{base}`." if base else "",
        repo=repo,
        command=about.get("command") or "embodyrl train config.yaml",
        commit=about.get("commit") or "unknown",
        seed=config["run"]["seed"],
        hardware=f", {hardware.get('gpu') or hardware.get('cpu')}" if hardware else "",
    )


def _chunk(evaluations: dict[str, Any]) -> str:
    """How many of its planned actions were executed when it was evaluated, if that was saved."""
    last = next(reversed(evaluations.values()), {})
    if "execute" not in last:
        return ""
    return f", and executes {last['execute']} of {last['horizon']} before it looks again"


def _evaluations(run: Path, iteration: int) -> dict[str, Any]:
    """Those up to a checkpoint, oldest first, without their videos."""
    found = {}
    for name, payload in read_evaluations(run).items():
        if payload["iteration"] <= iteration:
            payload["episodes"] = [{**row, "video": None} for row in payload["episodes"]]
            found[name] = payload
    return found


def _api(endpoint: str | None) -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingDependencyError(
            "push and pull need huggingface_hub, which is not here: pip install 'embodyrl[hub]'."
        ) from error
    return HfApi(endpoint=endpoint, library_name="embodyrl")


@contextlib.contextmanager
def _explained(repo: str, done: str) -> Iterator[None]:
    """Turns what the Hugging Face library raises into a paragraph with the mend."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError as error:
        mend = (
            "it is gated: accept its licence on its page at huggingface.co, then `hf auth login` "
            "(or set HF_TOKEN)"
        )
        raise UserError(f"{repo} cannot be {done}: {mend}.") from error
    except (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
    ) as error:
        mend = (
            "there is no such repository or revision, or it is private: check the id, or "
            "`hf auth login`"
        )
        raise UserError(f"{repo} cannot be {done}: {mend}.") from error
    except (httpx.TransportError, ConnectionError, errors.LocalEntryNotFoundError) as error:
        mend = (
            "the Hugging Face hub cannot be reached. Check the network (and HF_HUB_OFFLINE), then "
            "try again"
        )
        raise UserError(f"{repo} cannot be {done}: {mend}; nothing is left half done.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        mend = (
            "`hf auth login` with a token that may write there"
            if status in (401, 403)
            else "try again later"
        )
        raise UserError(f"{repo} cannot be {done} (the hub said {status}): {mend}.") from error
    except OSError as error:
        text = explain_os_error(error)
        if text is None:
            raise
        raise UserError(f"{repo} cannot be {done}. {text}") from error
