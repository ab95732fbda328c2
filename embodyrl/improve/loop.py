"""Rounds of help: the policy works, a person helps, it learns, and the better policy is served.

    1. help     the policy plays episodes; a detector or the person sees that one fails; the person
                takes over, or has the arm go back first, and finishes it
    2. data     the logs become a data set in which every turn is an episode of its own
                (``logs.split_turns``); the data of all rounds are kept
    3. learn    from all of it (``improve.learn``)
    4. look     the served policy and the new one play the same initial states without help; the new
                one is served unless it solved fewer

HG-DAgger (arXiv:1810.02890) is this with corrections alone; RaC (arXiv:2509.07953) has the arm go
back first. Every stage leaves its result in the folder and is not repeated: the same command goes
on where it was killed, within an episode's time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodyrl.detectors.episodes import TooFewSuccessesError
from embodyrl.detectors.fit import fit_to_checkpoint
from embodyrl.detectors.folder import save_detector
from embodyrl.errors import UserError
from embodyrl.improve.config import MAY_CHANGE, ImproveConfig
from embodyrl.improve.data import DataSet, data_figures, nothing_to_learn, shares
from embodyrl.improve.learn import gate_said, learn, learner_config
from embodyrl.improve.play import Episodes, play_stage
from embodyrl.improve.record import Record, helped_figures, look_figures, rounds_table
from embodyrl.real_robot.logs.export import export_logs
from embodyrl.real_robot.record.episode_logs import logs_folder
from embodyrl.storage.folder_lock import locked
from embodyrl.storage.inputs import claim

STATES = 1000
"""Numbers of initial states that are set apart for each round."""


def run_rounds(config: ImproveConfig, *, command: str = "") -> dict[str, Any] | None:
    """Runs the rounds, or goes on with them.

    Returns:
        What ``improve.json`` then holds: ``rounds`` by name, and ``best``, the policy that is
        served; None where learning was interrupted.

    Raises:
        ArmFaultError: a fault of the arm, which has to be looked at.
        StoppedError: a person stopped the arm.
        UserError: the folder holds rounds with other settings, or something does not fit.
    """
    folder = Path(config.out)
    if (folder / "config.yaml").exists():
        raise UserError(
            f"{folder} is the folder of a training run, and rounds need one of their own: give "
            "another --out."
        )
    with locked(folder):
        _forget_refused(folder)
        claim(folder / "improve_config.json", config, ImproveConfig(), MAY_CHANGE, "rounds")
        record = Record(folder, config.policy)
        for number in range(config.rounds):
            name = f"round_{number}"
            if "look" in record.round(name):
                continue
            if not _one_round(config, record, folder / name, number, command):
                return None
            print(*rounds_table(record.content), sep="\n", flush=True)
        return record.content


def _forget_refused(folder: Path) -> None:
    """Lets a folder begin anew where nothing was played, as after a pre-flight check that failed."""
    if not any(folder.glob("round_*/*.logs/episode_*.mcap")):
        for name in ("improve_config.json", "improve.json"):
            (folder / name).unlink(missing_ok=True)


def _one_round(
    config: ImproveConfig, record: Record, folder: Path, number: int, command: str
) -> bool:
    """One round; False where its learning was interrupted."""
    name = folder.name
    served = record.content["best"]
    # 1. Help.
    if "helped" not in record.round(name):
        with record.stage(name, "help"):
            detector = _detector(config, record, folder, number, served)
            print(f"Round {number}: {served} plays, and is helped.", flush=True)
            first = config.seed * 100_000 + number * STATES
            inits = range(first, first + config.tries)
            rows = play_stage(config, Episodes(folder / "help", served, inits, True, detector))
        record.add(name, policy=served, detector=bool(detector), helped=helped_figures(rows))
    # 2. Data.
    if "data" not in record.round(name):
        with record.stage(name, "data"):
            data = folder / "data"
            if not data.exists():
                logs = logs_folder(folder / "help")
                export_logs(logs, data, keep_failures=True, turns=True)
        record.add(name, data=str(data), written=data_figures(data))
    # 3. Learn.
    with record.stage(name, "learn"):
        learned = _learn(config, record, folder, served, number, command)
    if learned is None:
        return False
    # 4. Look.
    with record.stage(name, "look"):
        first = config.seed * 100_000 + 50_000 + number * STATES
        inits = range(first, first + config.look)
        rows = [
            play_stage(config, Episodes(folder / f"look_{when}", policy, inits, False))
            for when, policy in (("before", served), ("after", learned))
            if learned != served
        ]
    look = look_figures(*(rows or ([], [])))
    gate = gate_said(learned) if learned != served else {}
    record.add(name, learned=learned, gate=gate, look=look)
    if look["keeps"]:
        record.serve(learned)
    return True


def _learn(
    config: ImproveConfig, record: Record, folder: Path, served: str, number: int, command: str
) -> str | None:
    """The run that has learned from all rounds so far; None where it was interrupted."""
    own = [DataSet(r["data"], r["written"]) for r in _rounds(record, number + 1)]
    demos = [DataSet(path, data_figures(path)) for path in config.demos]
    seed = config.seed + number
    plain = learner_config(served, config.method, config.learner, [], folder, seed)
    gate = getattr(plain.algorithm, "gate", "")
    if why := nothing_to_learn(config.method, [*demos, *own], gate):
        print(f"Round {number}: {why}, so {served} stays.", flush=True)
        return served
    data = (
        shares(demos, own) if config.method == "imitate" else [(d.path, 1.0) for d in demos + own]
    )
    run = learner_config(served, config.method, config.learner, data, folder, seed)
    return learn(run, served, command)


def _rounds(record: Record, count: int) -> list[dict[str, Any]]:
    """What the first rounds came to."""
    return [record.round(f"round_{k}") for k in range(count)]


def _detector(config: ImproveConfig, record: Record, folder: Path, number: int, served: str) -> str:
    """The folder of a detector for the served policy; empty where there is none."""
    if not config.detector:
        return ""
    out = folder / "detector"
    if out.exists():
        return str(out)
    # It learns what this policy does alone, where it succeeds.
    data = [str(path) for path in _looks(record, folder.parent, number, served)]
    if not data:
        print("No look at this policy yet, so no detector: the person watches by themselves.")
        return ""
    try:
        detector, _, _ = fit_to_checkpoint(
            served, data, config.detector, config.false_alarms, seed=config.seed
        )
    except TooFewSuccessesError as error:
        print(f"No detector in this round: {error} The person watches by themselves.")
        return ""
    save_detector(detector, out)
    return str(out)


def _looks(record: Record, folder: Path, number: int, served: str) -> list[Path]:
    """Data sets of all looks so far at the served policy."""
    found = []
    for k, about in enumerate(_rounds(record, number)):
        for which, policy in (("look_before", about["policy"]), ("look_after", about["learned"])):
            if policy != served or about["policy"] == about["learned"]:
                continue
            data = folder / f"round_{k}" / which
            if not data.exists():
                export_logs(logs_folder(data), data, keep_failures=True)
            found.append(data)
    return found
