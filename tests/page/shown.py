"""Where things stand on the page, and fleets that several tests show."""

import fleet

# One prefill engine of each shape: a row, a block, and a row so long that it is folded.
ROW, BLOCK, LONG = (1, 1, 4, 1), (2, 1, 4, 2), (32, 1, 1, 1)


def heading(page):
    return page.get_by_role("heading", level=1)


def engine(page, name):
    return page.locator("li.engine").filter(has=page.locator(".name", has_text=name))


def cells(page, name, state):
    return engine(page, name).locator(f".grid td .cell.{state}")


def report_all(server, name, *, version="0.1.0", transport="shm", interval_s=60, failures=()):
    """Two prefill and two decode ranks on other hosts report their sessions."""
    for tp in range(2):
        prefill, decode, rank = f"{name}-p{tp}", f"{name}-d{tp}", f"dp0 cp0 tp{tp} pp0"
        there, here = f"10.0.0.3:500{tp}", f"10.0.0.9:500{tp}"
        sender, receiver = [(decode, transport)], [(prefill, transport)]
        sent = fleet.report(
            "prefill", rank, there, sender, interval_s=interval_s, failures=failures
        )
        server.report(name, prefill, sent)
        got = fleet.report("decode", rank, here, receiver, version=version, failures=failures)
        server.report(name, decode, got)
