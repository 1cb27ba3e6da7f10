"""However zfx is installed, `zfx` and `zfx.passes` are there, typed, and no top-level `passes` is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
INSTALLED_AS = """
import importlib.util, pathlib, zfx, zfx.passes
print(pathlib.Path(zfx.__file__).resolve())
print(pathlib.Path(zfx.passes.__file__).resolve())
print(pathlib.Path(zfx.__file__).with_name("py.typed").is_file())
print(importlib.util.find_spec("passes") is None)
"""


def run(*command: object, cwd: Path) -> str:
    """The command's stdout; its stderr is in the failure."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the packages are made of, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("zfx", "passes"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", source, cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The Python of a new virtual environment that sees this one's packages, but not its (editable) zfx."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"])  # .pth files in there are not followed
    return tmp_path / "venv" / "bin" / "python"


def modules(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if "__pycache__" not in path.parts}


def test_the_link_makes_passes_a_part_of_zfx() -> None:
    assert os.readlink(ROOT / "zfx" / "passes") == "../passes"


def test_a_wheel_holds_every_module_once_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    expected = {f"zfx/{name}" for name in modules(ROOT / "zfx")} | {f"zfx/passes/{name}" for name in modules(ROOT / "passes")}
    data = {f"zfx/assets/{path.name}" for path in (ROOT / "zfx" / "assets").iterdir()}
    assert sorted(names) == sorted(expected | data | {"zfx/py.typed"})


def test_a_wheel_carries_the_licence(wheel: Path) -> None:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("LICENSE"))
    assert "The zfx authors" in zipfile.ZipFile(wheel).read(name).decode()


def test_the_licences_of_what_is_bundled_come_with_it() -> None:
    """ECharts' own file names what is compiled into it; each has its licence beside it."""
    library = (ROOT / "zfx" / "assets" / "echarts.min.js").read_text("utf-8")
    assert "Licensed to the Apache Software Foundation" in library[:200]
    for name, words in {
        "LICENSE-echarts": "Apache License",
        "NOTICE-echarts": "The Apache Software Foundation",
        "LICENSE-zrender": "Baidu Inc.",
        "LICENSE-d3": "Mike Bostock",
        "LICENSE-tslib": "Microsoft Corporation",
    }.items():
        assert words in (ROOT / "zfx" / "assets" / name).read_text("utf-8")


SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in ("folder", "sdist")]


@pytest.mark.parametrize("form", ["wheel", "editable", *SLOW])
def test_an_installed_zfx_has_passes_inside_and_not_beside(
    form: str, source: Path, environment: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if form == "wheel":
        what: list[object] = [request.getfixturevalue("wheel")]
    elif form == "sdist":
        run(environment, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, source, cwd=tmp_path)
        what = list(tmp_path.glob("*.tar.gz"))
    else:
        what = ["-e", source] if form == "editable" else [source]
    run(environment, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", *what, cwd=tmp_path)

    zfx, passes, typed, no_top_level_passes = run(environment, "-c", INSTALLED_AS, cwd=tmp_path).split()

    home = source if form == "editable" else environment.parent.parent
    assert Path(zfx).is_relative_to(home.resolve()) and Path(passes).is_relative_to(home.resolve())
    assert (typed, no_top_level_passes) == ("True", "True")
