"""One direction: leaves <- ops <- moe <- integrations, lab <- cli, read off the imports themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "expertile"
RANK = {
    "device": 0, "roofline": 0, "ragged": 0, "quant": 0, "int4": 0, "ops": 1, "moe": 2, "integrations": 3, "lab": 3,
    "audit": 3, "cli": 4,
}  # fmt: skip


def _room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "expertile" and parts[1] in RANK else None


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _modules() -> list[Path]:
    return [p for p in sorted(SRC.rglob("*.py")) if (p.name != "__main__.py" and p.parent != SRC) or p.stem in RANK]


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_one_way(path):
    room = path.relative_to(SRC).parts[0].removesuffix(".py")
    for module in _imports(path):
        target = _room(module)
        assert target is None or RANK[target] <= RANK[room], f"{room} must not import {module}"


@pytest.mark.parametrize("path", sorted((SRC / "audit").rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_audit_needs_facts_of_devices_and_no_more(path):
    ours = {m for m in _imports(path) if m.startswith("expertile.")}
    assert all(m.split(".")[1] in ("audit", "device", "roofline") for m in ours), ours
    others = {m.split(".")[0] for m in _imports(path)} - {"expertile", "markdown_it"}
    assert others <= set(sys.stdlib_module_names), others


def test_every_room_has_a_rank():
    rooms = {p.relative_to(SRC).parts[0].removesuffix(".py") for p in SRC.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms <= RANK.keys()


def test_import_does_not_touch_cuda_or_optional_libraries():
    code = (
        "import sys, expertile, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = {'plotly', 'quack', 'nvmath', 'transformers', 'cutlass'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
