"""One direction: leaves <- ops <- moe <- integrations, lab <- cli, read off the imports themselves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import expertile

SRC = Path(__file__).parents[1] / "src" / "expertile"
RANK = {
    "version": 0,
    "device": 0,
    "gpus": 0,
    "roofline": 0,
    "suggest": 0,
    "ragged": 0,
    "timers": 0,
    "formats": 1,
    "ops": 2,
    "moe": 3,
    "ladder": 3,
    "integrations": 4,
    "lab": 4,
    "audit": 4,
    "cli": 5,
}
# The rooms of ops from the ground up: each imports those before it alone.
OPS = (
    "backend",
    "checks",
    "measure",
    "torch_op",
    "launch",
    "hopper",
    "rows",
    "pointwise",
    "attention",
    "grouped_mm",
    "gathered_mm",
    "low_rank",
    "weight_only_mm",
    "scaled_grouped_mm",
    "quantize",
    "any_weight",
)
# Those of lab likewise; rooms of one line do not know each other.
LAB = ("measure", "race", "operators report flashinfer", "traffic bench")


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


def _name(path: Path) -> str:
    """The module that a file is."""
    return ".".join(path.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {_name(path): path for path in sorted(SRC.rglob("*.py"))}


def _reached(path: Path) -> set[str]:
    """The modules of the package that a file imports, lazily or for types alone too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return (found & FILES.keys()) - {_name(path)}


def test_no_file_imports_itself_in_a_circle():
    reached = {name: _reached(path) for name, path in FILES.items()}
    while leaves := [name for name, found in reached.items() if not found & reached.keys()]:
        for name in leaves:
            del reached[name]
    # What is left lies on a circle, or above one.
    assert not reached, sorted(reached)


def test_nobody_imports_a_private_name_of_another_package():
    for name, path in FILES.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for module in (m for m in _imports(path) if m.startswith("expertile.")):
            parts = module.split(".")
            for place, part in enumerate(parts):
                owner = ".".join(parts[:place])
                if owner in FILES and FILES[owner].name != "__init__.py":
                    owner = owner.rpartition(".")[0]
                private = part.startswith("_") and not part.startswith("__")
                assert not private or f"{package}.".startswith(f"{owner}."), f"{name} imports {module}"


def test_the_rooms_of_ops_stand_on_one_another():
    for name, path in FILES.items():
        if name.startswith("expertile.ops."):
            room = OPS.index(name.split(".")[2])
            for module in _reached(path):
                if module.startswith("expertile.ops."):
                    assert OPS.index(module.split(".")[2]) <= room, f"{name} imports {module}"


def test_the_rooms_of_lab_stand_on_one_another():
    floor = {room: index for index, rooms in enumerate(LAB) for room in rooms.split()}
    for name, path in FILES.items():
        if name.startswith("expertile.lab."):
            room = name.split(".")[2]
            for module in (m for m in _reached(path) if m.startswith("expertile.lab.")):
                other = module.split(".")[2]
                assert other == room or floor[other] < floor[room], f"{name} imports {module}"


@pytest.mark.parametrize("path", sorted((SRC / "audit").rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_audit_needs_facts_of_devices_and_no_more(path):
    ours = {m for m in _imports(path) if m.startswith("expertile.")}
    assert all(m.split(".")[1] in ("audit", "device", "roofline") for m in ours), ours
    others = {m.split(".")[0] for m in _imports(path)} - {"expertile", "markdown_it"}
    assert others <= set(sys.stdlib_module_names), others


def test_every_room_has_a_rank():
    rooms = {p.relative_to(SRC).parts[0].removesuffix(".py") for p in SRC.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms <= RANK.keys()


def child(code, *args):
    """Run `code` in a process of its own, where nothing is imported yet."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_use_does_not_touch_cuda_or_optional_libraries():
    child(
        "import sys, expertile as xt, torch\n"
        "for name in xt.__all__: getattr(xt, name)\n"
        "assert not torch.cuda.is_initialized()\n"
        "extra = {'typer', 'rich', 'markdown_it', 'quack', 'nvmath', 'transformers', 'cutlass', 'torch._dynamo'}\n"
        "assert not extra & set(sys.modules), extra & set(sys.modules)\n"
    )


def test_the_package_itself_is_imported_without_torch():
    child("import sys, expertile\nassert not {'torch', 'triton', 'numpy'} & set(sys.modules)\n")


def test_public_names_are_those_that_dir_lists_and_types_know():
    init = ast.parse((SRC / "__init__.py").read_text())
    (typed,) = (n for n in init.body if isinstance(n, ast.If))
    known = {alias.name: n.module for n in typed.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert known == expertile._LATER
    assert dir(expertile) == sorted(expertile.__all__) == sorted([*known, "__version__"])


def test_a_name_first_met_inside_torch_compile_is_found():
    child(
        "import torch, expertile as xt\n"
        "f = torch.compile(lambda x: xt.softmax(x), backend='eager', fullgraph=True)\n"
        "x = torch.randn(3, 5)\n"
        "torch.testing.assert_close(f(x), x.softmax(-1))\n"
    )


@pytest.mark.parametrize("words", [["--help"], ["audit", "--help"], []], ids=" ".join)
def test_the_overview_and_audit_do_not_import_torch(words):
    child(
        "import sys\n"
        "from expertile.cli import main\n"
        "sys.argv[0] = 'expertile'\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n",
        *words,
    )


@pytest.mark.parametrize(
    "missing, words",
    [("typer", ["--help"]), ("rich", ["doctor"]), ("markdown_it", ["audit", str(SRC.parents[1] / "README.md")])],
)
def test_a_command_without_the_extra_names_it_in_one_sentence(missing, words):
    code = (
        f"import sys\nsys.modules[{missing!r}] = None\nsys.argv[0] = 'expertile'\n"
        "from expertile.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"expertile: the command needs {missing}, which pip install 'expertile[lab]' brings\n"
