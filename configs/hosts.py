"""Several hosts: which of them runs which process, and the checks of their flags."""

from __future__ import annotations

from .options import ConfigError
from .schema import Config

_KEY_CHARACTERS = 16  # at least, of the secret that keeps strangers out


def uses_hosts(config: Config) -> bool:
    """Whether processes may run on other hosts than this one."""
    hosts = config.hosts
    return hosts.nnodes > 1 or hosts.distributed_executor_backend == "ray"


def num_processes(config: Config) -> int:
    """The processes of all engines together: one for each device."""
    return config.parallel.tensor_parallel_size * config.parallel.data_parallel_size


def check_one_host(config: Config) -> Config:
    """The configuration unchanged; raises ConfigError unless its engine runs on this host alone."""
    if uses_hosts(config):
        raise ConfigError(
            "--nnodes and --distributed-executor-backend ray are flags of `slipstream serve`: this "
            "command runs on one host"
        )
    return config


def check_hosts(config: Config) -> None:
    """Raise ConfigError unless the flags of several hosts agree."""
    hosts, total = config.hosts, num_processes(config)
    if hosts.node_rank >= hosts.nnodes:
        raise ConfigError(
            f"--node-rank {hosts.node_rank}: must be below --nnodes, which is {hosts.nnodes}"
        )
    if hosts.group_key is not None and len(hosts.group_key) < _KEY_CHARACTERS:
        raise ConfigError(f"--group-key: must have at least {_KEY_CHARACTERS} characters")
    if hosts.nnodes == 1:
        return
    if hosts.distributed_executor_backend == "ray":
        raise ConfigError(
            "--nnodes does not go with --distributed-executor-backend ray, which finds the hosts"
        )
    if total % hosts.nnodes:
        raise ConfigError(
            f"--nnodes {hosts.nnodes}: must divide --tensor-parallel-size times "
            f"--data-parallel-size, which is {total}"
        )
    if hosts.group_key is None:
        raise ConfigError(
            "--nnodes needs a secret that all hosts share: set SLIPSTREAM_GROUP_KEY or "
            "--group-key-file on each of them"
        )
