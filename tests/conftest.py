"""Options of the gpu tier's random shapes."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("random shapes")
    default = int(os.environ.get("EXPERTILE_RANDOM_SHAPES", "2000"))
    group.addoption(
        "--random-shapes",
        type=int,
        default=default,
        metavar="N",
        help="shapes drawn by tests/gpu/test_random_shapes.py (default: $EXPERTILE_RANDOM_SHAPES or 2000)",
    )
    group.addoption("--random-seed", type=int, default=0, metavar="S", help="their seed (default: 0)")
    group.addoption("--random-out", metavar="FILE.json", help="where to write what was checked")


@pytest.fixture(scope="module", autouse=True)
def settled() -> Iterator[None]:
    """What is there before a file's first test stays: the garbage collector need not look through it again."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def cuda_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `tests/support/cuda_emulator.py` keeps what g++ has made, for all processes of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cuda"
    folder.mkdir(exist_ok=True)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After the audit's tests: how often it is right over its corpus."""
    ran = [r for r in terminalreporter.stats.get("passed", []) if r.nodeid.startswith("tests/audit/test_corpus.py")]
    if ran:
        from tests.audit import corpus

        terminalreporter.write_line(str(corpus.score()))
