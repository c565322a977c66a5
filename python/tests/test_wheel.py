"""The wheel installs into an empty environment, and the README's example runs there."""

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = ["python3", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14"]


def find(python):
    """Return an interpreter that runs, and `None` if there is none of this name."""
    path = shutil.which(python)
    needed = [path, "-c", "import venv, ensurepip"]
    works = path and subprocess.run(needed, check=False, capture_output=True).returncode == 0
    return path if works else None


@pytest.mark.parametrize("python", [python for python in PYTHONS if find(python)])
def test_the_readme_runs_in_an_empty_environment(python, tmp_path):
    wheels = list(Path(os.environ["FERRY_WHEELS"]).glob("pd_ferry-*.whl"))
    assert len(wheels) == 1, f"one wheel in FERRY_WHEELS, there are {wheels}"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    example = tmp_path / "example.py"
    example.write_text(blocks[0])
    environment = {name: value for name, value in os.environ.items() if "PYTHON" not in name}

    def run(*command):
        subprocess.run(command, check=True, timeout=300, env=environment, cwd=tmp_path)

    run(find(python), "-m", "venv", "empty")
    inside = str(tmp_path / "empty/bin/python")
    run(inside, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheels[0]))
    run(inside, str(example))
    run(inside, "-c", "import mori.io, ferry.mori_compat as ours; assert mori is ours")


def test_the_wheel_runs_on_every_python_of_a_manylinux_platform():
    (wheel,) = Path(os.environ["FERRY_WHEELS"]).glob("pd_ferry-*.whl")
    assert re.fullmatch(r"pd_ferry-[\d.]+-cp310-abi3-manylinux_2_\d+_x86_64\.whl", wheel.name)


def test_the_wheel_needs_no_driver_of_devices_or_network_devices(tmp_path):
    (wheel,) = Path(os.environ["FERRY_WHEELS"]).glob("pd_ferry-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.search(r"\.so(\.\d+)*$", name)]
        archive.extractall(tmp_path)
    # What providers and drivers bring is never bundled, either.
    assert names == ["ferry/_ferry.abi3.so"]
    needed = subprocess.run(
        ["ldd", tmp_path / names[0]], check=True, capture_output=True, text=True
    ).stdout
    assert "libc.so" in needed
    assert not re.search(r"verbs|rdmacm|mlx|cuda|hip|hsa|rocm", needed, re.IGNORECASE), needed
