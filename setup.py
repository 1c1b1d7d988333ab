"""What a build adds to the files of src/: the records that commands show, taken from results/, and the commit.

Everything else about the package stands in pyproject.toml.
"""

import lzma
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))  # neither module imports more than the standard library

from expertile.lab.race.record import shown_files  # noqa: E402
from expertile.version import COMMIT_FILE, commit  # noqa: E402


def _write_commit(package: Path) -> None:
    known = commit()
    if known is not None:
        (package / COMMIT_FILE).write_text(known + "\n", encoding="ascii")


class BuildPackage(build_py):
    """With records and commit; an editable install finds them in the work tree."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "expertile")
        shutil.rmtree(package / "results", ignore_errors=True)  # of an earlier build
        for source, target in self._records():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(lzma.compress(source.read_bytes(), preset=9))
        _write_commit(package)

    def get_source_files(self) -> list[str]:
        """What an sdist holds as well."""
        return [*super().get_source_files(), *(str(source) for source, _ in self._records())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, *(str(target) for _, target in self._records())]

    def _records(self) -> list[tuple[Path, Path]]:
        """(file in the work tree, file in the built package), the former relative to the work tree."""
        inside = [path.relative_to(ROOT) for path in shown_files(ROOT / "results")]
        return [(path, Path(self.build_lib, "expertile", f"{path}.xz")) for path in inside]


class SourceDistribution(sdist):
    """With the commit, for the wheel that is built from it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _write_commit(Path(base_dir, "src", "expertile"))


setup(cmdclass={"build_py": BuildPackage, "sdist": SourceDistribution})
