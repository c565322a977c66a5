"""The page says plainly what is wrong with the connection, and goes on by itself."""

import json

from playwright.sync_api import expect

import fleet
from shown import ROW, engine, heading

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def test_a_server_that_ends_is_told_and_its_return_too(start, open_page, register):
    server = start("prefill-a", probe=False)
    register(server, "prefill-a", ROW)
    page = open_page(server)
    ports = [address.rsplit(":", 1)[1] for address in server.engines.values()]
    server.kill()
    notice = page.get_by_role("alert")
    expect(notice).to_contain_text("The server does not answer")
    expect(notice).to_contain_text("What stands below is from")
    expect(heading(page)).to_contain_text("As of")
    expect(engine(page, "prefill-a")).to_be_visible()
    expect(page).to_have_title("? no answer · Ferry")
    again = start("prefill-a", admin=server.admin, listen=ports, probe=False)
    register(again, "prefill-a", ROW, without=[(0, 0, 0, 0)])
    expect(notice).to_be_empty()
    expect(heading(page)).to_contain_text("rank tp0 is missing")


def answer_with(body):
    return lambda route: route.fulfill(body=body)


def test_an_answer_that_cannot_be_read_is_told(start, open_page, register):
    server = start("prefill-a")
    register(server, "prefill-a", ROW)
    page = open_page(server)
    notice = page.get_by_role("alert")
    for body, told in [
        ("<html>", "it is no JSON"),
        ('{"engines": 3}', "it has no list of engines"),
    ]:
        page.route("**/v1/engines?*", answer_with(body))
        expect(notice).to_contain_text(
            f"The server's answer to GET /v1/engines?limit=1000 cannot be read: {told}"
        )
        page.unroute("**/v1/engines?*")
        expect(notice).to_be_empty()
    page.route("**/v1/events/stream?*", answer_with('data: {"id": "1"}\n\n'))
    page.reload()
    expect(notice).to_contain_text("an event has no number or time")
    page.unroute("**/v1/events/stream?*")
    refusal = json.dumps({"code": "store", "message": "the disk is full"})
    page.route("**/v1/engines?*", lambda route: route.fulfill(status=503, body=refusal))
    expect(notice).to_contain_text("was answered with status 503: the disk is full")
    expect(engine(page, "prefill-a")).to_be_visible()


def test_a_token_is_asked_for_and_kept_for_the_session(start, open_page, register, tmp_path):
    file = tmp_path / "admin-token"
    file.write_text("correct-horse-battery-staple\n")
    server = start("prefill-a", options=["--admin-token-file", file])
    register(server, "prefill-a", ROW)
    page = open_page(server, wait=False)
    field = page.get_by_label("The server asks for its admin token.")
    expect(field).to_be_visible()
    assert field.get_attribute("type") == "password"
    field.fill("wrong")
    field.press("Enter")
    expect(page.get_by_text("The server refused this token.")).to_be_visible()
    page.get_by_label("The server refused this token.").fill("correct-horse-battery-staple")
    page.get_by_role("button", name="Show the fleet").click()
    expect(heading(page)).to_have_text("The only engine serves.")
    expect(page.locator("#token")).to_be_hidden()
    page.reload()
    expect(heading(page)).to_have_text("The only engine serves.")
    kept = "[localStorage.length, document.cookie, location.href]"
    assert page.evaluate(kept) == [0, "", server.url]
    # Another session of the same browser is asked again.
    expect(open_page(server, wait=False).locator("#token")).to_be_visible()


def test_a_server_that_cannot_store_is_told(start, open_page, register):
    server = start("prefill-a")
    register(server, "prefill-a", ROW)
    problem = {"code": "store", "message": "the disk is full"}
    ready = {"ready": False, "problems": [problem], "engines": []}
    intercept = lambda page: page.route(  # noqa: E731
        "**/v1/health/ready", lambda route: route.fulfill(status=503, json=ready)
    )
    page = open_page(server, before=intercept)
    expect(page.get_by_role("alert")).to_contain_text(
        "The server cannot make changes: the disk is full."
    )
    expect(heading(page)).to_have_text("The only engine serves.")


def test_hostile_names_are_shown_as_text(start, open_page, register):
    server = start("prefill-a")
    # An engine may be named and addressed by whoever reaches its port.
    body = fleet.route_body((0, 0, 0, 0), (1, 1, 2, 1), 40000)
    for field, rank in [("rank_ip", 0), ("kv_cache_dtype", 1)]:
        hostile = {**body, "attn_tp_rank": rank, "kv_cache_dtype": HOSTILE, field: HOSTILE}
        assert server.put("prefill-a", "/route", hostile) == 200
    peers = [(HOSTILE, HOSTILE)]
    server.report("prefill-a", HOSTILE, fleet.report("decode", HOSTILE, f"{HOSTILE}:1", peers))
    prefill = fleet.report(
        "prefill", HOSTILE, HOSTILE, peers, version=HOSTILE, failures=[(1, HOSTILE)]
    )
    server.report("prefill-a", f"{HOSTILE}2", prefill)

    def rename(route):
        # No port takes such a name; the page must not rely on that.
        engines = route.fetch().json()
        engines["engines"][0]["namespace"] = HOSTILE
        route.fulfill(json=engines)

    def before(page):
        page.route("**/v1/engines?*", rename)
        page.route("**/v1/engines/*", lambda route: route.fulfill(json=detail))

    detail = {**server.json("/v1/engines/prefill-a"), "namespace": HOSTILE}
    page = open_page(server, before=before)
    expect(page.locator(".engine .name")).to_have_text(HOSTILE)
    expect(page.locator(".key").first).to_have_text(HOSTILE)
    expect(page.locator(".pairs tbody")).to_contain_text(HOSTILE)
    expect(heading(page)).to_contain_text(HOSTILE)
    expect(page.locator("#events")).to_contain_text(HOSTILE)
    assert page.locator("main script, main img").count() == 0
    assert page.title() != "owned"
