"""The page says plainly what is wrong with the connection, and goes on by itself."""

import json

from playwright.sync_api import expect

from test_fleet import ROW, engine, heading

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
        page.route("**/v1/engines", answer_with(body))
        expect(notice).to_contain_text(
            f"The server's answer to GET /v1/engines cannot be read: {told}"
        )
        page.unroute("**/v1/engines")
        expect(notice).to_be_empty()
    refusal = json.dumps({"code": "store", "message": "the disk is full"})
    page.route("**/v1/engines", lambda route: route.fulfill(status=503, body=refusal))
    expect(notice).to_contain_text("was answered with status 503: the disk is full")
    expect(engine(page, "prefill-a")).to_be_visible()


def test_a_token_is_asked_for_and_kept_for_the_session(start, open_page, register, tmp_path):
    file = tmp_path / "admin-token"
    file.write_text("correct horse battery staple\n")
    server = start("prefill-a", options=["--admin-token-file", file])
    register(server, "prefill-a", ROW)
    page = open_page(server, wait=False)
    field = page.get_by_label("The server asks for its admin token.")
    expect(field).to_be_visible()
    assert field.get_attribute("type") == "password"
    field.fill("wrong")
    field.press("Enter")
    expect(page.get_by_text("The server refused this token.")).to_be_visible()
    page.get_by_label("The server refused this token.").fill("correct horse battery staple")
    page.get_by_role("button", name="Show the fleet").click()
    expect(heading(page)).to_have_text("The only engine serves.")
    expect(page.locator("#token")).to_be_hidden()
    page.reload()
    expect(heading(page)).to_have_text("The only engine serves.")
    kept = "[localStorage.length, document.cookie, location.href]"
    assert page.evaluate(kept) == [0, "", server.url]
    # Another session of the same browser is asked again.
    expect(open_page(server, wait=False).locator("#token")).to_be_visible()


def test_hostile_names_are_shown_as_text(start, open_page, register):
    server = start("prefill-a")
    register(server, "prefill-a", ROW)
    engines = server.json("/v1/engines")
    engines["engines"][0]["namespace"] = HOSTILE
    detail = server.json("/v1/engines/prefill-a")
    detail["namespace"] = HOSTILE
    detail["release"] = HOSTILE
    detail["ranks_present"][0]["instance"] = HOSTILE
    detail["registrations"] = [
        {
            "engine_key": HOSTILE, "role": HOSTILE, "rank": 0, "instance": HOSTILE,
            "reachable": None, "registered_at": 0, "sglang_release": HOSTILE,
            "components": [{"type": HOSTILE, "tensors": 1, "bytes": 1}],
        }
    ]  # fmt: skip

    def before(page):
        page.route("**/v1/engines", lambda route: route.fulfill(json=engines))
        page.route("**/v1/engines/*", lambda route: route.fulfill(json=detail))

    page = open_page(server, before=before)
    expect(page.locator(".name")).to_have_text(HOSTILE)
    expect(page.locator(".key")).to_have_text(HOSTILE)
    assert page.locator("main script, main img").count() == 0
    assert page.title() != "owned"
