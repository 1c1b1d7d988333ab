"""The commit that records name: git's, a build's or a variable's, and never another project's."""

import re
import subprocess

import pytest

from expertile import version


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A work tree with one commit, laid out as this project's."""
    for name, value in (("GIT_AUTHOR", "a"), ("GIT_COMMITTER", "a")):
        monkeypatch.setenv(f"{name}_NAME", value)
        monkeypatch.setenv(f"{name}_EMAIL", f"{value}@example.org")
    package = tmp_path / "src" / "expertile"
    package.mkdir(parents=True)
    (package / "kernel.py").write_text("1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return tmp_path.resolve()


@pytest.fixture
def asked(monkeypatch):
    """`commit` of a package in the given tree."""

    def of(root):
        monkeypatch.setattr(version, "_PACKAGE", root / "src" / "expertile")
        return version.commit.__wrapped__()

    monkeypatch.delenv(version.COMMIT_VARIABLE, raising=False)
    return of


def head(root):
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_of_a_work_tree(tree, asked):
    assert asked(tree) == head(tree)[:12]


@pytest.mark.parametrize(
    "path, mark", [("src/expertile/kernel.py", "+dirty"), ("src/expertile/new.py", "+dirty"), ("notes.md", "")]
)
def test_a_work_tree_that_differs_from_its_commit_says_so_if_it_is_the_package_that_differs(tree, asked, path, mark):
    (tree / path).write_text("2\n")
    assert asked(tree) == head(tree)[:12] + mark


def test_a_package_inside_another_projects_work_tree_does_not_take_its_commit(tree, asked):
    inner = tree / "vendored"
    (inner / "src" / "expertile").mkdir(parents=True)
    assert asked(inner) is None


def test_variables_of_git_that_name_another_repository_change_nothing(tree, asked, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    wanted = head(tree)[:12]
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert asked(tree) == wanted


def test_a_build_says_its_commit_and_no_work_tree_around_it_does(tree, asked):
    (tree / "src" / "expertile" / version.COMMIT_FILE).write_text("0123abcd4567+dirty\n")
    assert asked(tree) == "0123abcd4567+dirty"


def test_a_tree_without_git_has_the_commit_of_the_variable(tmp_path, asked, monkeypatch):
    assert asked(tmp_path) is None
    monkeypatch.setenv(version.COMMIT_VARIABLE, "")
    assert asked(tmp_path) is None
    monkeypatch.setenv(version.COMMIT_VARIABLE, "0123abcd")
    assert asked(tmp_path) == "0123abcd"


def test_the_variable_outvotes_git_only_where_the_tree_differs(tree, asked, monkeypatch):
    monkeypatch.setenv(version.COMMIT_VARIABLE, "0123abcd")
    assert asked(tree) == head(tree)[:12]
    (tree / "src/expertile/kernel.py").write_text("2\n")
    assert asked(tree) == "0123abcd"


@pytest.mark.parametrize("value", ["main", "0123", "0123abcd dirty", "0123ABCD"])
def test_a_variable_that_holds_no_commit_is_refused(tmp_path, asked, monkeypatch, value):
    monkeypatch.setenv(version.COMMIT_VARIABLE, value)
    with pytest.raises(ValueError, match=re.escape(f"got {value!r}")):
        asked(tmp_path)


def test_without_git_nothing_is_said(tree, asked, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert asked(tree) is None
