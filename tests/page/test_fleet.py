"""The page shows what is there, and follows what changes."""

from playwright.sync_api import expect

import fleet

# One prefill engine of each shape: a row, a block, and a row so long that it is folded.
ROW, BLOCK, LONG = (1, 1, 4, 1), (2, 1, 4, 2), (32, 1, 1, 1)


def heading(page):
    return page.get_by_role("heading", level=1)


def engine(page, name):
    return page.locator("li.engine").filter(has=page.locator(".name", has_text=name))


def cells(page, name, state):
    return engine(page, name).locator(f".grid td .cell.{state}")


def test_shows_real_ranks_their_versions_and_components(start, open_page, ending, tmp_path):
    server = start("small")
    for role in ["prefill", "decode"]:
        (tmp_path / role).mkdir()
        service = fleet.TransferService(tmp_path / role)
        ending.callback(service.kill)
        for tp_rank in range(2):
            bootstrap = server.engines["small"] if role == "prefill" else None
            rank = fleet.Rank(service, role, bootstrap, tp_size=2, tp_rank=tp_rank)
            ending.callback(rank.close)
    page = open_page(server)
    expect(heading(page)).to_have_text("The only engine serves.")
    expect(cells(page, "small", "present")).to_have_count(2)
    expect(engine(page, "small")).to_contain_text("0.5.23")


def test_follows_a_rank_that_registers(start, open_page, register):
    server = start("prefill-a")
    register(server, "prefill-a", ROW, without=[(0, 0, 3, 0)])
    page = open_page(server)
    expect(heading(page)).to_contain_text("prefill-a does not")
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
    expect(heading(page)).to_contain_text("1 of 2 engines serves. prefill-a does not")
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
