"""The code in README.md's section Use runs on a CPU."""

import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

README = Path(__file__).parents[1] / "README.md"


def _use():
    section = README.read_text(encoding="utf-8").partition("\n## Use\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)


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


def test_the_code_of_use_runs(alone, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain, parallel, _ = _use()
    names = {}
    exec(plain, names)
    assert "backend:" in capsys.readouterr().out
    x, layer = names["x"], names["layer"]
    assert names["out"].isfinite().all() and names["h"].equal(x + x)
    exec(parallel, names)
    assert names["y"].equal(layer(x))


def test_register_of_use_runs():
    pytest.importorskip("transformers", minversion="5.7")
    exec(_use()[2], {})
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert "expertile" in ALL_EXPERTS_FUNCTIONS


def test_every_page_is_listed():
    pages = {path.name for path in (README.parent / "docs").glob("*.md")}
    assert pages == set(re.findall(r"\(docs/([\w-]+\.md)\)", README.read_text(encoding="utf-8")))
