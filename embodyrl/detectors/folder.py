"""A detector as a folder: ``detector.json`` beside ``detector.safetensors``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from embodyrl.detectors.detector import Band, Detector
from embodyrl.detectors.doubt import ModelDoubt
from embodyrl.detectors.features import FloatIndex, NearestFeatures
from embodyrl.detectors.signals import Signal, TimeTaken
from embodyrl.detectors.stac import Stac
from embodyrl.errors import UserError, did_you_mean
from embodyrl.policy import num_executed
from embodyrl.storage import checkpoint
from embodyrl.storage.atomic_files import replacing_folder, write_json
from embodyrl.storage.paths import fingerprint, require_readable
from embodyrl.storage.plain_data import COUNT, NUMBER, TEXT, first_line, read_json

FILE = "detector.json"
TENSORS = "detector.safetensors"
KINDS: dict[str, type[Signal]] = {
    signal.kind: signal for signal in (FloatIndex, NearestFeatures, Stac, TimeTaken, ModelDoubt)
}
STRUCTURE = {
    "kind": TEXT,
    "threshold": NUMBER,
    "false_alarms": NUMBER,
    "every": COUNT,
    "fitted": COUNT,
    "calibrated": COUNT,
    "policy": TEXT,
    "fingerprint": TEXT,
    "dream": TEXT,
}
REMEDY = "Fit it again: `embodyrl detector fit`."


def make_signal(kind: str, dream: str = "", device: Any = "cpu") -> Signal:
    """A signal that is not fitted yet.

    Args:
        kind: one of ``KINDS``.
        dream: folder of the world model, for the kind ``doubt``.
        device: of that model.

    Raises:
        UserError: no such kind, or a world model that is missing or that nothing reads.
    """
    if kind not in KINDS:
        raise UserError(f"There is no kind of detector {kind!r}. {did_you_mean(kind, KINDS)}")
    if kind == ModelDoubt.kind:
        return ModelDoubt(dream, device)
    if dream:
        raise UserError(f"A detector of the kind {kind} dreams of nothing. Leave --dream out.")
    return KINDS[kind]()


def save_detector(detector: Detector, path: str | Path) -> Path:
    """Writes a detector; the folder may be new, empty, or hold a detector already.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()) and not (folder / FILE).exists():
        raise UserError(
            f"{folder} holds something other than a detector. Choose another folder with --out."
        )
    # What was learned, and the settings beside it.
    tensors = {f"signal.{name}": x.contiguous() for name, x in detector.signal.tensors().items()}
    tensors |= {"band.mean": detector.band.mean, "band.std": detector.band.std}
    about = {name: getattr(detector, name) for name in STRUCTURE if hasattr(detector, name)}
    about |= {"kind": detector.signal.kind, "dream": getattr(detector.signal, "dream", "")}
    with replacing_folder(folder) as scratch:
        save_file(tensors, scratch / TENSORS)
        write_json(scratch / FILE, about)
    return folder


def load_detector(path: str | Path, device: Any = "cpu") -> Detector:
    """Reads a detector.

    Args:
        path: its folder.
        device: of the world model, if it has one.

    Raises:
        UserError: no detector there, or a damaged one.
    """
    folder = Path(path)
    if not (folder / FILE).exists():
        raise UserError(
            f"{folder} holds no detector (there is no {FILE}). `embodyrl detector fit` makes one."
        )
    # The settings, then what was learned. Either may come from elsewhere.
    about = read_json(folder / FILE, STRUCTURE, REMEDY)
    signal = make_signal(about.pop("kind"), about.pop("dream"), device)
    require_readable(folder / TENSORS)
    try:
        tensors = load_file(folder / TENSORS)
        band = Band(tensors.pop("band.mean"), tensors.pop("band.std"))
        signal.load({name.removeprefix("signal."): x for name, x in tensors.items()})
        if band.mean.ndim != 1 or band.mean.shape != band.std.shape or not len(band.mean):
            raise ValueError(f"the band has the shape {tuple(band.mean.shape)}")
        if not all(bool(x.isfinite().all()) for x in [band.mean, band.std, *tensors.values()]):
            raise ValueError("a number is not finite")
        if about["every"] < 1 or float(band.std.min()) <= 0.0:
            raise ValueError("a length or a spread is not above 0")
    except (LookupError, OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{folder / TENSORS} is damaged ({first_line(error)}). {REMEDY}") from error
    return Detector(signal, band, **about)


def check_detector(detector: Detector, path: str | Path, policy: Any, run: str) -> None:
    """Refuses a detector that was fitted to another policy.

    Args:
        detector: that was loaded.
        path: its folder.
        policy: that it shall watch.
        run: the policy's checkpoint, or a run's folder.

    Raises:
        UserError: the checkpoints differ, or the policy executes another number of actions.
    """
    if fingerprint(checkpoint.find(run)) != detector.fingerprint:
        raise UserError(
            f"The detector in {path} was fitted to {detector.policy}, and {run} is another "
            "checkpoint, whose successes look different to it. Fit one to this checkpoint: "
            "`embodyrl detector fit`."
        )
    if (executed := num_executed(policy.config)) != detector.every:
        raise UserError(
            f"The detector in {path} looks every {detector.every} actions, and the policy executes "
            f"{executed}. Leave policy.execute as it was when the detector was fitted."
        )
    detector.signal.check(policy)
