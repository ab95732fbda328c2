"""Presets and overrides into frozen dataclasses.

A preset is a short YAML file with the sections ``env``, ``policy``, ``algorithm``, ``run`` and,
where it has a data set, ``data``. It states only what differs from the defaults of the dataclass
that the section's ``name`` selects, and, with ``run.init_checkpoint``, from the checkpoint's
policy. Its key ``base`` names presets to start from, one or a list; a later one is on top. A key
that does not exist, or a value of the wrong type, is refused with the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from embodyrl import registry
from embodyrl.errors import UserError, did_you_mean
from embodyrl.registry import preset_names
from embodyrl.storage.loggers import check_loggers

if TYPE_CHECKING:  # importing it imports torch, and a mistyped preset should be refused at once
    from embodyrl.env import EnvConfig

SECTIONS = {"env": "envs", "policy": "policies", "algorithm": "algorithms"}


@dataclass(frozen=True)
class DataConfig:
    """The demonstrations that supervised fine-tuning learns from.

    Attributes:
        path: a LeRobotDataset v3, own or someone else's. Relative to the working directory.
        episodes: use only the first that many (of each data set); 0 means all.
        keep: ``success`` leaves out the episodes of which the data set says that they failed;
            ``all`` does not, as for tasks that know no success.
        more: further data sets to learn from as well.
        weights: how often each is drawn, ``path`` first, then ``more``; empty means by its number
            of frames.
        intervention_weight: how many times as often as others those frames are drawn in which a
            person had taken over.
        codec: a world model through whose codec the frames are shown every other time, for a policy
            that shall dream.
    """

    path: str = ""
    episodes: int = 0
    keep: str = "success"
    more: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    intervention_weight: float = 1.0
    codec: str = ""


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        name: the run writes under ``out/name``.
        out: parent folder of all runs.
        seed: of the policy's initial weights, the noise and the order of the data.
        iterations: updates of the algorithm.
        minutes: stop earlier when that much training time is used up; 0 means no limit.
        init_checkpoint: a checkpoint (or a run folder: its newest) whose policy this run starts
            from.
        eval_every: iterations between evaluations; 0 means only at the end.
        eval_episodes: initial states of the ``eval_split`` per evaluation, always the first ones.
        eval_split: initial states never trained on.
        eval_before: evaluate the policy that the run starts from as well.
        patience: evaluations in a row without a new best after which the run ends; 0 goes on to the
            last iteration.
        videos: episodes per evaluation, the first ones, that are saved as video (before and after
            training).
        checkpoint_every: iterations between checkpoints.
        keep_checkpoints: older ones are deleted.
        device: ``"auto"`` takes the GPU where there is one.
        threads: of torch on CPU; 0 leaves torch's default.
        compile: the policy's denoising step is compiled for sampling, and on a GPU replayed as a
            CUDA graph.
        workers: shards that the envs are dealt to, each with its own rollout; ``--launcher ray``
            makes each a process.
        max_lag: updates by which a rollout's weights may be older than the learner's, so that both
            can be at work; on policy, a lag needs ``algorithm.behaviour_cap``.
        loggers: any of ``tensorboard``, ``trackio``, ``wandb``; ``metrics.jsonl`` is always
            written.
    """

    name: str = "run"
    out: str = "runs"
    seed: int = 0
    iterations: int = 100
    minutes: float = 0.0
    init_checkpoint: str = ""
    eval_every: int = 25
    eval_episodes: int = 128
    eval_split: str = "eval"
    eval_before: bool = True
    patience: int = 0
    videos: int = 8
    checkpoint_every: int = 25
    keep_checkpoints: int = 2
    device: str = "auto"
    threads: int = 0
    compile: bool = False
    workers: int = 1
    max_lag: int = 0
    loggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_loggers(self.loggers)
        for key in ("iterations", "checkpoint_every", "eval_episodes", "workers"):
            if getattr(self, key) < 1:
                raise UserError(f"run.{key} is {getattr(self, key)}; it must be at least 1.")
        for key in (
            "minutes",
            "eval_every",
            "patience",
            "videos",
            "keep_checkpoints",
            "threads",
            "max_lag",
        ):
            if getattr(self, key) < 0:
                raise UserError(f"run.{key} is {getattr(self, key)}; it must not be negative.")
        if self.patience and not self.eval_every:
            raise UserError(
                f"run.patience={self.patience} waits for evaluations, and there are none: set "
                "run.eval_every."
            )

    @property
    def folder(self) -> Path:
        """Where everything of this run lies."""
        return Path(self.out) / self.name

    def last_pause(self, iteration: int) -> int:
        """The newest of the iterations up to this one that a checkpoint or an evaluation stands before."""
        return max(
            iteration // every * every
            for every in (self.checkpoint_every, self.eval_every)
            if every
        )


@dataclass(frozen=True)
class Config:
    """A whole resolved config; each section is the frozen dataclass of the class that its ``name`` selects."""

    env: EnvConfig
    policy: Any
    algorithm: Any
    run: RunConfig
    data: DataConfig


def compose(preset: str, overrides: Sequence[str] = ()) -> Config:
    """Reads a preset (a name of ``preset_names`` or a path to a YAML file) and applies ``key.sub=value`` overrides.

    With ``run.init_checkpoint`` the policy section starts from that checkpoint's, so that neither
    the preset nor the command line need repeat its architecture; their own keys come on top.

    Raises:
        UserError: unknown preset, key or name, or a value of the wrong type.
    """
    merged = merge(read_preset(preset), overrides)
    return resolve(cast(DictConfig, OmegaConf.merge({"policy": _initial_policy(merged)}, merged)))


def _initial_policy(merged: DictConfig) -> dict[str, Any]:
    """The policy section that ``run.init_checkpoint`` was trained with; empty where there is none, or another kind."""
    run = merged.get("run")
    own = merged.get("policy")
    path = run.get("init_checkpoint") if isinstance(run, DictConfig) else None
    if not path:
        return {}
    from embodyrl.storage import checkpoint

    try:
        _, meta = checkpoint.load(checkpoint.find(str(path)))
    except UserError:
        # such a config can be looked at before the checkpoint is there; training refuses it in
        # these words
        return {}
    policy = meta.get("config", {}).get("policy", {})
    wanted = own.get("name") if isinstance(own, DictConfig) else None
    return policy if wanted in (None, policy.get("name")) else {}


def read_preset(preset: str) -> DictConfig:
    """The preset's YAML on top of those that its key ``base`` names; not yet checked.

    Raises:
        UserError: no such preset, no valid YAML, or presets that are based on one another.
    """
    return _read(preset, ())


def _read(preset: str, above: tuple[str, ...]) -> DictConfig:
    known = preset_names() | preset_names("base")
    path = known.get(preset, Path(preset))
    if preset in above:
        raise UserError(f"Presets are based on one another: {' -> '.join((*above, preset))}.")
    if not path.is_file():
        where = f"base of {above[-1]}, " if above else ""
        raise UserError(
            f"There is no preset {preset!r}, {where}nor a file of that name. "
            f"{did_you_mean(preset, known)}"
        )
    try:
        raw = OmegaConf.load(path)
    except Exception as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, DictConfig):
        raise UserError(
            f"{path} must hold sections ({', '.join(f.name for f in dataclasses.fields(Config))}), "
            "not a list."
        )
    bases = raw.pop("base", [])
    merged = cast(DictConfig, OmegaConf.create({}))
    for base in [bases] if isinstance(bases, str) else bases:
        merged = _on_top(merged, _read(str(base), (*above, preset)))
    return _on_top(merged, raw)


def _on_top(below: DictConfig, above: DictConfig) -> DictConfig:
    """Two presets merged; a section that names another class starts anew."""
    kept = dict(below)
    for section in SECTIONS:
        mine = above.get(section)
        theirs = below.get(section)
        if not isinstance(mine, DictConfig) or not isinstance(theirs, DictConfig):
            continue
        if "name" in mine and theirs.get("name", mine["name"]) != mine["name"]:
            del kept[section]
    return cast(DictConfig, OmegaConf.merge(OmegaConf.create(kept), above))


def merge(raw: DictConfig | dict[str, Any], overrides: Sequence[str]) -> DictConfig:
    """A mapping of sections with ``key.sub=value`` overrides on top."""
    written = []
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign:
            raise UserError(
                f"{item!r} is not an override: write key.sub=value, for example run.seed=1."
            )
        try:
            value = OmegaConf.select(OmegaConf.from_dotlist([item]), key)
        except Exception as error:  # of YAML's parser or OmegaConf's, by what is wrong
            raise UserError(
                f"The override {item!r} cannot be read: {str(error).splitlines()[0]}."
            ) from error
        # "key=" is what a shell leaves of key='' and means the empty string, where YAML would read
        # null. A name like 0_20 is a number to YAML (16): left as text, it becomes a number only
        # where one is asked for.
        respelled = (
            isinstance(value, int | float) and not isinstance(value, bool) and str(value) != text
        )
        written.append(f"{key}='{text}'" if not text or respelled else item)
    return cast(DictConfig, OmegaConf.merge(raw, OmegaConf.from_dotlist(written)))


def resolve(raw: DictConfig | dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Checks a mapping of sections against their dataclasses and freezes it."""
    known = [f.name for f in dataclasses.fields(Config)]
    merged = merge(raw, overrides)
    if unknown := [str(key) for key in merged if key not in known]:
        raise UserError(
            f"There is no section {unknown[0]!r} in a config. {did_you_mean(unknown[0], known)}"
        )
    sections: dict[str, Any] = {}
    for section in known:
        given = merged.get(section) or OmegaConf.create({})
        if not isinstance(given, DictConfig):
            raise UserError(f"The section {section!r} must hold keys, not {given!r}.")
        sections[section] = build(section, config_class(section, given), given)
    return Config(**sections)


def config_class(section: str, given: DictConfig) -> type:
    """The dataclass that checks a section: fixed, or named by the section's ``name``."""
    if section not in SECTIONS:
        return {"run": RunConfig, "data": DataConfig}[section]
    if "name" not in given:
        raise UserError(
            f"The section {section!r} has no name. "
            f"{did_you_mean('', registry.names(SECTIONS[section]))}"
        )
    return registry.load(SECTIONS[section], str(given["name"])).Config


def build[T](section: str, cls: type[T], given: DictConfig | dict[str, Any]) -> T:
    """One frozen dataclass from a mapping.

    Raises:
        UserError: a key that ``cls`` does not have, or a value of the wrong type.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), given)
        plain = cast(
            dict[str, Any], OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
        )
    except ConfigKeyError as error:
        key = str(error.key)
        valid = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        raise UserError(
            f"{section} has no key {key!r} ({cls.__name__}). {did_you_mean(key, valid)}"
        ) from error
    except OmegaConfBaseException as error:
        first = re.sub(r"\s+", " ", str(error).split("\n")[0])
        key = error.full_key or _wrong_key(cls, given)
        where = f"{section}.{key}" if key else section
        raw = cast(
            dict[str, Any],
            OmegaConf.to_container(OmegaConf.create(cast(Any, given)), resolve=False),
        )
        value = raw.get(key)
        if "is not a TupleConfig" in first or "is not a ListConfig" in first:
            first = f"it takes a list, not {value!r}: write {where}=[{value}]"
        first = first.replace(
            "Value '$VALUE' of type '$VALUE_TYPE'", f"one of {value}"
        )  # OmegaConf leaves it unfilled
        raise UserError(f"{where} is wrong: {first.rstrip('.')}.") from error
    return cls(**{key: _freeze(value) for key, value in plain.items()})


def _wrong_key(cls: type, given: DictConfig | dict[str, Any]) -> str:
    """The key that is refused on its own; OmegaConf does not name it where an element of a tuple is wrong."""
    for key in map(str, given):
        try:
            OmegaConf.merge(OmegaConf.structured(cls), {key: given[key]})
        except OmegaConfBaseException:
            return key
    return ""


def _freeze(value: Any) -> Any:
    return tuple(_freeze(v) for v in value) if isinstance(value, list | tuple) else value


def to_dict(config: Any) -> dict[str, Any]:
    """A resolved config as plain data, for ``config.yaml`` and checkpoints."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """A resolved config as YAML that ``compose`` reads back to the same config."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def env_config(name: str, overrides: Sequence[str] = ()) -> EnvConfig:
    """An env's config from its registry name or from a preset's ``env`` section, with ``env.key=value`` overrides."""
    envs = registry.names("envs")
    known = {**envs, **preset_names()}
    if name not in known and not Path(name).is_file():
        raise UserError(
            f"There is no env or preset {name!r}, nor a file of that name. "
            f"{did_you_mean(name, known)}"
        )
    raw = OmegaConf.create({"env": {"name": name}}) if name in envs else read_preset(name)
    merged = merge({"env": raw.get("env")}, overrides)
    if extra := [str(k) for k in merged if k != "env"]:
        raise UserError(f"{extra[0]!r} is not a key of the env section: write env.key=value.")
    section = merged.get("env")
    if not isinstance(section, DictConfig):
        raise UserError(f"{name} has no env section to use.")
    return build("env", config_class("env", section), section)
