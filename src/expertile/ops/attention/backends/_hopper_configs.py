"""Configs of the `gluon_hopper` kernels, and which of them is the default for a problem.

Defaults are the fastest measured on an H200 (bf16, B=4, lengths 256 to 16384, D 64 and 128, causal or not), where they
gain more than 1 %. Between two lengths the change lies at their geometric mean. docs/notes/attention.md has the times.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from expertile.device import Device
from expertile.ops.attention.problem import Problem

T = TypeVar("T")
ROWS = 64  # of queries, or in the backward of what is held, of one consumer warpgroup


@dataclass(frozen=True)
class ForwardConfig:
    """q_slots: buffers of Q, 2 where the next tile's may arrive early. persistent: one program per SM, instead of one
    per tile."""

    block_n: int = 128
    consumers: int = 2
    num_stages: int = 2
    q_slots: int = 2
    persistent: bool = True

    def smem_bytes(self, dim: int) -> int:
        """Shared memory of one program, bytes (the barriers and alignment rounded up to 1 KiB)."""
        return 2 * dim * (self.consumers * self.q_slots * ROWS + 2 * self.num_stages * self.block_n) + 1024


@dataclass(frozen=True)
class PassConfig:
    """One of the backward's kernels. block: rows of a block that is gone over. slots: buffers of the held rows, 2 where
    the next tile's may arrive early. ahead: the next block's products are queued before this one's are waited for."""

    block: int = 64
    num_stages: int = 2
    slots: int = 1
    ahead: bool = False
    persistent: bool = True

    def smem_bytes(self, dim: int) -> int:
        statistics = 2 * 4 * self.num_stages * self.block
        return 2 * dim * (4 * ROWS * self.slots + 2 * self.num_stages * self.block) + statistics + 1024


@dataclass(frozen=True)
class BackwardConfig:
    dkdv: PassConfig = PassConfig()
    dq: PassConfig = PassConfig()


_FORWARD_64 = {
    "two consumers": ForwardConfig(num_stages=3),
    "grid": ForwardConfig(num_stages=3, q_slots=1, persistent=False),
    "three consumers": ForwardConfig(consumers=3),
}
_FORWARD_128 = {
    "128 keys": ForwardConfig(),
    "grid": ForwardConfig(q_slots=1, persistent=False),
    "64 keys": ForwardConfig(block_n=64, num_stages=4),
}
_FORWARD_256 = {"64 keys": ForwardConfig(block_n=64, q_slots=1), "32 keys": ForwardConfig(block_n=32, q_slots=1)}
_DKDV_64 = {
    "ahead": PassConfig(64, 3, 1, True),
    "ahead, two buffers": PassConfig(64, 3, 2, True),
    "plain": PassConfig(64, 3, 2, False),
}
_DQ_64 = {"ahead": PassConfig(128, 2, 2, True), "plain": PassConfig(128, 2, 2, False)}
_DKDV_128 = {
    "two buffers": PassConfig(64, 2, 2, False),
    "grid": PassConfig(64, 3, 1, False, persistent=False),
    "three stages": PassConfig(64, 3, 1, False),
}
_DQ_128 = {
    "128 keys": PassConfig(128, 2, 1, False),
    "plain": PassConfig(64, 3, 1, False),
    "grid": PassConfig(64, 3, 1, True, persistent=False),
}


def padded_dim(head_dim: int) -> int:
    """The head dimension that the kernels compute with."""
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256


def _forward_default(p: Problem, sm_count: int) -> str:
    dim, keys = padded_dim(p.head_dim), p.k_len
    if dim == 256:
        return "64 keys"
    if keys <= 362:
        return "grid"
    if dim == 128:
        return "64 keys" if p.causal and keys <= 724 else "128 keys"
    tiles = p.q_rows * p.heads / 192 / sm_count * (0.5 if p.causal else 1.0)
    return "three consumers" if tiles >= 4 and min(p.q_len, keys) >= 1449 else "two consumers"


def _dkdv_default(p: Problem) -> str:
    queries = p.q_len
    if padded_dim(p.head_dim) == 128:
        return "grid" if p.causal and queries > 1448 else "two buffers"
    if queries <= 724:
        return "plain"
    return "ahead, two buffers" if p.causal or queries <= 1448 else "ahead"


def _dq_default(p: Problem) -> str:
    keys = p.k_len
    if padded_dim(p.head_dim) == 64:
        return "plain" if keys <= 2896 else "ahead"
    if p.causal:
        return "plain" if keys <= 1448 else "grid" if keys <= 2896 else "128 keys"
    return "plain" if keys <= 724 else "128 keys" if keys <= 8192 else "grid"


def _first(configs: dict[str, T], name: str) -> list[T]:
    """All of `configs`, the one of that name first."""
    return [configs[name], *(config for other, config in configs.items() if other != name)]


@lru_cache(maxsize=1024)
def forward_configs(problem: Problem, device: Device) -> tuple[Any, ...]:
    """Those that fit shared memory, the default first."""
    dim = padded_dim(problem.head_dim)
    configs = {64: _FORWARD_64, 128: _FORWARD_128, 256: _FORWARD_256}[dim]
    found = _first(configs, _forward_default(problem, device.sm_count))
    return tuple(c for c in found if c.smem_bytes(dim) <= device.smem_bytes)


@lru_cache(maxsize=1024)
def backward_configs(problem: Problem, device: Device) -> tuple[Any, ...]:
    """Those that fit shared memory, the default first: every config of either pass stands in one of them."""
    dim = padded_dim(problem.head_dim)
    of_dkdv = _first(_DKDV_64 if dim == 64 else _DKDV_128, _dkdv_default(problem))
    of_dq = _first(_DQ_64 if dim == 64 else _DQ_128, _dq_default(problem))
    count = max(len(of_dkdv), len(of_dq))
    found = (BackwardConfig(of_dkdv[i % len(of_dkdv)], of_dq[i % len(of_dq)]) for i in range(count))
    return tuple(c for c in found if max(c.dkdv.smem_bytes(dim), c.dq.smem_bytes(dim)) <= device.smem_bytes)
