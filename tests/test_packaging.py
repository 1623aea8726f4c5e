"""What is installed: every file of the package is in the wheel, and all that its build reads is in the archive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from apcbatch.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow
# setup.py only adds the compiled modules to what pyproject.toml says.
BUILD = """
import sys
from setuptools import setup
out = sys.argv[1]
build = ["egg_info", "--egg-base", out, "build", "--build-base", out + "/build"]
setup(script_args=["-q", *build, "bdist_wheel", "-d", out, "sdist", "-d", out])
"""


def tracked(*folders: str) -> set[str]:
    """The files of the tree below some folders, those that are new included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("this tree is not a git checkout")
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, without its compiled modules, and with the source archive. They are made from a copy of
    the tree, as the archive is put together in the tree: two processes that test at once would be in each other's
    way."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("packages")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=tree, check=True, capture_output=True)
    return folder


@pytest.mark.effort(3)
def test_the_wheel_holds_the_whole_package(built: Path) -> None:
    """Fault: packages and data are listed by hand, and a wheel lacks the one that was added last: a command
    ended in ModuleNotFoundError once installed."""
    (wheel,) = built.glob("*.whl")
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == tracked("apcbatch")


def test_the_source_archive_can_be_built(built: Path) -> None:
    """Fault: headers and CUDA sources are in the tree and not in the archive, which then does not compile."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    needed = tracked("apcbatch", "csrc", "pyproject.toml", "README.md", "LICENSE")
    assert needed <= names, sorted(needed - names)
    assert {name.partition("/")[0] for name in names - needed} <= {
        "PKG-INFO", "MANIFEST.in", "setup.cfg", "setup.py", "constraints.txt",
    }  # fmt: skip


def test_the_package_says_its_version(built: Path) -> None:
    """Fault: the archive's name and `apcbatch --version` are two versions."""
    assert sorted(path.name for path in built.iterdir() if path.suffix in (".whl", ".gz")) == [
        f"apcbatch-{VERSION}-py3-none-any.whl",
        f"apcbatch-{VERSION}.tar.gz",
    ]


OF_MAKE = ("MAKEFLAGS", "MFLAGS", "CUDA", "APCBATCH_CUDA", "PYTHON")  # which a make that runs the tests gives to them


def made(*arguments: str) -> str:
    """What make says that it would do, as on a fresh clone."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    command = ["make", "--always-make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("target", ["demo", "test"])
def test_setting_up_says_its_steps_and_builds_no_cuda(target: str) -> None:
    """Fault: minutes of silence while it is set up, lines that break at 80 columns, and CUDA code that is compiled for
    an hour because an nvcc is there."""
    said = [line.split('"')[1] for line in made(target).splitlines() if line.startswith("echo ")]
    assert max(map(len, said)) <= 80 and "about 5 minutes, 2 GB of disk" in said[0]
    assert [line[:7] for line in said if " of 3: " in line][:3] == ["1 of 3:", "2 of 3:", "3 of 3:"]
    assert "APCBATCH_CUDA := 0" in made("--print-data-base", target) and "for CUDA" not in " ".join(said)
    assert "APCBATCH_CUDA := 1" in made("--print-data-base", target, "CUDA=1") and "for CUDA" in made(target, "CUDA=1")
