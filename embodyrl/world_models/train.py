"""``train_world``: trains a world model from recorded episodes.

    1. codec: autoencoding of single frames; then every frame's latent is computed once. With
       ``frames=false`` there are stages 2 and 3 of the state alone.
    2. finder, if they do not hold the simulator's state: where solved episodes led, seen in
       pictures. The places that it finds are their state.
    3. state model: what one action does to the state; and inverse dynamics: which actions lead from
       one picture to another.
    4. dynamics and success head: from a moment and 1 to H actions to the moment after them, in
       latents. In the last part of training the start is a moment that the model imagined itself,
       over up to ``max_unroll`` chunks (pushforward, arXiv:2202.03376). So the model learns to
       continue from its own mistakes, and the success head what success looks like in dreams.
    5. calibration: the success threshold, from dreams that replay the actions of held-out
       episodes.

The prediction is deterministic by default. In a world without hidden chance this is far better
than a flow from scratch at the same cost, and it does not hallucinate success
(docs/world_models.md).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodyrl.devices import use_device
from embodyrl.errors import UserError
from embodyrl.interrupt import Interrupt, Interrupted
from embodyrl.ranges import check_config
from embodyrl.storage.atomic_files import remove_unfinished, write_json
from embodyrl.storage.folder_lock import locked
from embodyrl.storage.inputs import contents_of, listed, sort_changes
from embodyrl.storage.paths import require_writable, settings_of
from embodyrl.storage.plain_data import ANYTHING, read_json
from embodyrl.storage.provenance import describe_run, finish_run
from embodyrl.storage.run_files import read_meta
from embodyrl.world_models.calibrate import (
    calibrate_success_head,
    disagreement_limit,
    fit_action_error_limit,
    spread_limit,
)
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.colour_jitter import jitter_colours
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.faithful import faithful_in_words, score_discriminator
from embodyrl.world_models.found_state import frames_on_the_way, require_moving_pictures
from embodyrl.world_models.init import build_model, continue_model, what_state
from embodyrl.world_models.keyframes import add_keyframes
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.trainer import WorldTrainer


def train_world(config: WorldTrainConfig, *, command: str = "") -> Path | None:
    """Trains a world model, or continues an interrupted run.

    Returns:
        The model's folder, or None when it was interrupted.

    Raises:
        UserError: unusable data, or the folder holds a run with other settings, or another process
            is working in it.
    """
    check_config("world", config)
    folder = Path(config.out)
    require_writable(folder, "out=FOLDER")
    _check_folder(folder, config)
    if _is_finished(folder / "model"):
        # A kill after the model was saved left only this to do.
        meta = folder / "meta.json"
        if meta.exists() and read_meta(meta).get("finished") is None:
            with locked(folder):
                remove_unfinished(folder)
                finish_run(meta)
        return folder / "model"
    device = use_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    # The data, and which of them are kept from training.
    clips = Clips.load(config.data, weights=config.weights)
    held_out = clips.held_out(config.held_out)
    _check_both_outcomes(clips, clips.starts[held_out[clips.starts]])
    rows = (~held_out).nonzero().flatten()
    rows = rows.repeat_interleave(clips.weight[rows])
    # The model: fresh, or the one of ``init``.
    reads_state, finds_state = what_state(config, clips)
    if config.frames is False and not (reads_state or finds_state):
        raise UserError(
            "A model without frames (frames=false) is a state model, but found=false and data without "
            "the simulator's state leave no state to learn: leave found=false out."
        )
    config_for_model = dataclasses.replace(config, state=reads_state, found=finds_state)
    if finds_state:
        clips.privileged = None  # what a simulator may have recorded is not read
        frames_on_the_way(clips, rows)  # refuses data before any time is spent
    elif config_for_model.frames is not False:
        require_moving_pictures(clips, rows)
    if config_for_model.state and not clips.spec.layout:
        print(
            "The data do not say which numbers of the simulator's state are objects "
            "(EnvSpec.layout), so this model cannot learn that objects rest, and its dreams are "
            "worse. MuJoCo, ManiSkill and LIBERO say it: collect the data again."
        )
    if config.init:
        model = continue_model(config_for_model, clips)
    else:
        model = build_model(config_for_model, clips, rows)
    model.to(device)
    with locked(folder):
        remove_unfinished(folder)
        write_json(folder / "config.json", dataclasses.asdict(config))
        describe_run(
            folder / "meta.json",
            command=command,
            seed=config.seed,
            device=device,
            inputs=contents_of(config),
        )
        # The same episodes in other lights are further frames to learn from.
        jittered = jitter_colours(clips, config.styles, config.seed) if config.styles else clips
        rows = torch.cat([rows + copy * len(clips) for copy in range(config.styles + 1)])
        try:
            with Interrupt() as interrupt:
                WorldTrainer(config, folder, model, jittered, rows, interrupt.check).run()
        except Interrupted:
            print("Stopped. The same command continues from here.")
            return None
        assert jittered.latents is not None
        clips.latents = jittered.latents[: len(clips)]
        if jittered.privileged is not None:
            clips.privileged = jittered.privileged[: len(clips)]
        finish_model(config, folder, model, clips, held_out)
        finish_run(folder / "meta.json")
    return folder / "model"


def finish_model(
    config: WorldTrainConfig, folder: Path, model: WorldModel, clips: Clips, held_out: Tensor
) -> None:
    """Fits what a trained model takes from held-out episodes, and saves it.

    These are the limits beyond which a dream is in doubt, the keyframes that dreams start from,
    and the success threshold.

    Raises:
        UserError: no threshold keeps ``max_false_positives``; the model is saved all the same, and
            calls nothing solved.
    """
    model.eval()
    starts = clips.starts[held_out[clips.starts]]
    # The limits of doubt.
    if model.stochastic:
        model.max_disagreement = disagreement_limit(model, clips, starts, config.seed)
    if model.state is not None and len(model.state.members) > 1:
        model.max_spread = spread_limit(model, clips, starts)
    if not model.imagines_frames:
        # No dream begins or ends in it: it ranks what a policy proposes.
        model.sentences = clips.sentences
        model.save(folder / "model")
        return
    model.max_action_error = fit_action_error_limit(model, clips, starts)
    # What tells the networks of the state model apart.
    faithful: dict[str, Any] = {}
    if model.discriminator is not None:
        rows = (held_out & (torch.arange(len(clips)) + 1 < clips.end)).nonzero().flatten()
        faithful["faithful"] = score_discriminator(model, clips, rows)
        print(faithful_in_words(faithful["faithful"]))
    # Where dreams start.
    add_keyframes(model, clips, held_out, config.seed)
    # When a dream is solved.
    try:
        model.calibration, report = calibrate_success_head(
            model, clips, starts, config.max_false_positives
        )
    except UserError as error:
        model.calibration = Calibration(threshold=1.0)
        model.save(folder / "model")
        raise UserError(
            f"{folder / 'model'} is trained, but its success head is of no use, and will call "
            f"nothing solved: {error} Or allow more with max_false_positives: the same command "
            "then fits the threshold again. Or let a reflector judge the frames: "
            "env.reflector=FOLDER."
        ) from error
    write_json(folder / "held_out.json", report | faithful)
    model.save(folder / "model")


def _is_finished(folder: Path) -> bool:
    """Whether a model is there whose success head could be calibrated."""
    if not (folder / "world.json").exists():
        return False
    return WorldModel.read_meta(folder)["calibration"]["threshold"] < 1.0


def _check_both_outcomes(clips: Clips, starts: Tensor) -> None:
    """Refuses data whose held-out episodes all end alike, before any time is spent on training."""
    solved = sum(bool(clips.solved[a : clips.end[a]].any()) for a in starts.tolist())
    if solved in (0, len(starts)):
        raise UserError(
            f"Of {len(starts)} held-out episodes {solved} are solved, but the success head learns "
            "from episodes that were solved and episodes that were not. Collect more, with "
            "--keep-failures, and with --past-success 5, which records what a solved task looks "
            "like."
        )


def _check_folder(folder: Path, config: WorldTrainConfig) -> None:
    """Refuses a folder that holds a run with other settings."""
    path = folder / "config.json"
    if not path.exists():
        return
    old = read_json(path, {...: ANYTHING}, "Bring back a copy of it, or give another out=FOLDER.")
    new = json.loads(json.dumps(dataclasses.asdict(config)))
    free = settings_of(config, "machine") | {"checkpoint_every", "out", "max_false_positives"}
    meta = folder / "meta.json"
    allowed, refused = sort_changes(
        {key: old.get(key, new[key]) for key in new},
        new,
        free=free,
        was=read_meta(meta).get("inputs", {}) if meta.exists() else {},
        now=contents_of(config),
    )
    if refused:
        raise UserError(
            f"{folder} holds a world model with other settings ({listed(refused)}), and these "
            "change its results. Give the old ones to go on; or give this one its own out=FOLDER, "
            f"where init={folder / 'model'} begins with a model that is trained."
        )
    if own := [text for text in allowed if not text.startswith("out ")]:
        print(f"{folder} goes on; changed: {listed(own)}.")
