"""What is installed is what stands in the repository, under names that meet no user's module."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
OURS = ("memadvisor", "analyzers", "tui")


def _setuptools_is_new_enough():
    try:
        from setuptools import __version__
    except ImportError:
        return False
    return int(__version__.split(".")[0]) >= 77


def _build(function, source, out):
    program = f"from setuptools import build_meta; print(build_meta.{function}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source, check=True, capture_output=True, text=True
    )
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built from a copy: a build leaves folders behind, and an old one's files would leak into the wheel."""
    if not _setuptools_is_new_enough():
        pytest.skip("setuptools 77 or newer is needed to build")
    source = tmp_path_factory.mktemp("source")
    for folder in OURS:
        copytree(ROOT / folder, source / folder, ignore=ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / file, source)
    return _build("build_sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the sdist, as an installer would."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later; later versions warn where none is set
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(unpacked)
    return _build("build_wheel", next(unpacked.iterdir()), tmp_path_factory.mktemp("wheel"))


def test_every_folder_with_code_is_a_listed_package():
    folders = {
        init.parent.relative_to(ROOT).parts for name in OURS for init in (ROOT / name).rglob("__init__.py")
    }
    installed = {".".join(f if f[0] == "memadvisor" else ("memadvisor", *f)) for f in folders}

    assert installed == set(SETUPTOOLS["packages"])


def test_every_python_file_of_ours_lies_in_a_package():
    for name in OURS:
        for path in (ROOT / name).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def test_the_wheel_holds_every_module_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        (path.relative_to(ROOT) if folder == "memadvisor" else "memadvisor" / path.relative_to(ROOT))
        for folder in OURS
        for path in (ROOT / folder).rglob("*.py")
    }

    assert {str(path) for path in expected} <= names
    assert "memadvisor/py.typed" in names


def test_the_wheel_brings_one_import_name_alone(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"memadvisor"}


def test_an_installed_wheel_imports_analyzers_from_inside(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import memadvisor, memadvisor.analyzers, memadvisor.tui, importlib.util as u;"
        "print(memadvisor.analyzers.__file__, u.find_spec('analyzers'), u.find_spec('tui'), len(memadvisor.__path__))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )

    assert done.stdout.split() == [str(tmp_path / "memadvisor/analyzers/__init__.py"), "None", "None", "1"]


def test_a_checkout_runs_without_being_installed(tmp_path):
    """`python -m memadvisor` from the repository's root, in an interpreter that knows of no installation."""
    program = "import sys, runpy; sys.argv = ['memadvisor', '--version']; runpy.run_module('memadvisor', run_name='__main__')"
    shim = "import memadvisor.analyzers as a, memadvisor.tui as t; print(a.__file__, t.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line, expected in (
        (program, f"memadvisor {PROJECT['project']['version']}"),
        (shim, f"{ROOT / 'analyzers/__init__.py'} {ROOT / 'tui/__init__.py'}"),
    ):
        done = subprocess.run(
            [sys.executable, "-S", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.stdout.strip() == expected, done.stderr


def test_the_version_is_written_the_same_twice():
    import memadvisor

    assert memadvisor.__version__ == PROJECT["project"]["version"]


def test_ci_installs_and_tests_as_the_readme_says():
    commands = (ROOT / ".ci/run").read_text()
    readme = (ROOT / "README.md").read_text()

    assert "pip install -e '.[dev]'" in readme
    assert "pip install --quiet -e '.[dev]'" in commands
    assert "pytest -n 2 --dist loadfile" in readme and "pytest -n 2 --dist loadfile" in commands
    for check in ("ruff check .", "ruff format --check .", "python tools/typecheck.py"):
        assert check in commands


def test_importing_memadvisor_imports_neither_torch_nor_the_views():
    """torch alone takes seconds, and the views' packages have no place in a training process."""
    program = "import sys, memadvisor.cli.main; print(sorted({'torch','textual','plotly','pandas','rich','scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)

    assert done.stdout.strip() == "[]"
