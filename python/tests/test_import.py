"""`import mori` finds ours where it should."""

import os
import subprocess
import sys

import pytest

IS_OURS = "import mori, ferry.mori_compat as ours; print(mori is ours)"


def run(program, *, path=None, **environment):
    """Run a program in a new interpreter and return what it prints."""
    variables = {name: value for name, value in os.environ.items() if name != "FERRY_TAKEOVER"}
    if path:
        variables["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=variables | environment,
    )
    return ended.stdout.strip() or ended.stderr.strip().splitlines()[-1]


@pytest.fixture
def real(tmp_path):
    """Make a folder with another package named `mori`."""
    (tmp_path / "mori").mkdir()
    (tmp_path / "mori/__init__.py").write_text("")
    (tmp_path / "mori/cpp.py").write_text("who = 'real'")
    return tmp_path


def test_ours_is_found_without_the_real_one():
    assert run(IS_OURS) == "True"
    same = "import mori.io, mori.cpp, ferry.mori_compat.cpp as ours; from mori import cpp;"
    assert run(same + "print(cpp is ours is mori.cpp, mori.io.IOEngine.__module__)") == (
        "True ferry.mori_compat.io"
    )
    assert run("import mori; print(mori.io.StatusCode is mori.cpp.StatusCode)") == "True"
    assert run("import mori.nothing") == "ModuleNotFoundError: No module named 'mori.nothing'"


def test_nothing_of_ours_is_imported_before_it_is_asked_for():
    program = "import sys; print([name for name in sys.modules if name.split('.')[0] == 'ferry'])"
    assert run(program) == "[]"


def test_the_real_one_is_preferred_unless_told_otherwise(real):
    program = "import mori.cpp; print(getattr(mori.cpp, 'who', 'ours'))"
    assert run(program, path=real) == "real"
    assert run(program, path=real, FERRY_TAKEOVER="1") == "ours"
    assert run("import ferry; ferry.takeover(); " + program, path=real) == "ours"


def test_it_can_be_switched_off():
    expected = "ModuleNotFoundError: No module named 'mori'"
    assert run("import mori", FERRY_TAKEOVER="0") == expected


def test_a_folder_that_only_has_the_name_is_not_the_real_one(tmp_path):
    (tmp_path / "mori").mkdir()
    assert run(IS_OURS, path=tmp_path) == "True"


def test_torch_is_imported_by_nobody():
    assert run("import mori.io, mori.cpp, sys; print('torch' in sys.modules)") == "False"


def test_the_level_of_the_log_can_be_set():
    assert run("import mori.io as io; io.set_log_level('trace'); print('set')") == "set"
    assert "loud" in run("import mori.io as io; io.set_log_level('loud')")


def test_the_wheel_is_typed_and_documented():
    program = (
        "import ferry, ferry._ferry as native; from pathlib import Path;"
        "print((Path(ferry.__file__).parent / 'py.typed').exists(),"
        "[name for name, value in vars(native).items() if not name.startswith('_')"
        " and not (value.__doc__ or '').strip()])"
    )
    assert run(program) == "True []"
