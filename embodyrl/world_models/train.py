"""Trains a world model from recorded episodes: the codec, then the dynamics and the success head together.

    1. codec: autoencoding of single frames; then every frame's latent is computed once.
    2. where the data hold it, the state model: what one action does to the simulator's state.
    3. dynamics: from a moment and 1 to H actions to the moment after them, in latents. In the last
       part of training the moment is one that the model imagined itself over up to ``max_unroll``
       chunks (pushforward, arXiv:2202.03376): it learns to go on from its own mistakes, and the
           head what solved looks like in dreams.
    4. calibration: the threshold of success, on dreams that replay the actions of held-out
        episodes.

Prediction is deterministic: in a world without hidden chance that beats a flow from scratch at the
same cost by far, and does not hallucinate success (docs/world_models.md).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from embodyrl.build import pick_device
from embodyrl.errors import UserError
from embodyrl.interrupt import Interrupt, Interrupted
from embodyrl.storage import checkpoint
from embodyrl.storage.folder_lock import locked
from embodyrl.storage.loggers import LiveTable, MetricsWriter
from embodyrl.storage.provenance import describe_run, finish_run
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models.calibrate import doubt_limit, fit_calibration, fit_inverse, spread_limit
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.colour_jitter import restyled
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.init import build, go_on, with_state
from embodyrl.world_models.model import WorldModel, use_bf16
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.stage import Stage
from embodyrl.world_models.training_losses import (
    codec_loss,
    colour_weights,
    draw_clips,
    dynamics_loss,
    inverse_loss,
    state_loss,
)

STATE_BATCH = 256
STATE_LR = 3e-3
INVERSE_BATCH = 128
INVERSE_LR = 2e-3
KEYFRAMES = 4096
"""First frames that dreams can start from, at the most, and as many later moments."""


def train_world(config: WorldTrainConfig, *, command: str = "") -> Path | None:
    """Trains, or goes on where an interrupted run stopped.

    Returns:
        The model's folder, or None when it was interrupted.

    Raises:
        UserError: unusable data, or the folder holds a run with other settings, or one that another
            process is at.
    """
    folder = Path(config.out)
    _check_folder(folder, config)
    made = folder / "model" / "world.json"
    if made.exists() and WorldModel.read_meta(made.parent)["calibration"]["threshold"] < 1.0:
        return folder / "model"
    device = pick_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    clips = Clips.load(config.data, weights=config.weights)
    held_out = clips.held_out(config.held_out)
    _check_both_kinds(clips, clips.starts[held_out[clips.starts]])
    resolved = dataclasses.replace(config, state=with_state(config, clips))
    if resolved.state and not clips.spec.layout:
        print(
            "The data do not say which numbers of the simulator's state are objects "
            "(EnvSpec.layout), so nothing rests in these dreams, and they are the worse for it. "
            "MuJoCo, ManiSkill and LIBERO say it: collect anew."
        )
    rows = (~held_out).nonzero().flatten()
    rows = rows.repeat_interleave(clips.weight[rows])
    model = (go_on(resolved, clips) if config.init else build(resolved, clips, rows)).to(device)
    with locked(folder):
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
        describe_run(folder / "meta.json", command=command, seed=config.seed, device=device)
        shown = restyled(clips, config.styles, config.seed) if config.styles else clips
        rows = torch.cat([rows + copy * len(clips) for copy in range(config.styles + 1)])
        try:
            with Interrupt() as interrupt:
                fit(config, folder, model, shown, rows, interrupt.check)
        except Interrupted:
            print("Stopped; the same command goes on from there.")
            return None
        assert shown.latents is not None
        clips.latents = shown.latents[: len(clips)]
        conclude(config, folder, model, clips, held_out)
        finish_run(folder / "meta.json")
    return folder / "model"


def conclude(
    config: WorldTrainConfig, folder: Path, model: WorldModel, clips: Clips, held_out: Tensor
) -> None:
    """What a trained model must know of its data: where to doubt it, what to start from, when a task is solved."""
    model.eval()
    starts = clips.starts[held_out[clips.starts]]
    if model.stochastic:
        model.doubt = doubt_limit(model, clips, starts, config.seed)
    if model.state is not None and len(model.state.members) > 1:
        model.spread = spread_limit(model, clips, starts)
    model.strayed = fit_inverse(model, clips, starts)
    add_keyframes(model, clips, held_out, config.seed)
    try:
        model.calibration, report = fit_calibration(
            model, clips, starts, config.max_false_positives
        )
    except UserError as error:
        model.calibration = Calibration(threshold=1.0)
        model.save(folder / "model")
        raise UserError(
            f"{folder / 'model'} is trained, but its success head is of no use, and will call "
            f"nothing solved: {error} Or allow more by max_false_positives, and the same command "
            "fits the head's threshold again; or let a reflector judge the frames: "
            "env.reflector=FOLDER."
        ) from error
    (folder / "held_out.json").write_text(json.dumps(report, indent=1))
    model.save(folder / "model")


def fit(
    config: WorldTrainConfig,
    folder: Path,
    model: WorldModel,
    clips: Clips,
    rows: Tensor,
    check: Callable[[], None],
) -> None:
    """All stages, from the newest checkpoint on.

    Args:
        config: the settings.
        folder: of the run.
        model: trained in place.
        clips: the data; their latents are computed on the way.
        rows: frames to learn from.
        check: called before every step; may raise ``Interrupted``, after which a checkpoint is
            written.
    """
    device = model.device
    cast = torch.autocast(device.type, torch.bfloat16, enabled=use_bf16(config.precision, device))
    codec = Stage(model.codec, [], (0.0, config.codec_lr), config.codec_steps)
    matrices = [
        p
        for block in model.backbone.blocks
        for n, p in block.named_parameters()
        if _is_matrix(n, p)
    ]
    dynamics = Stage(
        nn.ModuleList([model.backbone, model.success]),
        matrices,
        (config.muon_lr, config.lr),
        config.steps,
    )
    stages = {"codec": codec, "dynamics": dynamics}
    if model.state is not None:
        stages["state_model"] = Stage(model.state, [], (0.0, STATE_LR), config.state_steps)
    assert model.inverse is not None
    stages["inverse"] = Stage(model.inverse, [], (0.0, INVERSE_LR), config.inverse_steps)
    if config.init or config.wan:
        codec.done = codec.steps  # it has been trained
    newest = checkpoint.latest(folder / "checkpoints")
    if newest is not None:
        states, _ = checkpoint.load(newest, device=device)
        if (
            states.keys() != {"model", *stages}
            or states["model"].keys() != model.state_dict().keys()
        ):
            raise UserError(
                f"{newest} was written by another version of embodyrl, whose world model has other "
                "parts, and cannot be gone on with. Train anew in another folder (out=FOLDER), or "
                "with that version."
            )
        model.load_state_dict(states["model"])
        for name, stage in stages.items():
            stage.load_state_dict(states[name])

    def total() -> int:
        return sum(stage.done for stage in stages.values())

    def save() -> None:
        states = {"model": model.state_dict()} | {
            name: stage.state_dict() for name, stage in stages.items()
        }
        where = folder / "checkpoints" / f"step_{total():07d}"
        checkpoint.save(
            where, states, {name: stage.done for name, stage in stages.items()}, keep_last=2
        )

    def run(
        name: str, stage: Stage, loss_of: Callable[[int], tuple[Tensor, dict[str, Tensor]]]
    ) -> None:
        with LiveTable(name, stage.steps, stage.done) as table:
            began = time.monotonic()
            first = stage.done
            while stage.done < stage.steps:
                check()
                with cast:
                    loss, figures = loss_of(stage.done)
                stage.step(loss)
                if stage.done % 20 == 0 or stage.done == stage.steps:
                    minutes = (time.monotonic() - began) / 60 * stage.done / (stage.done - first)
                    row = {"iteration": total(), "loss": float(loss.detach()), "minutes": minutes}
                    metrics.write(row | {k: float(v.detach()) for k, v in figures.items()})
                    table.update(row | {"iteration": stage.done})
                if stage.done % config.checkpoint_every == 0 or stage.done == stage.steps:
                    if stage.done == stage.steps:
                        stage.finish()
                    save()

    def codec_step(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        chosen = rows[
            torch.randint(len(rows), (config.batch_size,), generator=_seeded(config.seed, 1, step))
        ]
        return codec_loss(model, clips, chosen, colours), {}

    def state_step(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = _seeded(config.seed, 3, step)
        chosen = followed[torch.randint(len(followed), (STATE_BATCH,), generator=generator)]
        unroll = round(config.state_unroll * min(1.0, 2.0 * step / config.state_steps))
        return state_loss(
            model, clips, words, chosen, unroll, config.state_noise, config.judge_noise, generator
        )

    def inverse_step(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = _seeded(config.seed, 4, step)
        chosen, count, _ = draw_clips(clips, rows, INVERSE_BATCH, model.horizon, 1, generator)
        loss = inverse_loss(model, clips, chosen, count)
        return loss, {"inverse": loss}

    def dynamics_step(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = _seeded(config.seed, 2, step)
        unroll = 1
        if step >= config.pushforward_from * config.steps:
            unroll = int(
                torch.randint(1, longest_unroll(config, step) + 1, (1,), generator=generator)
            )
        drawn = draw_clips(clips, rows, config.batch_size, model.horizon, unroll, generator)
        return dynamics_loss(model, clips, words, *drawn, unroll, config.context_noise, generator)

    followed = rows[rows + 1 < clips.end[rows]]
    words = embed_sentences(clips.sentences).to(device)
    colours = colour_weights(model, clips, rows) if codec.done < codec.steps else torch.ones(0)
    with MetricsWriter(folder, (), total()) as metrics:
        try:
            run("codec", codec, codec_step)
            if dynamics.done == 0 and not (config.init or config.wan):
                set_latent_scale(model, clips, rows)
            clips.latents = encode(model, clips)
            if "state_model" in stages:
                run("state model", stages["state_model"], state_step)
            run("inverse dynamics", stages["inverse"], inverse_step)
            run("dynamics", dynamics, dynamics_step)
        except Interrupted:
            save()
            raise


def longest_unroll(config: WorldTrainConfig, step: int) -> int:
    """Chunks imagined in a row at the most, in a step after ``pushforward_from``: they grow with ``unroll_growth``."""
    first = config.pushforward_from * config.steps
    grown = (step - first) / max(1.0, config.unroll_growth * (config.steps - first))
    return (
        min(config.max_unroll, 1 + int(grown * config.max_unroll))
        if config.unroll_growth
        else config.max_unroll
    )


@torch.no_grad()
def set_latent_scale(model: WorldModel, clips: Clips, rows: Tensor) -> None:
    """Normalises every latent channel to mean 0 and variance 1 over 1,000 frames."""
    some = rows[:: max(1, len(rows) // 1000)]
    codec = model.codec
    device = model.device
    codec.get_buffer("shift").zero_()  # an interrupted run may have set them
    codec.get_buffer("scale").fill_(1.0)
    latent = torch.cat([codec.encode(clips.frames(part).to(device)) for part in some.split(256)])
    codec.get_buffer("shift").copy_(latent.mean((0, 1, 3, 4))[:, None, None])
    codec.get_buffer("scale").copy_(latent.std((0, 1, 3, 4)).clamp_min(1e-3)[:, None, None])


@torch.no_grad()
def encode(model: WorldModel, clips: Clips) -> Tensor:
    """(F, V, c, y, x) half: the latent of every frame."""
    device = model.device
    every = torch.arange(len(clips)).split(256)
    return torch.cat(
        [model.codec.encode(clips.frames(rows).to(device)).half().cpu() for rows in every]
    )


def add_keyframes(model: WorldModel, clips: Clips, held_out: Tensor, seed: int = 0) -> None:
    """Gives the model real moments to start dreams from: episodes' first frames, and as many of those on the way."""
    assert clips.latents is not None
    generator = torch.Generator().manual_seed(seed)
    starts = clips.starts[torch.randperm(len(clips.starts), generator=generator)[:KEYFRAMES]]
    frame = torch.arange(len(clips))
    later = (
        ((frame > clips.start) & (frame + model.horizon < clips.end) & ~clips.solved)
        .nonzero()
        .flatten()
    )
    rows = (
        torch.cat([starts, later[torch.randperm(len(later), generator=generator)[:KEYFRAMES]]])
        .sort()
        .values
    )
    before = torch.maximum(clips.start[rows], rows - model.horizon)
    model.sentences = clips.sentences
    model.keyframes = {
        "context": clips.latents[torch.stack([clips.start[rows], before, rows], dim=1)],
        "proprio": clips.proprio[rows],
        "sentence": clips.sentence[rows],
        "init": clips.init[rows],
        "age": rows - clips.start[rows],
        "held_out": held_out[rows],
    }
    if model.state is not None and clips.privileged is not None:
        model.keyframes["privileged"] = clips.privileged[rows]


def _check_both_kinds(clips: Clips, starts: Tensor) -> None:
    """Refuses data whose held-out episodes all end alike: found out after training, it would cost all of it."""
    solved = sum(bool(clips.solved[a : clips.end[a]].any()) for a in starts.tolist())
    if solved in (0, len(starts)):
        raise UserError(
            f"Of {len(starts)} held-out episodes {solved} are solved, but when a dream counts as "
            "solved is learned from episodes that were and episodes that were not. Collect more, "
            "with --keep-failures, and with --past-success 5, which records what a solved task "
            "looks like."
        )


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not name.startswith("modulate")


def _seeded(seed: int, stage: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 4 + stage) * 1_000_003 + step)


def _check_folder(folder: Path, config: WorldTrainConfig) -> None:
    """Refuses a folder that holds a run with other settings."""
    path = folder / "config.json"
    if not path.exists():
        return
    old = json.loads(path.read_text())
    new = json.loads(json.dumps(dataclasses.asdict(config)))
    free = ("checkpoint_every", "device", "threads", "out", "max_false_positives")
    if wrong := [k for k in new if k not in free and k in old and old[k] != new[k]]:
        listed = "; ".join(f"{k} was {old.get(k)!r}, now {new[k]!r}" for k in wrong[:4])
        raise UserError(
            f"{folder} holds a world model with other settings ({listed}). Give this one its own "
            "out=FOLDER."
        )
