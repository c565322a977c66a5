"""The page shows what is there, and follows what changes."""

import re

from playwright.sync_api import expect

from shown import BLOCK, LONG, ROW, cells, engine, heading, report_all


def test_shows_real_ranks_their_components_and_their_end(start, open_page, real_ranks):
    server = start("small")
    ranks = real_ranks(server, "small")
    page = open_page(server)
    expect(heading(page)).to_have_text("The only engine serves.")
    expect(cells(page, "small", "present")).to_have_count(2)
    io_engines = page.get_by_role("region", name="IO engines of small").locator("tbody tr")
    expect(io_engines.filter(has_text="decode")).to_have_count(2)
    components = page.get_by_role("region", name="Components of small").locator("tbody tr")
    # Two tensors of 1 MiB, one of 1 MiB, one of 4 KiB, on each of two ranks.
    for name, size in [("kv", "4 MiB"), ("mamba", "2 MiB"), ("aux", "8 KiB")]:
        row = components.filter(has=page.get_by_role("rowheader", name=name, exact=True))
        expect(row).to_contain_text("decode")
        expect(row).to_contain_text(size)
    # What the rank actors report of themselves: the transport of each session, bytes, versions.
    pair = page.get_by_role("region", name="Pairs of prefill and decode engines")
    for text in ["small", "tcp", "2 sessions", "127.0.0.1 2 ranks", "Ferry 0.1.0", "MiB"]:
        expect(pair.locator("tbody tr")).to_contain_text(text)
    ranks["prefill"][1].close()
    expect(heading(page)).to_contain_text("small has not served since")
    expect(heading(page)).to_contain_text("rank tp1 does not answer at 127.0.0.1:")
    expect(cells(page, "small", "unreachable")).to_have_count(1)


def test_follows_a_rank_that_registers(start, open_page, register):
    server = start("prefill-a")
    register(server, "prefill-a", ROW, without=[(0, 0, 3, 0)])
    page = open_page(server)
    expect(heading(page)).to_contain_text("prefill-a has not served since")
    expect(heading(page)).to_contain_text("rank tp3 is missing")
    expect(cells(page, "prefill-a", "missing")).to_have_count(1)
    register(server, "prefill-a", ROW, only=[(0, 0, 3, 0)])
    expect(heading(page)).to_have_text("The only engine serves.")
    expect(cells(page, "prefill-a", "missing")).to_have_count(0)
    expect(page).to_have_title("✓ 1 serve · Ferry")


def test_follows_a_rank_that_goes_missing(start, open_page, register):
    server = start("prefill-a", "prefill-b")
    ranks = register(server, "prefill-a", BLOCK)
    register(server, "prefill-b", ROW)
    page = open_page(server)
    expect(heading(page)).to_have_text("All 2 engines serve.")
    expect(cells(page, "prefill-a", "present")).to_have_count(16)
    ranks[(1, 0, 2, 1)].close()
    expect(heading(page)).to_contain_text("1 of 2 engines serves. prefill-a has not served since")
    expect(heading(page)).to_contain_text("rank dp1 tp2 pp1 does not answer")
    expect(cells(page, "prefill-a", "unreachable")).to_have_count(1)
    expect(page).to_have_title("✕ 1 of 2 fail · Ferry")
    # Not by colour alone: the mark stands in the cell, the word is there for a screen reader.
    cell = engine(page, "prefill-a").locator(".grid td", has=page.locator(".unreachable"))
    expect(cell).to_contain_text("✕")
    expect(cell).to_contain_text("unreachable")


def test_a_new_engine_appears(start, open_page, register):
    server = start("prefill-a", "prefill-b")
    page = open_page(server)
    register(server, "prefill-b", LONG)
    expect(engine(page, "prefill-b")).to_be_visible()
    expect(cells(page, "prefill-b", "present")).to_have_count(32)
    # 32 ranks beside each other would leave a small window, so they stand in two rows.
    expect(engine(page, "prefill-b").locator(".grid tbody tr")).to_have_count(2)


def test_shows_pairs_with_transport_and_versions(start, open_page, register):
    server = start("prefill-a")
    register(server, "prefill-a", ROW)
    report_all(server, "prefill-a")
    page = open_page(server)
    pair = page.get_by_role("region", name="Pairs of prefill and decode engines")
    row = pair.locator("tbody tr")
    expect(row).to_have_count(1)
    for text in [
        "prefill-a",
        "SGLang 0.5.23, Ferry 0.1.0",
        "shm",
        "2 sessions",
        "10.0.0.9 2 ranks",
    ]:
        expect(row).to_contain_text(text)
    expect(row).to_contain_text("2 GiB")
    expect(row).to_contain_text("none")
    report_all(server, "prefill-a", version="0.2.0", failures=[(77, "the peer died")])
    expect(row).to_contain_text("versions differ, 2 failed transfers")
    expect(heading(page)).to_contain_text("Room 77 failed at")
    expect(heading(page)).to_contain_text("the peer died")


def test_marks_ranks_whose_actors_fell_silent(start, open_page, register):
    server = start("prefill-a")
    register(server, "prefill-a", ROW)
    report_all(server, "prefill-a", interval_s=1)
    page = open_page(server)
    expect(cells(page, "prefill-a", "stale")).to_have_count(2)
    expect(engine(page, "prefill-a").locator("figcaption")).to_contain_text("stale")


def test_follows_an_engine_that_drains(start, open_page, register):
    server = start("prefill-a", "prefill-b")
    register(server, "prefill-a", ROW)
    register(server, "prefill-b", ROW)
    page = open_page(server)
    expect(heading(page)).to_have_text("All 2 engines serve.")
    server.drain("prefill-b", True)
    expect(heading(page)).to_have_text("All 2 engines serve. prefill-b drains.")
    expect(cells(page, "prefill-b", "draining")).to_have_count(4)
    expect(page.get_by_role("heading", name="Draining 1")).to_be_visible()
    server.drain("prefill-b", False)
    expect(heading(page)).to_have_text("All 2 engines serve.")
    expect(cells(page, "prefill-b", "draining")).to_have_count(0)


def test_tells_the_last_changes_as_they_happen(start, open_page, register):
    server = start("prefill-a", "prefill-b")
    page = open_page(server)
    expect(heading(page)).to_have_text("No engine has registered yet.")
    events = page.locator("#events")
    expect(events).to_contain_text("Nothing has changed since the server started.")
    register(server, "prefill-a", ROW)
    # The ranks of one engine that starts are one change.
    expect(events.locator(".event")).to_have_count(1)
    expect(events.locator(".event").first).to_contain_text("and 3 registrations just before")
    server.drain("prefill-b", True)
    expect(events.locator(".event")).to_have_count(2)
    newest = events.locator(".event").first
    expect(newest).to_contain_text("prefill-b")
    expect(newest.locator("time")).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    expect(newest.locator(".ago")).to_have_text(re.compile(r"^\d+ s ago$"))
