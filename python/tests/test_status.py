"""Waiting for transfers, as the original does it."""

import threading
import time

import pytest

from conftest import make_engine
from ferry.mori_compat.cpp import StatusCode, TransferStatus

SHORT_MS = 30


def in_progress():
    """Return a status whose transfer has not ended."""
    status = TransferStatus()
    status.SetCode(StatusCode.IN_PROGRESS)
    return status


def ended(code):
    """Return a status that has this code."""
    status = TransferStatus()
    status.SetCode(code)
    return status


def later(action, delay_s=SHORT_MS / 1000):
    """Do something soon in another thread."""
    timer = threading.Timer(delay_s, action)
    timer.start()
    return timer


def wait_all(statuses, timeout_ms=-1):
    """Wait by an engine, as the API wants it."""
    return wait_all.engine.wait_all(statuses, timeout_ms)


@pytest.fixture(autouse=True, scope="module")
def _engine():
    wait_all.engine = make_engine("waiting")


def test_a_new_status_has_begun_nothing():
    status = TransferStatus()
    assert status.Code() is StatusCode.INIT
    assert status.Message() == ""
    assert status.Init()
    assert not (status.InProgress() or status.Succeeded() or status.Failed())
    status.Wait()
    assert status.WaitFor() is StatusCode.INIT


def test_updates_stick_to_a_failure_but_not_to_success():
    status = TransferStatus()
    status.Update(StatusCode.SUCCESS, "success")
    assert status.Succeeded()
    status.Update(StatusCode.ERR_RDMA_OP, "lost after all")
    assert (status.Code(), status.Message()) == (StatusCode.ERR_RDMA_OP, "lost after all")
    assert status.Failed()
    status.Update(StatusCode.SUCCESS, "success")
    assert status.Failed()
    status.SetCode(StatusCode.SUCCESS)
    status.SetMessage("set")
    assert (status.Succeeded(), status.Message()) == (True, "set")
    with pytest.raises(TypeError):
        status.SetCode(0)
    with pytest.raises(TypeError):
        status.Update(0, "no code")


@pytest.mark.parametrize("code", [StatusCode.SUCCESS, StatusCode.ERR_BAD_STATE, StatusCode.INIT])
def test_a_wait_ends_with_the_transfer(code):
    status = in_progress()
    later(lambda: status.Update(code, "now"))
    assert status.WaitFor(10_000) is code
    status = in_progress()
    later(lambda: status.SetCode(code))
    status.Wait()
    assert status.Code() is code


def test_a_wait_ends_with_its_time():
    status = in_progress()
    assert status.WaitFor(0) is StatusCode.IN_PROGRESS
    begun = time.monotonic()
    assert status.WaitFor(SHORT_MS) is StatusCode.IN_PROGRESS
    assert time.monotonic() - begun >= SHORT_MS / 1000


def test_many_threads_wait_for_one_status():
    status, seen = in_progress(), []
    wait = lambda: seen.append(status.WaitFor(10_000))  # noqa: E731
    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    status.Update(StatusCode.SUCCESS, "success")
    for thread in threads:
        thread.join(10)
    assert seen == [StatusCode.SUCCESS] * 8


def test_a_waiting_thread_lets_others_run():
    status, counted = in_progress(), []
    counter = threading.Thread(target=lambda: counted.extend(range(1000)))
    later(counter.start, 0)
    later(lambda: status.Update(StatusCode.SUCCESS, "success"), 0.2)
    status.Wait()
    counter.join(10)
    assert len(counted) == 1000


def test_all_of_none_have_succeeded():
    for timeout_ms in (-1, 0, SHORT_MS):
        assert wait_all([], timeout_ms) is StatusCode.SUCCESS


def test_one_look_prefers_a_failure_to_what_is_not_over():
    failed = ended(StatusCode.ERR_RDMA_OP)
    other = ended(StatusCode.ERR_NOT_FOUND)
    assert wait_all([in_progress(), failed, other], 0) is StatusCode.ERR_RDMA_OP
    assert wait_all([in_progress(), ended(StatusCode.SUCCESS)], 0) is StatusCode.IN_PROGRESS
    assert wait_all([ended(StatusCode.SUCCESS)] * 3, 0) is StatusCode.SUCCESS
    assert wait_all([TransferStatus()], 0) is StatusCode.INIT


def test_without_a_limit_all_are_waited_for_and_the_first_failure_is_returned():
    slow = in_progress()
    later(lambda: slow.Update(StatusCode.SUCCESS, "success"))
    failed = ended(StatusCode.ERR_BAD_STATE)
    assert wait_all([failed, slow], -1) is StatusCode.ERR_BAD_STATE
    assert slow.Succeeded()
    assert wait_all([slow, TransferStatus()], -1) is StatusCode.INIT


def test_the_time_is_shared_and_a_failure_seen_so_far_counts():
    begun = time.monotonic()
    assert wait_all([in_progress() for _ in range(10)], SHORT_MS) is StatusCode.IN_PROGRESS
    assert time.monotonic() - begun < 10 * SHORT_MS / 1000
    failed = ended(StatusCode.ERR_GPU_OP)
    assert wait_all([failed, in_progress()], SHORT_MS) is StatusCode.ERR_GPU_OP
    assert wait_all([in_progress(), failed], SHORT_MS) is StatusCode.IN_PROGRESS
    assert wait_all((ended(StatusCode.SUCCESS),), SHORT_MS) is StatusCode.SUCCESS
