"""The Python blocks of a page, and a world of one process for those that want a group."""

import re
import socket

import pytest
import torch.distributed as dist

_BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?^```python\n(.*?)^```", re.S | re.M)


def blocks(page):
    """The code of every block that is to run, in order. One without a run says why, on the line above it."""
    return [code for reason, code in _BLOCK.findall(page.read_text(encoding="utf-8")) if not reason]


@pytest.fixture
def alone(monkeypatch):
    """What torchrun sets, for a world of one process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
