"""The report in headless Chromium. A fixture checks after each test that the console has no error and that
nothing was loaded from elsewhere. ``AGENT_PEFT_SCREENSHOTS=folder`` keeps the pictures.
"""

from __future__ import annotations

import json
import threading

import pytest

from agent_peft.reports.live import live_server
from agent_peft.types import Group, Task

pytestmark = pytest.mark.slow  # together they take a minute
WIDTHS = "document.documentElement.scrollWidth <= innerWidth"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_part_fits_the_screen(look, run, scheme, width):
    page = look([run], width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for number, part in enumerate(("curves", "evaluations", "configuration", "trajectories"), start=1):
        page.keyboard.press(str(number))
        assert page.locator(f"#tab-{part}").get_attribute("aria-selected") == "true"
        page.wait_for_timeout(100)
        assert page.evaluate(WIDTHS), f"{part} is wider than the screen"
        assert "[object" not in page.inner_text("main") and "undefined" not in page.inner_text("main")
        look.keep(page, f"{part}_{width}_{scheme}")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme


def test_the_curves_and_the_tables(look, run):
    page = look([run])
    titles = page.locator(".chart h3").all_inner_texts()
    assert titles[:4] == ["Held-out success", "Reward", "Success", "Loss"]
    assert page.locator(".headline p").count() == 3
    assert {"Stop reasons", "Success by skill"} <= set(titles)
    assert page.locator(".chart canvas").count() == len(titles)
    assert page.evaluate("ticksOf(null, [4.6411, 4.6412])") == ["4.6411", "4.6412"], "ticks can be told apart"
    assert page.evaluate("ticksOf(null, [0, 4e-4, 8e-4])") == ["0", "4e-4", "8e-4"]
    page.locator("#tab-evaluations").click()
    assert page.locator(".dots circle").count() > 1
    assert "p, if no change" in page.inner_text("main") and "db_skill" in page.inner_text("main")


def test_acting_and_demonstrations_have_curves_of_their_own(look, disk, tmp_path):
    folder = disk.write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first = {**json.loads(lines[0]), "reward": None, "success": None}
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]))
    page = look([folder])
    heads = page.locator("main h2").all_inner_texts()
    assert heads[:2] == ["Learning from its own episodes", "Learning from data"]
    titles = page.locator(".charts .chart h3").all_inner_texts()
    assert titles.count("Loss") == 2 and titles.count("Reward") == 1
    steps = "linesOf('loss', 'acting')[0].steps.map(shownStep)"
    assert page.evaluate(steps) == [2, 3, 4], "people count steps from 1"


def test_three_seeds_are_one_band(look, disk, tmp_path):
    runs = [disk.write_run(tmp_path / f"seed{seed}", seed) for seed in range(3)]
    page = look(runs)
    assert "seed0 and 2 more seeds" in page.inner_text(".charts .chart >> nth=0")
    look.keep(page, "three_seeds")
    page.get_by_role("checkbox").uncheck()
    legend = page.inner_text(".charts .chart >> nth=0")
    assert all(f"seed{seed}" in legend for seed in range(3)) and "more seeds" not in legend
    page.keyboard.press("3")
    differing = page.locator("table").first.locator("tbody th").all_inner_texts()
    assert differing == ["run_dir", "seed"]


def test_an_episode_as_the_agent_saw_it(look, run):
    """DB and OS episodes: the chat, the syntax, a token's numbers by mouse and by keyboard."""
    page = look([run], "#trajectories/r0_step_000002/0")
    page.wait_for_selector(".token")
    assert page.inner_text("#detail h2") == "db-2"

    def written(kind):  # a token is a character here, so a keyword is some tokens
        return "".join(page.locator(f".message.assistant .{kind}").all_text_contents())

    assert written("keyword") == "UPDATESETWHERE" and written("string") == "'tea'"
    assert written("comment") == "-- cheaper"
    assert page.locator(".message h4").all_inner_texts()[:2] == ["system", "user"]
    token = page.locator(".message.assistant .token").nth(3)
    token.hover()
    tip = page.inner_text("#tip")
    assert "written by the agent" in tip and "log p as sampled -0.0300" in tip and "mismatch -0.0950" in tip
    assert "log p of the trainer -0.1250" in tip and "advantage" in tip
    token.focus()
    before = page.inner_text("#tip")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#tip") != before and page.locator("#tip").is_visible()
    look.keep(page, "db_episode")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page = look([run], "#trajectories/r0_step_000002/5")
    page.wait_for_selector(".token")
    assert written("keyword") == "find|wc" and written("comment") == "# count them"
    look.keep(page, "os_episode")


def test_colours_follow_the_numbers(look, run):
    page = look([run], "#trajectories/r0_step_000002/0")
    page.wait_for_selector(".token")

    def colours(name):
        page.locator("#detail select").select_option(name)
        page.wait_for_selector(".token")
        read = "list => list.map(one => [one.token.mask, one.style.backgroundColor])"
        return page.eval_on_selector_all("#detail .token", read)

    assert {mask for mask, colour in colours("mask") if colour} == {True}
    assert {colour for _, colour in colours("none")} == {""}
    advantages = {colour for mask, colour in colours("advantage") if mask}
    assert len(advantages) == 5, "the advantages are -2, -1, 0, 1 and 2"
    assert len({colour for mask, colour in colours("mismatch") if mask}) > 10


def test_siblings_side_by_side_and_as_a_tree(look, run):
    page = look([run], "#trajectories/r0_step_000002/0")
    page.wait_for_selector(".token")
    page.keyboard.press("v")
    page.wait_for_selector(".sibling")
    assert page.locator(".sibling").count() == 4
    assert "reward" in page.inner_text(".sibling >> nth=1")
    look.keep(page, "siblings")
    page.keyboard.press("v")
    page.wait_for_selector(".tree-picture svg")
    assert page.locator(".tree-picture .leaf").count() == 4
    nodes = page.locator("details.node > summary").all_inner_texts()
    # attempts 0 and 1 say price = 0, attempts 2 and 3 price = 1
    assert (
        nodes[0].startswith("all 4 share") and nodes[1].startswith("#0 #1:") and nodes[2].startswith("#2 #3:")
    )
    assert page.locator("details.node > .text").nth(1).inner_text().startswith("0 WHERE")
    look.keep(page, "tree")
    page.locator(".leaf").nth(3).click()
    page.wait_for_selector(".token")
    assert "attempt 3 of 4" in page.inner_text("#detail")


def test_episodes_are_chosen_and_searched(look, run):
    page = look([run], "#trajectories")
    page.wait_for_selector(".token")

    def count():
        return page.locator(".list button").count()

    assert count() == 32
    page.get_by_label("outcome").select_option("correct")
    assert 0 < count() < 32
    page.get_by_label("outcome").select_option("")
    page.get_by_label("skill").select_option("os_skill")
    assert count() == 16
    page.get_by_label("step", exact=True).select_option(label="2")
    assert count() == 4
    page.get_by_label("step", exact=True).select_option(value="")
    page.get_by_label("skill").select_option("")
    page.get_by_label("order").select_option("oldest")
    page.get_by_label("order").select_option("worst")
    assert page.locator(".list h3").count() < count(), "attempts at one task stand together"
    worst = page.locator(".list button").first
    assert "reward -0.5" in worst.inner_text()
    assert worst.get_attribute("aria-current") == "true", "another order shows its first episode"
    page.get_by_label("episodes of").select_option("after_rloo")
    assert count() == 8
    page.get_by_label("episodes of").select_option("training")
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("/")
    page.keyboard.type("count them")
    page.keyboard.press("Enter")
    page.get_by_text("searched 4 of 4 files: 16 found").wait_for()
    assert count() == 16
    page.locator("h1").click()
    first = page.inner_text("#detail")
    page.keyboard.press("j")
    page.wait_for_timeout(50)
    assert page.inner_text("#detail") != first


def test_text_of_strangers_is_text(look, disk, tmp_path):
    """Scripts, ANSI codes, marks that turn the writing direction, NULs and very long lines."""
    hostile, long = disk.HOSTILE, "x" * (1 << 20)
    task = Task(hostile, (hostile,))
    single = Group(task, [disk.episode(task, hostile, [hostile, f"```sql\n{hostile}\n"], 1.0)])
    lines = Group(Task("long"), [disk.episode(Task("long"), long, ["ok"], 1.0)])
    run = disk.write_run(tmp_path / "run", steps=1, more=[single, lines])
    for address in ("#trajectories/r0_step_000000/8", "#trajectories/r0_step_000000/9"):
        page = look([run], address)
        page.wait_for_selector(".token")
        assert page.evaluate("typeof boom") == "undefined" and page.locator("img").count() == 0
        text = page.inner_text("body")
        assert not set(text) & set("\0\x1b\u202e")
        if address.endswith("8"):
            shown = page.locator(".message.user .text").first.inner_text()
            assert "</script><script>boom()</script>\\x1b[31mred\\x00nul\\u202edrow" in shown
            assert shown.endswith("é€😀")
            look.keep(page, "hostile")
        else:
            assert "more characters" in text and page.locator(".token").count() < 20_000
        for key in "vv123":
            page.keyboard.press(key)
            page.wait_for_timeout(100)
            assert page.evaluate(WIDTHS)


def test_what_lies_beside_the_page_is_loaded_when_it_is_looked_at(look, run):
    page = look([run], "#trajectories/r0_step_000001/0", max_inside=0)
    page.wait_for_selector(".token")
    assert page.inner_text("#detail h2") == "db-1"


def test_a_missing_file_beside_the_page_is_told(look, run, tmp_path, disk):
    page = look([run], max_inside=0)
    (tmp_path / "report_episodes" / "r0_step_000003.js").rename(tmp_path / "away.js")
    faults = []
    page.on("console", lambda said: faults.append(said.text))
    page.keyboard.press("4")
    page.wait_for_selector("#detail .notice")
    assert "r0_step_000003.js is not there" in page.inner_text("#detail")
    look.expected(faults)


def test_old_runs_have_chats_without_tokens(look, run):
    (run / "trajectories" / "step_000003.safetensors").unlink()
    page = look([run], "#trajectories/r0_step_000003/0")
    page.wait_for_selector("#detail .notice")
    assert "UPDATE orders" in page.inner_text("#detail")
    assert page.locator(".message.assistant .keyword").first.inner_text() == "UPDATE"
    page.keyboard.press("v")
    page.keyboard.press("v")
    page.wait_for_timeout(100)
    assert "Without tokens there is no tree" in page.inner_text("#detail")


def test_a_live_page_follows_the_run(look, run, disk):
    with live_server([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            page = look.at(f"http://127.0.0.1:{server.server_address[1]}/#trajectories/r0_step_000003/0")
            page.wait_for_selector(".token")
            disk.write_run(run, steps=5)
            page.keyboard.press("1")
            page.get_by_text("5 of 9 steps").wait_for(timeout=60_000)
            assert "live" in page.inner_text("header")
        finally:
            server.shutdown()
            thread.join()
