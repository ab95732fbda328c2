"""The command line as a user meets it: real processes, their output and their exit status."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embodyrl import registry
from embodyrl.cli import doctor
from embodyrl.cli import main as cli_main
from embodyrl.cli.bench import tree_memory_mib
from embodyrl.cli.main import build_parser, main
from embodyrl.config import compose

ROOT = Path(__file__).parents[2]
VERBS = (
    "quickstart",
    "list",
    "doctor",
    "collect",
    "data",
    "train",
    "eval",
    "report",
    "bench",
    "serve",
    "deploy",
    "export",
)
VERBS += (
    "twin",
    "record",
    "improve",
    "detector",
    "act",
    "operator",
    "world",
    "push",
    "pull",
    "sweep",
    "mixture",
    "judge",
    "compare",
    "config",
    "completion",
)
PRESET = """# A preset of the tests: states only, so that nothing is drawn.
env: {name: mujoco, task: reach, renderer: none, cameras: [], num_envs: 2}
policy: {name: flow_vla}
algorithm: {name: ppo}
"""


def embodyrl(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "embodyrl.cli", *(str(a) for a in arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "120"},
    )  # fmt: skip


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a refused command says; it must be one paragraph and come with status 1."""
    assert main([str(a) for a in arguments]) == 1
    out, err = capsys.readouterr()
    assert (
        err.startswith("embodyrl: ") and err.count("\n") == 1 and err.rstrip().endswith((".", "?"))
    ), err
    assert "Traceback" not in out + err
    return err


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(PRESET)
    return path


def test_help_takes_half_a_second_and_imports_nothing_heavy() -> None:
    def seconds(*command: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, *command], cwd=ROOT, capture_output=True, check=True, timeout=60
            )
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    # Beside an interpreter that does nothing at all, so that a busy machine fails nobody.
    bare, ours = seconds("-c", "pass"), seconds("-m", "embodyrl.cli", "--help")
    assert ours < max(0.5, 6 * bare)
    code = (
        "import sys, embodyrl.cli.main as c; c.build_parser(); "
        "print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verbs_help_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    examples = [
        line
        for line in text.split("examples:")[1].splitlines()
        if line.strip().startswith("embodyrl ")
    ]
    assert examples and all(line.split()[1] == verb for line in examples)
    for line in examples:  # each of them is a command that the parser takes
        words = line.strip().split("  ")[0].split()[1:]
        arguments, rest = build_parser().parse_known_args(words)
        assert arguments.command == verb and all("=" in word for word in rest), line


def test_the_verbs_are_the_ones_tested_here() -> None:
    [action] = [a for a in build_parser()._actions if a.dest == "command"]
    assert set(action.choices or ()) == set(VERBS)


def test_no_arguments_print_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "quickstart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("trian", "x"), ["There is no command 'trian'", "'train'"]),
        (("train",), ["required: preset", "embodyrl train --help"]),
        (
            ("train", "mujoco_pick_pp", "--dry-run"),
            ["no preset 'mujoco_pick_pp'", "'mujoco_pick_ppo'"],
        ),
        (("train", "mujoco_pick_ppo", "--dryrun"), ["no option '--dryrun'", "'--dry-run'"]),
        (
            ("train", "mujoco_pick_ppo", "--dry-run", "stray"),
            ["'stray' is not an override", "key.sub=value"],
        ),
        (("train", "mujoco_pick_ppo", "runs.seed=1"), ["no section 'runs'", "'run'"]),
        (("train", "mujoco_pick_ppo", "run.sede=1"), ["run has no key 'sede'", "'seed'"]),
        (("train", "mujoco_pick_ppo", "run.seed=one"), ["run.seed", "'one'"]),
        (("train", "mujoco_pick_ppo", "env.name=mujocco"), ["no env 'mujocco'", "'mujoco'"]),
        (("train", "mujoco_pick_ppo", "algorithm.name=ppoo"), ["no algorithm 'ppoo'", "'ppo'"]),
        (
            ("train", "mujoco_pick_ppo", "policy.name=flow_vl"),
            ["no policy 'flow_vl'", "'flow_vla'"],
        ),
        (("bench", "mujco"), ["no env or preset 'mujco'", "'mujoco'"]),
        (("bench", "mujoco", "env.renderer=none", "env.task=pikc"), ["'pikc'", "'pick'"]),
        (
            ("bench", "mujoco", "env.split=ood_colur", "env.renderer=none"),
            ["'ood_colur'", "'ood_colour'"],
        ),
        (("bench", "mujoco", "seed=1"), ["'seed' is not a key of the env section"]),
        (
            ("bench", "mujoco", "env.renderer=none", "--repeats", "0"),
            ["--repeats must be 1 or more"],
        ),
        (
            ("bench", "--num-envs", "1,2"),
            ["--num-envs needs an environment", "bench mujoco --num-envs"],
        ),
        (("bench", "mujoco", "--num-envs", "1-8"), ["numbers with commas", "'1-8'"]),
        (
            ("bench", "mujoco", "--repeats", "two"),
            ["invalid int value: 'two'", "embodyrl bench --help"],
        ),
        (("deploy", "run", "--latency", "nan"), ["--latency is nan", "finite number"]),
        (("deploy", "run", "--home", "0", "inf", "0"), ["--home is [0.0, inf, 0.0]"]),
        (("improve", "run", "--seconds", "inf"), ["--seconds is inf"]),
        (("deploy", "run", "--operator", "http://x"), ["prints. `embodyrl deploy --help`"]),
        (("list", "task"), ["'task'", "'tasks'"]),
        (("list", "tasks", "libro"), ["no env 'libro'", "'libero'"]),
        (("eval", "runs/nowhere"), ["runs/nowhere"]),
        (("world", "trian"), ["There is no command 'trian'", "'train'"]),
        (("world", "train", "dta=[x]"), ["world has no key 'dta'", "'data'"]),
        (("world", "train", "steps=0", "data=[x]"), ["steps is 0"]),
        (("world", "train", "out=x"), ["data=[FOLDER, ...]"]),
        (
            ("world", "eval", "nowhere", "--data", "x"),
            ["nowhere holds no world model", "embodyrl world train"],
        ),
        (("bench", "world_model"), ["env.model is empty"]),
    ],
)
def test_mistakes_are_told_in_one_paragraph(
    arguments: tuple[str, ...], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, *arguments)
    for name in names:
        assert name in said, said


def test_a_mistake_in_a_real_process(tmp_path: Path) -> None:
    done = embodyrl("train", "mujoco_pick_pp", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "'mujoco_pick_ppo'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_what_composes_to_the_same_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["run.seed=7", "algorithm.lr=3e-5", "run.loggers=[tensorboard]", "env.num_envs=3"]
    for name in ("mujoco_pick_ppo", "gymnasium_sac_flow"):
        given = [*overrides, "run.init_checkpoint="]
        assert main(["train", name, *given, "--dry-run"]) == 0
        copy = tmp_path / f"{name}.yaml"
        copy.write_text(capsys.readouterr().out)
        assert compose(str(copy)) == compose(name, given)
        assert compose(str(copy)).run.loggers == ("tensorboard",)
    assert not (tmp_path / "runs").exists()


def test_overrides_may_follow_options(preset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(preset), "run.seed=1", "--dry-run", "run.iterations=2"]) == 0
    text = capsys.readouterr().out
    assert "seed: 1" in text and "iterations: 2" in text


def test_list_names_everything() -> None:
    done = embodyrl("list", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"envs", "tasks", "policies", "algorithms", "presets", "loops"}
    for kind in ("envs", "policies", "algorithms"):
        assert {row["name"] for row in found[kind]} == set(registry.names(kind))
        assert all(row["summary"] or row.get("mend") for row in found[kind])
    for kind, names in (
        ("presets", registry.preset_names()),
        ("loops", registry.preset_names("loops")),
    ):
        assert {row["name"] for row in found[kind]} == set(names) and len(names) > 3
        assert all(row["summary"] for row in found[kind])
    assert (
        "mujoco_pick" in registry.preset_names("loops")
        and "mujoco_pick" not in registry.preset_names()
    )
    pick = next(row for row in found["tasks"] if (row["env"], row["name"]) == ("mujoco", "pick"))
    assert (
        pick["available"]
        and pick["select"] == "env.task=pick"
        and "<colour> block" in pick["instruction"]
    )
    assert {row["env"] for row in found["tasks"]} == set(registry.names("envs"))
    assert all(row["available"] or row["mend"] for row in found["tasks"])
    mujoco = next(row for row in found["envs"] if row["name"] == "mujoco")
    assert {"train", "eval", "ood_camera"} <= set(mujoco["splits"]) and mujoco["tasks"] == 6


def test_list_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "tasks", "mujoco"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("env.task=stack" in line and "yes" in line for line in lines)
    assert main(["list", "presets"]) == 0
    assert "mujoco_pick_ppo" in capsys.readouterr().out


def test_list_needs_no_torch() -> None:
    code = "import sys; from embodyrl.cli.main import main; main(['list']); "
    code += "print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.stderr.strip().splitlines()[-1] == "False"


def test_a_reader_that_stops_is_no_error() -> None:
    for arguments in ("list tasks libero --json", "list presets"):
        command = f"{sys.executable} -m embodyrl.cli {arguments} | true; echo $?"
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        assert done.stdout.strip() == "0" and done.stderr == ""


def test_doctor_tries_everything() -> None:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = embodyrl("doctor", "--json")
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    findings = json.loads(done.stdout)
    assert done.returncode == int(any(not f["ok"] and not f["optional"] for f in findings))
    assert all(set(f) == {"name", "ok", "optional", "found", "mend"} for f in findings)
    assert all(f["found"] and bool(f["mend"]) != f["ok"] for f in findings)
    by_name = {f["name"]: f for f in findings}
    # These tests could not run without them.
    for name in (
        "Python",
        "PyTorch",
        "physics: MuJoCo",
        "base packages",
        "extra: dev",
        "disk",
        "runs folder",
    ):
        assert by_name[name]["ok"], by_name[name]
    assert {p.name for p in doctor.PROBES.values()} <= set(by_name)
    # Processor time, which a busy machine does not stretch as it does the time on the wall.
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 20 and wall < 20 + 8 * spent


def test_doctor_tells_a_hung_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEADLINE", 0.01)
    finding = doctor._run_probe("torch")
    assert (
        not finding["ok"]
        and "no answer within" in finding["found"]
        and "pip install" in finding["mend"]
    )


def test_doctor_tells_a_driver_that_is_not_there() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MUJOCO_GL": "nonsense"}
    done = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli.probes", "egl"],
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
    )
    assert done.returncode == 1 and "nonsense" in done.stderr and "Traceback" not in done.stderr


def test_doctor_tells_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a file in the way stops even an administrator
    finding = next(
        f for f in doctor._machine(tmp_path / "file" / "runs") if f["name"] == "runs folder"
    )
    assert not finding["ok"] and str(tmp_path) in finding["mend"]


def test_doctor_prints_the_mend(capsys: pytest.CaptureFixture[str]) -> None:
    bad = {
        "name": "PyTorch",
        "ok": False,
        "optional": False,
        "found": "No module named 'torch'",
        "mend": "pip install x",
    }
    good = {"name": "memory", "ok": True, "optional": True, "found": "8 GiB [of 9]", "mend": ""}
    doctor.print_findings([bad, good])
    text = capsys.readouterr().out
    assert "pip install x" in text and "Not ready: PyTorch" in text and "[of 9]" in text
    doctor.print_findings([good])
    assert "Ready" in capsys.readouterr().out


def test_bench_measures_valid_steps(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "mujoco",
        "env.task=reach",
        "env.renderer=none",
        "env.cameras=[]",
        "env.num_envs=2",
    ]
    assert main([*command, "--chunk", "10", "--chunks", "6", "--repeats", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rate = result["env_steps_per_s"]
    assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    # 25 steps to an episode and 10 to a chunk: 10 + 10 + 5, then a reset; six chunks are two
    # episodes of each env.
    assert result["episodes"] == 2 * 2 * 2 and result["faults"] == 0
    assert result["frames_per_s"]["max"] == 0 and result["spec"]["name"].startswith("mujoco")
    assert result["versions"]["mujoco"] and result["hardware"]["cores"]
    assert result["memory_mib"] is None or result["memory_mib"] > 50
    assert (
        main([*command, "--num-envs", "2,1", "--chunk", "10", "--chunks", "1", "--repeats", "1"])
        == 0
    )
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[1:3]] == [
        ["mujoco/reach", "1"],
        ["mujoco/reach", "2"],
    ]
    assert "chunks of 10" in shown[3]


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="Linux alone tells a process tree's memory"
)
def test_memory_counts_children() -> None:
    before = tree_memory_mib()
    code = "x = bytearray(b'x') * (200 << 20); print('here', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = tree_memory_mib()
        child.communicate(b"\n")
    assert before is not None and during is not None
    assert 180 < during - before < 300


def test_ctrl_c_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_main, "_doctor", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\nembodyrl: stopped.\n"


@pytest.mark.parametrize("option", [("--video", "films"), ("--attempts", "3")])
def test_a_table_of_splits_refuses_what_it_would_not_show(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "nowhere", "--ood", *option]) == 1
    assert "--ood takes neither --video nor --attempts" in capsys.readouterr().err
