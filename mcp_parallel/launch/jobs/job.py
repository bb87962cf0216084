"""What every kind of job is made from, and the words of the command line that make its config."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mcp_parallel.config import Config
from mcp_parallel.config_schema import plain
from mcp_parallel.errors import ConfigError

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_WORD = re.compile(r"[A-Za-z0-9_.,:/@+=-]+")
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
_SIZE = re.compile(r"[1-9]\d*(Ki|Mi|Gi|Ti)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job on several nodes, whoever starts it.

    Raises:
        ConfigError: a value could not stand where it goes; with every problem.
    """

    config: Config
    """Checked for ``nodes * ranks_per_node`` ranks."""
    nodes: int
    ranks_per_node: int
    on_gpus: bool
    """Whether each rank has a GPU of its own."""
    name: str
    """A DNS label: lower case, digits, dashes; at most 40 letters, since pods get longer names."""
    run_dir: str
    """Folder of the run, the same path on every node."""
    max_restarts: int = 3
    """How often ranks are started anew after a failure, here and by whoever watches the job."""
    monitor_interval_s: float = 1.0
    """How often torchrun looks at its ranks."""
    timeout_s: float = 120.0
    """How long a rank waits for another."""
    grace_s: int = 300
    """Time for the step in flight and the checkpoint, from the signal to the end of the job."""
    master: str | None = None
    """HOST:PORT where the nodes meet; None where the launcher names it."""
    env_file: str | None = None
    """A file of shell settings to read first, as ``doctor --fix`` writes it."""
    python: str = "python3"
    numa: bool = False
    """Let torchrun bind each rank to the socket of its GPU."""
    cpus_per_node: int | None = None
    memory: str | None = None
    """Of a node, as Kubernetes and Slurm spell it."""
    time_limit: str = "24:00:00"
    """Of a Slurm job."""
    partition: str | None = None
    account: str | None = None
    image: str = "mcp-kernels:latest"
    namespace: str | None = None
    claim: str | None = None
    """Persistent volume claim that holds the run folder."""
    mount: str = "/data"
    """Where the claim is mounted."""
    shm_size: str = "16Gi"
    """Of /dev/shm in a pod."""
    gpu_resource: str = "nvidia.com/gpu"
    rdma: str | None = None
    """Name of the resource that stands for network cards, such as rdma/ib."""

    def __post_init__(self) -> None:
        rules: list[tuple[str, str | None, re.Pattern[str], str]] = [
            ("--name", self.name, _NAME, "be a lower-case word of at most 40 letters"),
            ("--time", self.time_limit, _TIME, "be a time such as 24:00:00 or 2-12"),
            ("--shm-size", self.shm_size, _SIZE, "be a size such as 16Gi"),
        ]
        for flag, value in (
            ("--master", self.master),
            ("--python", self.python),
            ("--partition", self.partition),
            ("--account", self.account),
            ("--image", self.image),
            ("--namespace", self.namespace),
            ("--claim", self.claim),
            ("--mount", self.mount),
            ("--gpu-resource", self.gpu_resource),
            ("--rdma", self.rdma),
        ):
            rules.append((flag, value, _WORD, "be one plain word"))
        rules.append(("--memory", self.memory, _SIZE, "be a size such as 512Gi"))
        problems = [
            f"launch: {flag} must {rule}, got {value!a}; write for example {_example(flag)}"
            for flag, value, pattern, rule in rules
            if value is not None and not pattern.fullmatch(value)
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks_per_node

    def train_words(self) -> list[str]:
        """The words after ``train`` that give this config, its folder, and a resumed run."""
        return [*config_words(self.config), "--run-dir", self.run_dir, "--resume"]


_EXAMPLES = {
    "--name": "llama-7b",
    "--time": "24:00:00",
    "--shm-size": "16Gi",
    "--memory": "512Gi",
    "--master": "node0:29500",
    "--image": "registry.example/mcp:1",
    "--mount": "/data",
    "--python": "/opt/venv/bin/python",
    "--gpu-resource": "nvidia.com/gpu",
    "--rdma": "rdma/ib",
}


def _example(flag: str) -> str:
    return f"{flag} {_EXAMPLES.get(flag, 'train')}"


def config_words(config: Config) -> list[str]:
    """Words of a command line, ``--preset 7b --set parallel.tp=8``, that resolve to ``config``.

    The folder and the resumption are not among them. Raises an AssertionError where a config
    cannot be said by flags, which none of a command line is.
    """
    preset = config.model.preset
    words = [] if preset is None else ["--preset", preset]
    start = Config.from_mapping({"model": {"preset": preset}}) if preset else Config()
    values, defaults = _flat(plain(config)), _flat(plain(start))
    changed = {key: value for key, value in values.items() if value != defaults[key]}
    # What follows from another key (min_lr from lr) is said too, where it does not follow.
    for settings in (changed, values):
        found = [f"{key}={_word(value)}" for key, value in settings.items() if key not in _APART]
        if _resolved(start, found) == _without_resume(config):
            return words + [word for setting in found for word in ("--set", setting)]
    raise AssertionError("a config that no command line gives")


_APART = ("checkpoint.resume",)


def _resolved(start: Config, settings: list[str]) -> Config | None:
    try:
        return start.with_overrides(settings)
    except ConfigError:
        return None


def _without_resume(config: Config) -> Config:
    return config.with_overrides(["checkpoint.resume=never"])


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _word(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
