"""The home folder in paths, hub ids, fingerprints, and what is said of files that cannot be read or written."""

import argparse
import os
import tempfile
from pathlib import Path

import pytest
from bound_by_rights import run

from embodyrl.cli.main import _parse
from embodyrl.config import compose
from embodyrl.errors import UserError
from embodyrl.registry import preset_names
from embodyrl.storage import cache_folders
from embodyrl.storage.paths import (
    FileAccessError,
    expand_home,
    fingerprint,
    is_hub_id,
    require_readable,
    require_writable,
)
from embodyrl.storage.plain_data import read_json, read_yaml


@pytest.fixture
def home(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path))
    return str(tmp_path)


def test_a_tilde_is_the_home_folder_at_the_start_of_a_text_alone(home):
    assert expand_home("~/out") == f"{home}/out" and expand_home("~") == home
    assert expand_home("~root/x") == f"{os.path.expanduser('~root')}/x"
    for text in ("a~/b", "./~/b", "~5 cm", "", "x=~/y"):
        assert expand_home(text) == text
    nested = {"a": ["~/x", 1, ("~/y",)], "b": None}
    assert expand_home(nested) == {"a": [f"{home}/x", 1, (f"{home}/y",)], "b": None}
    with pytest.raises(UserError, match=r"the user 'nobodyhere', and there is no such user"):
        expand_home("~nobodyhere/x")


COMMANDS = [
    "train ~/p.yaml --token-file ~/p",
    "eval ~/p --base ~/p",
    "report ~/p ~/p --out ~/p",
    "export ~/p ~/p",
    "push ~/p me/name",
    "pull me/name ~/p",
    "quickstart --out ~/p",
    "bench ~/p.yaml",
    "collect ~/p.yaml --policy ~/p --replay ~/p --out ~/p",
    "data verify ~/p --out ~/p",
    "world eval ~/p --data ~/p ~/p --policies ~/p ~/p --reflector ~/p --pictures ~/p",
    "world play ~/p --reflector ~/p",
    "world loop ~/p.yaml",
    "world reflect train ~/p --out ~/p",
    "serve ~/p --token-file ~/p --reflector ~/p",
    "deploy ~/p --robot-file ~/p --token-file ~/p --out ~/p --hand ~/p",
    "act ws://127.0.0.1:1 --token-file ~/p",
    "twin ~/p",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_path_of_a_command_may_begin_with_it(command, home):
    given = command.split()
    arguments = vars(_parse(given))
    texts = [t for v in arguments.values() for t in (v if isinstance(v, list | tuple) else [v])]
    found = [text for text in texts if isinstance(text, str) and text.startswith(f"{home}/p")]
    assert len(found) == sum(word.startswith("~") for word in given)
    assert not [text for text in texts if isinstance(text, str) and text.startswith("~")]


def test_every_path_of_a_config_may_begin_with_it(home):
    overrides = [
        "run.out=~/runs",
        "data.path=~/d",
        "data.more=[~/e,~/f]",
        "data.codec=~/w",
        "data.cameras={front: ~/g}",
    ]
    config = compose("mujoco_pick_sft", overrides)
    assert config.run.folder == Path(home) / "runs" / "mujoco_pick_sft"
    assert config.data.path == f"{home}/d" and config.data.more == (f"{home}/e", f"{home}/f")
    assert config.data.codec == f"{home}/w" and config.data.cameras == {"front": f"{home}/g"}
    assert compose("mujoco_pick_sft", ["run.out=~"]).run.out == home
    robot = compose("robot_pick_rlpd", ["env.robot_file=~/a.yaml", "env.log=~/l"])
    assert (robot.env.robot_file, robot.env.log) == (f"{home}/a.yaml", f"{home}/l")
    # A file, and the presets that it names.
    Path(home, "base.yaml").write_text("base: mujoco_pick_sft\nrun: {out: ~/o}\n")
    Path(home, "own.yaml").write_text("base: ~/base.yaml\nrun: {name: a}\n")
    assert compose("~/own.yaml").run.folder == Path(home) / "o" / "a"


def test_what_lies_in_a_folder_of_this_machine_is_no_id_on_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("lerobot/pusht") and is_hub_id("me/my.set-1")
    (tmp_path / "lerobot").mkdir()
    others = ("lerobot/pusht", "data/pick", "runs/pick", "./a/b", "/a/b", "~/a", "a", "a/b/c", "a/")
    assert not any(map(is_hub_id, others))


def test_presets_keep_their_files_in_folders_that_are_no_owners_on_a_hub():
    for name in preset_names():
        config = compose(name)
        for path in (config.data.path, config.run.init_checkpoint):
            assert not path or not is_hub_id(path), (name, path)


def test_a_fingerprint_depends_on_names_and_content(tmp_path):
    first = tmp_path / "a"
    (first / "x").mkdir(parents=True)
    (first / "x" / "1").write_bytes(bytes(200_000))
    whole = fingerprint(first)
    assert whole == fingerprint(first.rename(tmp_path / "b")) and fingerprint(first) is None
    seen = {whole}
    for change in (
        lambda f: (f / "x" / "2").touch(),
        lambda f: (f / "x" / "2").rename(f / "x" / "3"),
        lambda f: (f / "x" / "1").write_bytes(bytes(199_999) + b"x"),
        lambda f: (f / "x" / "1").write_bytes(b"x" + bytes(199_999)),
        lambda f: (f / "x" / "1").write_bytes(bytes(200_001)),
    ):
        change(tmp_path / "b")
        seen.add(fingerprint(tmp_path / "b"))
    assert len(seen) == 6
    (tmp_path / "b" / ".cache").mkdir()
    (tmp_path / "b" / ".cache" / "x").touch()
    assert fingerprint(tmp_path / "b") in seen


def test_what_may_not_be_read_or_written_is_said_in_words(tmp_path):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "fixed").mkdir(mode=0o555)
    (tmp_path / "secret").touch(mode=0)

    def reads() -> int:
        for path in (tmp_path / "secret", tmp_path / "closed", tmp_path / "closed" / "a" / "b"):
            with pytest.raises(FileAccessError, match=f"no permission to read {path}.*Nothing is"):
                require_readable(path)
        for path in (tmp_path / "file", tmp_path / "none", tmp_path / "none" / "a"):
            require_readable(path)
        for read in (read_yaml, lambda path: read_json(path, {}, "Buy another.")):
            with pytest.raises(FileAccessError, match="no permission to read") as refusal:
                read(tmp_path / "secret")
            assert "damaged" not in str(refusal.value)
        return 0

    def writes() -> int:
        for path in (tmp_path / "fixed", tmp_path / "fixed" / "a" / "b"):
            words = rf"write into {tmp_path / 'fixed'}\b.*choose another folder \(out=X\)"
            with pytest.raises(FileAccessError, match=words):
                require_writable(path, "out=X")
        for path in (tmp_path / "file" / "a", tmp_path / "file" / "a" / "b"):
            with pytest.raises(FileAccessError, match=rf"{tmp_path / 'file'} is a file, where"):
                require_writable(path)
        for path in (tmp_path / "file", tmp_path / "new" / "folder"):
            require_writable(path)
        return 0

    for number, work in enumerate((reads, writes)):
        status, text = run(work, tmp_path / f"said{number}")
        assert status == 0, text
    assert not (tmp_path / "new").exists()
    (tmp_path / "closed").chmod(0o700)


def test_no_file_can_be_made_in_a_folder_that_the_system_makes_up():
    words = r"No file can be made in /proc\b.*Choose another folder \(--out FOLDER\)"
    with pytest.raises(FileAccessError, match=words):
        require_writable("/proc/none/a", "--out FOLDER")


def test_caches_go_elsewhere_where_the_home_may_not_be_written(tmp_path):
    (tmp_path / "home").mkdir(mode=0o555)
    (tmp_path / "tmp").mkdir()
    environ = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}

    def choose() -> int:
        os.environ.pop(cache_folders.CACHE, None)
        tempfile.tempdir = None
        for _ in range(2):  # the second time it can be written
            cache_folders.choose_cache_folders()
        assert Path(os.environ[cache_folders.CACHE]).parent == tmp_path / "tmp"
        return 0

    status, text = run(choose, tmp_path / "said", environ=environ)
    assert status == 0 and text.count("cannot be written, so compiled kernels") == 1, text


def test_arguments_that_are_no_texts_stay():
    arguments = argparse.Namespace(a=1, b=None, c=["x"], run=print)
    from embodyrl.storage.paths import expand_paths

    expand_paths(arguments)
    assert vars(arguments) == {"a": 1, "b": None, "c": ["x"], "run": print}
