"""Turns presets and overrides into frozen dataclasses.

A preset is a short YAML file with the sections ``env``, ``policy``, ``algorithm``, ``run`` and, if
it has a data set, ``data``. A value comes from the first of these that sets it:

    1. an override, ``key.sub=value``
    2. the preset's own YAML
    3. the presets that its key ``base`` names (one, or a list whose later entries win)
    4. for the policy, the checkpoint that ``run.init_checkpoint`` names
    5. for ``env.profile`` and ``policy.cameras``, the checkpoint that ``policy.pretrained`` names
    6. the default of the dataclass that the section's ``name`` selects

A key that does not exist, or a value of the wrong type, is refused with the nearest valid name. So is
a value out of its range, which stands beside the field (``embodyrl.ranges``).

``~`` at the start of a text is the home folder (``storage.paths.expand_home``).

A config is plain data. OmegaConf's interpolation (a dollar sign and a brace) is refused wherever a
config comes from, because a config may come from elsewhere, and is saved, sent and published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from omegaconf import DictConfig, OmegaConf

from embodyrl import registry
from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import (
    Choice,
    Count,
    CountOrZero,
    Device,
    NotNegative,
    Positive,
    Processes,
    Range,
    Seed,
    Threads,
    check_config,
)
from embodyrl.registry import preset_names
from embodyrl.storage.config_section import build_section
from embodyrl.storage.loggers import check_loggers
from embodyrl.storage.paths import expand_home, machine_setting, path_setting
from embodyrl.storage.plain_data import read_yaml, require_plain
from embodyrl.storage.preset_files import SECTIONS, apply_overrides, read_preset

if TYPE_CHECKING:  # it would import torch, and a mistyped preset should be refused at once
    from embodyrl.env import EnvConfig


@dataclass(frozen=True)
class DataConfig:
    """The demonstrations of a run, for algorithms that learn from some.

    Attributes:
        path: a LeRobotDataset (v2.0, v2.1 or v3), written by this package or by another. Relative to the working
            directory.
        skip: numbers of episodes of ``path`` that are left out, for example of damaged ones.
        episodes: use only the first ``episodes`` episodes of each data set; 0 means all.
        keep: ``success`` leaves out episodes that the data set marks as failed; ``all`` keeps them,
            for tasks that report no success.
        more: further data sets.
        weights: how often each data set is drawn, ``path`` first, then ``more``; empty means in
            proportion to its number of frames.
        intervention_weight: how many times as often frames are drawn in which a person had taken
            over, compared with other frames. RLPD's corrections during training count the same.
        cameras: name of the env's camera -> key in the data sets, where they have other names, e.g.
            ``{front: image, wrist: image2}``; by default the names are compared.
        profile: the public family that the data sets belong to, e.g. ``libero_lerobot``: it says
            what their pictures and actions mean, and they are translated for the env.
        convention: fields of ``types.Conventions`` that say what the data mean, e.g.
            ``{orientation: turned_180}`` or ``{gripper: [1,0]}``; they come before the profile's.
        rate: what is done with data of another rate than the env's: ``resample`` them, or ``keep``
            the frames as they are. Without it they are refused.
        codec: path to a world model. Every other frame is replaced by its reconstruction, so that
            the policy has seen the kind of images on which it will be trained in the world model.
    """

    path: str = path_setting()
    skip: tuple[CountOrZero, ...] = ()
    episodes: CountOrZero = 0
    keep: Annotated[str, Choice("success", "all")] = "success"
    more: tuple[str, ...] = path_setting(())
    weights: tuple[NotNegative, ...] = ()
    intervention_weight: Positive = 1.0
    cameras: dict[str, str] = field(default_factory=dict)
    profile: str = ""
    convention: dict[str, Any] = field(default_factory=dict)
    rate: Annotated[str, Choice("", "resample", "keep")] = ""
    codec: str = path_setting()


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        name: the run writes into the folder ``out/name``.
        out: parent folder of all runs.
        seed: of the policy's initial weights, the noise and the order of the data.
        task_sampling: how training draws the tasks of its episodes, where the env has several.
            ``uniform`` draws all alike, ``difficulty`` more often those that are neither never nor
            always solved: task i by p_i (1 - p_i) of its recent success rate p_i, and a fifth of
            the episodes evenly. Evaluations are not affected.
        start_sampling: how training draws the initial states of its episodes. ``uniform`` draws all
            alike; ``difficulty`` draws half of them alike, and half among the last 512 by the
            variance p (1 - p) of their success. ``train_success`` is that of an even draw.
        first_length: share of their time limit after which training episodes end at first. It grows
            linearly to 1 over the first half of the run.
        iterations: updates of the algorithm.
        minutes: end the run after this much training time, in minutes; 0 means no limit.
        init_checkpoint: start from the policy of this checkpoint. A run's folder means its newest
            checkpoint.
        eval_every: iterations between evaluations; 0 means only at the end.
        eval_episodes: episodes per evaluation. They start from the first initial states of
            ``eval_split``, the same ones in every evaluation.
        eval_split: initial states that are never trained on.
        eval_before: also evaluate the policy before training.
        patience: end the run after this many evaluations in a row without a new best one; 0 goes
            on to the last iteration.
        keep: the policy that the run ends with: the ``last``, or that of the ``best`` evaluation,
            more exactly the latest one within a standard error of it.
        videos: number of episodes that are saved as video, in the evaluations before and after
            training.
        checkpoint_every: iterations between checkpoints.
        keep_checkpoints: number of checkpoints to keep; older ones are deleted.
        device: ``"auto"`` takes the GPU if there is one.
        threads: of PyTorch on the CPU; 0 lets a short measurement at the start of a run choose
            them, which a run that goes on keeps. Another number may change the last bits.
        compile: compile the policy's denoising step for sampling; on a GPU it is replayed as a
            CUDA graph.
        workers: number of shards that the envs are divided into, each with its own rollout. With
            ``--launcher ray`` each is a process.
        max_lag: number of updates by which a rollout's weights may be older than the learner's, so
            that rollout and learner can work at the same time. An on-policy algorithm then needs
            ``algorithm.behaviour_cap``.
        loggers: any of ``tensorboard``, ``trackio``, ``wandb``; ``metrics.jsonl`` is always
            written.
    """

    name: str = "run"
    out: str = "runs"
    seed: Seed = 0
    task_sampling: Annotated[str, Choice("uniform", "difficulty")] = "uniform"
    start_sampling: Annotated[str, Choice("uniform", "difficulty")] = "uniform"
    first_length: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    iterations: Count = 100
    minutes: NotNegative = 0.0
    init_checkpoint: str = path_setting()
    eval_every: CountOrZero = 25
    eval_episodes: Count = machine_setting(128)
    eval_split: str = "eval"
    eval_before: bool = True
    patience: CountOrZero = 0
    keep: Annotated[str, Choice("last", "best")] = "last"
    videos: CountOrZero = machine_setting(8)
    checkpoint_every: Count = 25
    keep_checkpoints: CountOrZero = 2
    device: Device = machine_setting("auto")
    threads: Threads = machine_setting(0)
    compile: bool = False
    workers: Processes = machine_setting(1)
    max_lag: Annotated[int, Range(0, 1000)] = 0
    loggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_loggers(self.loggers)
        if self.patience and not self.eval_every:
            raise UserError(
                f"run.patience={self.patience} waits for evaluations, and there are none: set "
                "run.eval_every."
            )
        if self.keep == "best" and not self.eval_every:
            raise UserError(
                "run.keep=best chooses among evaluations, and there are none: set run.eval_every."
            )

    @property
    def folder(self) -> Path:
        """The folder that the run writes into."""
        return Path(self.out) / self.name

    def last_pause(self, iteration: int) -> int:
        """The last iteration, up to this one, after which a checkpoint or an evaluation is due."""
        return max(
            iteration // every * every
            for every in (self.checkpoint_every, self.eval_every)
            if every
        )


@dataclass(frozen=True)
class Config:
    """A complete config. Each section is a frozen dataclass, selected by the section's ``name``."""

    env: EnvConfig
    policy: Any
    algorithm: Any
    run: RunConfig
    data: DataConfig

    def __post_init__(self) -> None:
        for section, config in vars(self).items():
            check_config(section, config)


def compose(preset: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a preset with ``key.sub=value`` overrides.

    A preset that sets no ``run.name`` gives its own name to the run. With ``run.init_checkpoint``
    the policy section starts from the checkpoint's, so that its
    architecture need not be repeated. Keys of the preset and the overrides win over it.

    Args:
        preset: a name of ``preset_names``, or a path to a YAML file.
        overrides: each ``key.sub=value``.

    Raises:
        UserError: unknown preset, key or name, or a value of the wrong type.
    """
    merged = overridden(preset, overrides)
    initial = {
        "policy": _checkpoint_policy(merged, Path(preset).stem),
        "run": {"name": Path(preset).stem},
    }
    merged = cast(DictConfig, OmegaConf.merge(initial, merged))
    found = _pretrained_settings(merged, overrides)
    return resolve(cast(DictConfig, OmegaConf.merge(merged, found)))


def overridden(preset: str, overrides: Sequence[str]) -> DictConfig:
    """A preset with overrides on top, not yet checked.

    Where an override names another policy, keys of the preset that it does not have are left out.

    Raises:
        UserError: unknown preset or policy, or an override is not of the form ``key.sub=value``.
    """
    raw = read_preset(preset)
    policy = raw.get("policy")
    names = [o.partition("=")[2] for o in overrides if o.startswith("policy.name=")]
    if names and isinstance(policy, DictConfig) and policy.get("name") not in (None, names[-1]):
        _drop_keys_of_another(policy, names[-1], overrides)
    return apply_overrides(raw, overrides)


def _pretrained_settings(merged: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """What the checkpoint ``policy.pretrained`` says about its use, where nobody else says it.

    ``policy.name`` is a preset's choice that only an override keeps. ``env.profile`` and
    ``policy.cameras`` of a preset or an override stay.

    Raises:
        UserError: the checkpoint does not exist, or its config is damaged.
    """
    policy = merged.get("policy")
    path = policy.get("pretrained") if isinstance(policy, DictConfig) else None
    if not isinstance(policy, DictConfig) or not path:
        return {}
    from embodyrl.storage.pretrained import LEROBOT_VLAS, find_checkpoint, recognise

    if policy.get("name") not in LEROBOT_VLAS:
        return {}
    env = cast(DictConfig, merged.get("env") or OmegaConf.create({}))
    cameras = getattr(build_section("env", config_class("env", env), env), "cameras", ())
    folder = find_checkpoint(str(path), str(policy.get("revision") or ""), weights=False)
    known = recognise(folder, cameras)
    found: dict[str, Any] = {"policy": {}, "env": {}}
    if known.policy and not any(o.startswith("policy.name=") for o in overrides):
        found["policy"]["name"] = known.policy
        _drop_keys_of_another(policy, known.policy, overrides)
    # With random weights only the architecture is used: its pictures become those of the env.
    if known.profile and not policy.get("random_weights"):
        if "profile" not in env:
            found["env"]["profile"] = known.profile
        if not policy.get("cameras"):
            found["policy"]["cameras"] = list(known.cameras)
    return found


def _drop_keys_of_another(policy: DictConfig, name: str, overrides: Sequence[str]) -> None:
    """Removes the keys of a preset's policy that the policy ``name`` does not have.

    A preset for flow policies has steps of denoising, of which a policy of tokens knows nothing.
    Keys that no policy has, and those of overrides, stay: they are refused later.
    """
    own, other = (
        {f.name for f in dataclasses.fields(config_class("policy", {"name": kind}))}
        for kind in (name, policy["name"])
    )
    given = {override.partition("=")[0].strip() for override in overrides}
    for key in list(policy):
        if key in other - own and f"policy.{key}" not in given:
            del policy[key]


def _checkpoint_policy(merged: DictConfig, name: str) -> dict[str, Any]:
    """The policy section with which ``run.init_checkpoint`` was trained.

    If it is not there any more, the run itself, which goes on without it, says what it was.
    Empty if there is neither, or if its policy is of another kind.
    """
    run = merged.get("run")
    path = run.get("init_checkpoint") if isinstance(run, DictConfig) else None
    if not isinstance(run, DictConfig) or not path:
        return {}
    from embodyrl.storage import checkpoint

    try:
        _, meta = checkpoint.load_run(checkpoint.find(expand_home(str(path))))
        saved = meta.get("config", {})
    except UserError:
        # A config may be printed before the checkpoint exists. Training refuses it later, with
        # this error.
        out = expand_home(str(run.get("out", RunConfig.out)))
        own = Path(out) / str(run.get("name", name)) / "config.yaml"
        saved = read_yaml(own) if own.is_file() else {}
    policy = saved.get("policy", {}) if isinstance(saved, dict) else {}
    section = merged.get("policy")
    wanted_name = section.get("name") if isinstance(section, DictConfig) else None
    fits = isinstance(policy, dict) and wanted_name in (None, policy.get("name"))
    return policy if fits else {}


def resolve(raw: DictConfig | dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Checks a mapping of sections against their dataclasses, and freezes it.

    Raises:
        UserError: unknown section, key or name, or a value of the wrong type.
    """
    known = [f.name for f in dataclasses.fields(Config)]
    merged = apply_overrides(raw, overrides)
    if unknown := [str(key) for key in merged if key not in known]:
        raise UserError(
            f"There is no section {unknown[0]!r} in a config. {did_you_mean(unknown[0], known)}"
        )
    sections: dict[str, Any] = {}
    for section in known:
        given = merged.get(section) or OmegaConf.create({})
        if not isinstance(given, DictConfig):
            raise UserError(f"The section {section!r} must hold keys, not {given!r}.")
        sections[section] = build_section(section, config_class(section, given), given)
    return Config(**sections)


def env_from_dict(given: dict[str, Any]) -> EnvConfig:
    """An env's config from plain data, such as a data set or a world model says it.

    Raises:
        UserError: no such env, an unknown key, or a value of the wrong type.
    """
    require_plain(given, "The env's config")
    return build_section("env", config_class("env", given), given)


def config_class(section: str, given: DictConfig | dict[str, Any]) -> type:
    """The dataclass of a section: a fixed one, or the one that the section's ``name`` selects."""
    if section not in SECTIONS:
        return {"run": RunConfig, "data": DataConfig}[section]
    if "name" not in given:
        raise UserError(
            f"The section {section!r} has no name. "
            f"{did_you_mean('', registry.names(SECTIONS[section]))}"
        )
    return registry.load(SECTIONS[section], str(given["name"])).Config


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain data, for ``config.yaml`` and checkpoints."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """A config as YAML; ``compose`` reads the same config back from it."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def env_config(name: str, overrides: Sequence[str] = ()) -> EnvConfig:
    """The config of an env alone.

    Args:
        name: registry name of the env, or a preset, whose ``env`` section is used.
        overrides: each ``env.key=value``.

    Raises:
        UserError: no such env or preset, an unknown key, or a value of the wrong type.
    """
    envs = registry.names("envs")
    known = {**envs, **preset_names()}
    if name not in known and not Path(expand_home(name)).is_file():
        raise UserError(
            f"There is no env or preset {name!r}, nor a file of that name. "
            f"{did_you_mean(name, known)}"
        )
    raw = OmegaConf.create({"env": {"name": name}}) if name in envs else read_preset(name)
    merged = apply_overrides({"env": raw.get("env")}, overrides)
    if extra := [str(k) for k in merged if k != "env"]:
        raise UserError(f"{extra[0]!r} is not a key of the env section: write env.key=value.")
    section = merged.get("env")
    if not isinstance(section, DictConfig):
        raise UserError(f"{name} has no env section to use.")
    return build_section("env", config_class("env", section), section)
