"""The sdist and the wheel that is built from it: what they hold, and that an installed package finds its records."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from expertile.lab.race.record import read, shown_files
from expertile.version import COMMIT_VARIABLE, __version__

ROOT = Path(__file__).parents[1]
COMMIT = "0123abcd4567"
MOST_NBYTES = 1.7e6


def _build(kind, source, out):
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    env = {**os.environ, COMMIT_VARIABLE: COMMIT}
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=source, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel made of it), of a copy of the tree without git."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "results", tree / "results")
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    sdist = _build("sdist", tree, out)
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return sdist, _build("wheel", unpacked / f"expertile-{__version__}", out)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A folder to import the wheel's package from."""
    place = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(place)
    return place


def _run(place, *words):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_small_and_holds_every_file_of_the_package(built, installed):
    assert built[1].stat().st_size < MOST_NBYTES
    here = ROOT / "src"
    wanted = {
        path.relative_to(here)
        for path in (here / "expertile").rglob("*")
        if path.is_file() and path.suffix in (".py", ".cu", ".json", ".css", ".js", ".typed")
    }
    assert wanted <= {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}


def test_the_wheel_brings_the_records_that_commands_show_and_no_others(installed):
    found = {
        path.relative_to(installed / "expertile" / "results"): path
        for path in (installed / "expertile" / "results").rglob("*")
        if path.is_file()
    }
    shown = {Path(f"{path.relative_to(ROOT / 'results')}.xz"): path for path in shown_files(ROOT / "results")}
    assert found.keys() == shown.keys()
    for name, path in found.items():
        assert read(path) == read(shown[name])


def test_an_installed_package_answers_from_its_records_as_the_tree_does(installed):
    impact = ("-m", "expertile", "impact", "--model", "gpt-oss-120b")
    printed = _run(installed, *impact)
    assert "GPU-hours" in printed
    assert printed == _run(ROOT / "src", *impact)


def test_an_installed_package_knows_its_commit(installed):
    code = "import expertile.version as v; print(v.__file__, v.__version__, v.commit())"
    file, version, commit = _run(installed, "-c", code).split()
    assert Path(file).is_relative_to(installed)
    assert (version, commit) == (__version__, COMMIT)


def test_metadata(installed):
    (info,) = installed.glob("*.dist-info")
    meta = message_from_bytes((info / "METADATA").read_bytes())
    assert (meta["Name"], meta["Version"], meta["License-Expression"]) == ("expertile", __version__, "Apache-2.0")
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    needed = [line for line in meta.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match("[a-z]+", line)[0] for line in needed} == {"torch", "triton", "numpy"}
