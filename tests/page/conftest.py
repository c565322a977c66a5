"""The browser and the servers of each test; both end with it."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

import fleet

# A change must be on the page in this time on a busy machine; it is there at once on an idle one.
DEADLINE_MS = 15_000
BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
SCREENSHOTS = Path(os.environ.get("FERRY_SCREENSHOTS", fleet.ROOT / "target/page-screenshots"))

expect.set_options(timeout=DEADLINE_MS)


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, without a window."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path, f"no browser: none of {BROWSERS} is installed; `make test-page` installs it"
    # Its own sandbox needs what a container or root does not have; it opens this server only.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def ending():
    """Ends what a test has started, the newest first, whatever happens."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def start(ending):
    """Starts a bootstrap server that probes every second."""

    def start(*names, probe=True, options=(), **others):
        probing = ["--probe-interval", "1" if probe else "0", "--probe-misses", "2"]
        server = fleet.BootstrapServer(*names, options=[*probing, *options], **others)
        ending.callback(server.kill)
        return server

    return start


@pytest.fixture
def register(ending):
    """Registers ranks that are listening sockets, and returns them by place."""

    def register(server, engine, sizes=(1, 1, 1, 1), without=(), only=None):
        ranks = {}
        for place in only or fleet.places(sizes):
            if place not in without:
                ranks[place] = ending.enter_context(
                    contextlib.closing(fleet.Socket(server, engine, place, sizes))
                )
        return ranks

    return register


@pytest.fixture
def real_ranks(ending, tmp_path):
    """Prefill and decode ranks of running services, which have moved one request."""

    def real_ranks(server, name):
        ranks = {}
        for role in ["prefill", "decode"]:
            folder = tmp_path / role
            folder.mkdir()
            service = fleet.TransferService(folder)
            ending.callback(service.kill)
            own = server.engines[name] if role == "prefill" else None
            ranks[role] = [fleet.Rank(service, role, own, 2, tp_rank) for tp_rank in range(2)]
            for rank in ranks[role]:
                ending.callback(rank.close)
        fleet.cross(ranks["prefill"], ranks["decode"], 7, server.engines[name])
        return ranks

    return real_ranks


@pytest.fixture
def open_page(browser, ending):
    """Opens the page, and fails the test for any error in it and any request to elsewhere."""
    faults = []

    def open_page(server, *, wait=True, before=None, **options):
        options = {"viewport": {"width": 1280, "height": 860}, **options}
        context = browser.new_context(**options)
        ending.callback(context.close)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(f"an error in the page: {error}"))
        page.on("console", lambda message: faults.extend(policy_fault(message)))
        page.on("request", lambda request: faults.extend(request_fault(server, request)))
        if before:
            before(page)
        page.goto(server.url)
        if wait:
            expect(page.locator("h1.calm, h1.failing")).to_be_visible()
        return page

    yield open_page
    assert faults == []


def policy_fault(message):
    """What breaks the content security policy is told on the console only."""
    return [f"console: {message.text}"] if "Content Security Policy" in message.text else []


def request_fault(server, request):
    return [] if request.url.startswith(server.url) else [f"a request to elsewhere: {request.url}"]


@pytest.fixture
def screenshot():
    """Keeps a picture for people."""

    def screenshot(page, name):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", animations="disabled")

    return screenshot
