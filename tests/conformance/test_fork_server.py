"""The fork server: what a command that runs under it can ask for, and that nothing outlives it."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 60
# What a client's program can use.
CLIENT = """
import json, os, socket, sys

def ask(**line):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["FERRY_RANKS"])
    connection.sendall(json.dumps(line).encode() + b"\\n")
    return connection.makefile("rw")

def answer(stream):
    return json.loads(stream.readline())
"""
# A bootstrap server of their own is all that these ranks need.
PREFILL = """
import socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
prefill = {"mode": "prefill", "host": "127.0.0.1", "port": port, "serve_bootstrap": True}
"""


def run(program):
    """Run a client under a fork server; return how it ended and the JSON that it printed."""
    command = [sys.executable, str(HERE / "fork_server.py"), sys.executable, "-c", CLIENT + program]
    ended = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S
    )
    return ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()]


def has_ended(pid):
    """Whether a process ends in time; one that is nobody's any more has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([process], [], [], TIMEOUT_S)
        return bool(readable)
    finally:
        os.close(process)


@pytest.mark.parametrize("code", [0, 3])
def test_it_ends_as_its_command_does(code):
    assert run(f"sys.exit({code})") == (code, [])


def test_checks_tell_what_runs_from_what_does_not():
    _, answers = run("""
for check in ("import numpy", "import no_such_module", "import numpy"):
    print(json.dumps(answer(ask(check=check))["ok"]))
""")
    assert answers == [True, False, True]


def test_a_rank_is_a_process_with_an_environment_of_its_own():
    _, (others, ranks) = run(f"""
{PREFILL}
ranks = [ask(env={{"SGLANG_HOST_IP": host}}, configuration={{**prefill, "serve_bootstrap": serves}})
         for host, serves in (("127.0.0.1", True), ("127.0.0.1", False), ("127.0.0.2", False))]
up = [answer(rank) for rank in ranks]
# Ours, the root's and each other's: no number is there twice.
print(json.dumps([os.getpid(), os.getppid()]))
print(json.dumps([[rank["ok"], rank["pid"], rank["engine_key"]] for rank in up]))
""")
    assert [ok for ok, _, _ in ranks] == [True] * 3
    assert len({*others, *(pid for _, pid, _ in ranks)}) == 5
    hosts = [key.rsplit("-", 1)[-1] for _, _, key in ranks]
    assert ["127.0.0.2" in key for _, _, key in ranks] == [False, False, True], hosts
    assert all(has_ended(pid) for _, pid, _ in ranks)


def test_a_rank_ends_with_its_connection():
    _, (ended,) = run(f"""
{PREFILL}
import select
rank = ask(env={{}}, configuration=prefill)
process = os.pidfd_open(answer(rank)["pid"])
rank.close()
print(json.dumps(bool(select.select([process], [], [], {TIMEOUT_S})[0])))
""")
    assert ended


def test_why_a_rank_did_not_start_is_the_answer():
    _, answers = run("""
wrong = {"SGLCONF_SGLANG": "/nowhere"}
print(json.dumps(answer(ask(env=wrong, configuration={}))))
print(json.dumps(answer(ask(env={}, configuration={"mode": "prefill"}))))
print(json.dumps(answer(ask(nothing=1))))
""")
    assert not any(answer["ok"] for answer in answers)
    for answer, reason in zip(answers, ("/nowhere", "host", "configuration"), strict=True):
        assert reason in answer["error"]
