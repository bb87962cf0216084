"""The flags that ``train`` and ``check`` share, and the config they amount to. No torch.

Every flag but a few names a config key, so it becomes one more ``key=value`` override: its value is
read, typed and refused exactly as one in a file. Flags may be spelled with ``-`` or ``_``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mcp_parallel.check import check
from mcp_parallel.config import Config
from mcp_parallel.config_text import read_config_file
from mcp_parallel.errors import ConfigError, shown


class _Setting(NamedTuple):
    """One key set on the command line."""

    flag: str
    key: str
    value: str | None
    """None when ``--set`` was given no "="; the config refuses that in words."""

    @property
    def override(self) -> str:
        return self.key if self.value is None else f"{self.key}={self.value}"


def setting(flag: str, key: str, value: object) -> _Setting:
    """``key`` as a command line sets it, for settings that come from elsewhere than a flag."""
    return _Setting(flag, key, str(value))


class _Flag(NamedTuple):
    names: tuple[str, ...]
    key: str
    help: str


_FLAGS = (
    _Flag(("--preset", "--model-size"), "model.preset", "published shape: tiny, 125m ... 405b"),
    _Flag(("--steps",), "train.steps", "optimizer steps of the whole run"),
    _Flag(("--batch-size",), "train.global_batch_size", "samples of a step over all ranks"),
    _Flag(("--micro-batch-size",), "train.micro_batch_size", "samples of one forward pass"),
    _Flag(("--dp", "--dp-degree"), "parallel.dp", "data-parallel replicas"),
    _Flag(("--tp", "--tp-degree", "--mp-degree"), "parallel.tp", "tensor-parallel ranks"),
    _Flag(("--pp", "--pp-degree"), "parallel.pp", "pipeline ranks"),
    _Flag(("--cp", "--cp-degree"), "parallel.cp", "context-parallel ranks"),
    _Flag(("--zero",), "parallel.zero", "what dp ranks shard, 0 to 3"),
    _Flag(
        ("--schedule",),
        "parallel.schedule",
        "gpipe, 1f1b, interleaved, zero_bubble, zbv or dualpipev",
    ),
)


DEFAULT_PROFILE_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """What the command line says beside the config."""

    run_dir: Path | None
    """Where the run writes; None when it was not given."""
    as_json: bool
    """Print for programs."""
    profile_steps: int = 0
    """Steps to trace on every rank."""
    note: str = ""
    """What was decided on the way, for people."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run; ``resolve_arguments`` turns what they parse to into a config."""
    parser.allow_abbrev = (
        False  # --m must not become --mp-degree in one version and fail in another
    )
    _add(parser, "--config", metavar="FILE", help="YAML or TOML file; flags win over it")
    _add(parser, "--run-dir", metavar="DIR", help="folder of the run")
    _add(
        parser,
        "--resume",
        action=_Set,
        key="checkpoint.resume",
        nargs="?",
        const="auto",
        metavar="PATH",
        help="go on from the newest checkpoint of the run folder that verifies, or from PATH; "
        "without --config also with the config of that run",
    )
    for names, key, text in _FLAGS:
        _add(
            parser,
            *names,
            action=_Set,
            key=key,
            metavar="N" if "degree" in names[-1] else "X",
            help=f"{text} ({key})",
        )
    _add(
        parser,
        "--gradient-checkpointing",
        action=_Set,
        key="memory.activation_checkpointing",
        nargs=0,
        const="full",
        help="compute activations again in the backward pass",
    )
    _add(
        parser,
        "--use-flash-attn",
        action="store_true",
        help="taken for classic launch lines; attention is always mcp_kernels' flash attention",
    )
    _add(
        parser, "--set", action=_Set, key="", metavar="KEY=VALUE", help="any config key; repeatable"
    )
    _add(
        parser,
        "--profile",
        nargs="?",
        const=str(DEFAULT_PROFILE_STEPS),
        default="0",
        metavar="STEPS",
        help=f"trace some steps ({DEFAULT_PROFILE_STEPS}) of every rank into the run folder, for "
        "Perfetto or chrome://tracing",
    )
    _add(parser, "--json", action="store_true", help="print one JSON object")


def _add(parser: argparse.ArgumentParser, *names: str, help: str, **options: Any) -> None:  # noqa: A002
    """Add a flag in its spelling with ``-``, and silently in the one with ``_``."""
    action = parser.add_argument(*names, help=help, **options)
    other = [name[:2] + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    if other:
        parser.add_argument(*other, dest=action.dest, help=argparse.SUPPRESS, **options)


class _Set(argparse.Action):
    """Appends a ``_Setting``; a flag without a key of its own takes ``key=value``."""

    def __init__(self, option_strings: Sequence[str], dest: str, key: str, **options: Any) -> None:
        super().__init__(option_strings, "settings", default=(), **options)
        self._key = key

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = self.const if self.nargs == 0 else values
        key, text = (self._key, value) if self._key else _split(value)
        setting = _Setting(option_string or self.option_strings[0], key, text)
        namespace.settings = (*namespace.settings, setting)


def _split(override: str) -> tuple[str, str | None]:
    key, equals, value = override.partition("=")
    return key.strip(), value.strip() if equals else None


def add_setting(parser: argparse.ArgumentParser, *names: str, key: str, help: str) -> None:  # noqa: A002
    """Add one more flag that sets a config key."""
    _add(parser, *names, action=_Set, key=key, metavar="X", help=f"{help} ({key})")


class Arguments(NamedTuple):
    """A command line's config before its rules are checked."""

    config: Config
    options: RunOptions
    given: frozenset[str]
    """Keys that flags set."""
    file_gives_dp: bool
    """Whether ``--config`` fixes dp."""


def resolve_arguments(
    args: argparse.Namespace,
    world_size: int | None = None,
    cuts: Sequence[int] = (),
    *,
    is_planned_later: bool = False,
) -> tuple[Config, RunOptions]:
    """The checked config of a command line.

    Later wins: defaults, then ``--config`` (or, when resuming without it, the ``config.yaml`` of
    the run that is resumed), then flags. With ``parallel.auto`` the planner then has the last word.

    Args:
        args: parsed by a parser that went through ``add_run_arguments``.
        world_size: ranks there are, when torchrun decides it. A dp that neither the flags nor
            ``--config`` give is then what tp, pp and cp leave of it.
        cuts: the first rank of each host but the first, those that are known.
        is_planned_later: a config with ``parallel.auto`` is returned as it is, unchecked: one rank
            is going to plan for all of them.

    Raises:
        ConfigError: with every problem of the file and the flags, or else every rule that the
            config they make breaks, or why no layout fits.
    """
    config, options, given, file_gives_dp = read_arguments(args)
    if config.parallel.auto:
        return (config, options) if is_planned_later else planned(config, options, world_size, cuts)
    if world_size is not None and not file_gives_dp and "parallel.dp" not in given:
        config = _with_derived_dp(config, world_size)
    check(config, world_size, cuts)
    return config, options


def planned(
    config: Config,
    options: RunOptions,
    world_size: int | None = None,
    cuts: Sequence[int] = (),
) -> tuple[Config, RunOptions]:
    """The planner's choice for a config with ``parallel.auto``, checked, and a line about it."""
    from mcp_parallel.launch.variables import local_ranks, wanted_device
    from mcp_parallel.planner.auto import choose
    from mcp_parallel.planner.machine import machine_here

    here = local_ranks() if world_size is not None else config.parallel.ranks
    choice = choose(config, machine_here(here, wanted_device()), world_size)
    check(choice.config, world_size, cuts)
    return choice.config, replace(options, note=choice.line)


def read_arguments(args: argparse.Namespace) -> Arguments:
    """The config of a command line, its rules unchecked.

    Raises:
        ConfigError: with every problem of the file and the flags.
    """
    run_dir = None if args.run_dir is None else Path(args.run_dir)
    profile = str(args.profile)
    profile_steps = int(profile) if profile.isdecimal() and len(profile) < 10 else -1
    options = RunOptions(
        run_dir=run_dir, as_json=bool(args.json), profile_steps=max(0, profile_steps)
    )
    settings: Sequence[_Setting] = args.settings
    problems = _contradictions(settings)
    if profile_steps < 0:
        problems.append(
            f"config: --profile must be a number of steps, 0 for none, got {shown(profile)}; "
            f"write for example --profile {DEFAULT_PROFILE_STEPS}"
        )
    if args.run_dir == "":
        problems.append("config: --run-dir must name a folder, got ''; write for example runs/1")
    config, file_gives_dp = Config(), False
    try:
        config, file_gives_dp = _base(args, options)
    except ConfigError as error:
        problems += error.problems
    try:
        config = config.with_overrides([setting.override for setting in settings])
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    keys = frozenset(setting.key for setting in settings)
    return Arguments(config, options, keys, file_gives_dp)


def _contradictions(settings: Sequence[_Setting]) -> list[str]:
    """Keys that the command line gives two values."""
    first: dict[str, _Setting] = {}
    problems = []
    for setting in settings:
        before = first.setdefault(setting.key, setting)
        if before.value != setting.value:
            problems.append(
                f"config: {shown(setting.key)[1:-1]} must be given once, got "
                f"{_as_typed(before)} and {_as_typed(setting)}; keep one of them"
            )
    return problems


def _as_typed(setting: _Setting) -> str:
    text = setting.override if setting.flag == "--set" else setting.value
    return f"{setting.flag} {shown(text)[1:-1]}"


def _base(args: argparse.Namespace, options: RunOptions) -> tuple[Config, bool]:
    """What the flags change, and whether it fixes dp."""
    if args.config is not None:
        values = read_config_file(args.config)
        config = Config.from_mapping(values)
        return config, isinstance(values.get("parallel"), dict) and "dp" in values["parallel"]
    resumed = _config_of_resumed_run(args.settings, options.run_dir)
    # Its dp was that run's layout, and a resumed run may take another.
    return (Config.from_file(resumed) if resumed else Config()), False


def _config_of_resumed_run(settings: Sequence[_Setting], run_dir: Path | None) -> Path | None:
    """``config.yaml`` of the run folder that ``--resume`` goes on with, if there is one."""
    resume = next((s.value for s in reversed(settings) if s.key == "checkpoint.resume"), "never")
    if resume in ("never", "", None):
        return None
    if resume != "auto":
        # RUN/checkpoints/step_00000100
        run_dir = Path(resume).expanduser().absolute().parent.parent
    file = run_dir / "config.yaml" if run_dir is not None else None
    return file if file is not None and file.is_file() else None


def _with_derived_dp(config: Config, world_size: int) -> Config:
    """With dp = world_size / (tp * pp * cp) where that is whole; else ``check`` says what is."""
    parallel = config.parallel
    others = parallel.tp * parallel.pp * parallel.cp
    if others < 1 or world_size < 1 or world_size % others:
        return config
    return config.with_overrides([f"parallel.dp={world_size // others}"])
