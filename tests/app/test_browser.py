"""The page in headless Chromium: every preset with its headline, and everything that can be done with a run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

import app.scripted
from app.facts import facts
from app.files import save_run
from app.presets import PRESETS, Preset, preset
from app.runs import record
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.workload import Workload, WorkloadRequest
from tests.app.axe import serious
from tests.app.browser import View, open_view

# One server and one browser for all of them; another pair, in the other worker, for the kernel view and live servers.
pytestmark = pytest.mark.xdist_group("browser")


def shown(value: float | int | None) -> str:
    """A figure as JavaScript writes it."""
    return "–" if value is None else f"{value:g}"


@pytest.mark.parametrize("chosen", PRESETS, ids=[chosen.key for chosen in PRESETS])
def test_every_preset_runs_and_shows_its_facts(view: View, chosen: Preset) -> None:
    if chosen is not PRESETS[0]:
        view.choose_preset(chosen.title["en"])
    runs = [record("x", chosen.workload(i), is_static=side.is_static) for i, side in enumerate(chosen.sides)]
    for key in chosen.facts:
        expect(view.fact(key)).to_have_text([shown(facts(run)[key]) for run in runs])
    assert view.last == max(len(run.traces) for run in runs) - 1
    expect(view.find(".pane")).to_have_count(len(runs))
    if len(runs) > 1:
        titles = [re.compile("^" + re.escape(side.title["en"])) for side in chosen.sides]
        expect(view.find(".pane .name")).to_have_text(titles)
    view.page.keyboard.press("End")
    longest = max(range(len(runs)), key=lambda i: len(runs[i].traces))
    ended = view.find(".pane").nth(longest).locator('[data-queue="finished"] h5 b')
    expect(ended).to_have_text(str(len(runs[longest].info.requests)))


def test_the_step_of_a_preemption_says_why(view: View) -> None:
    view.choose_preset(preset("preemption").title["en"])
    view.scrub(int(view.fact("first_preemption").first.inner_text()))
    swap = view.find(".pane").nth(1)
    expect(swap.locator(".say")).to_contain_text("C is preempted")
    expect(swap.locator(".why")).to_contain_text("preempted cleo: ann needed 1 block, 0 free")
    expect(swap.locator('[data-queue="swapped"]')).to_have_text("swapped 1Ccleo")
    expect(swap.locator(".chip.host")).to_have_count(4)
    expect(view.find(".pane").nth(0).locator('[data-queue="waiting"]')).to_have_text("waiting 1Ccleo")


def test_copies_and_shared_blocks_are_marked_in_the_pool(view: View) -> None:
    view.choose_preset(preset("copy").title["en"])
    view.scrub(1)
    expect(view.find(".pool .ev-copy .no")).to_have_text(["4", "5", "6"])
    expect(view.find('.pool [data-block="1"] .sub')).to_have_text("×4")
    expect(view.find(".say")).to_contain_text("block 3 is copied to 4, 5, 6")


def test_a_block_under_the_pointer_lights_up_wherever_it_is_held(view: View) -> None:
    view.choose_preset(preset("prefix").title["en"])
    view.scrub(3)
    pane = view.find(".pane").nth(1)
    pane.locator('.pool [data-block="2"]').hover()
    expect(pane.locator(".chip.lit")).to_have_count(4)
    expect(pane.locator(".pool .lit")).to_have_count(1)
    expect(pane.locator(".info")).to_have_text(
        re.compile(r"held by ann, ben, cleo, dan \(×4\) · 4/4 slots filled · hash ")
    )
    pane.locator(".say").hover()
    expect(pane.locator(".lit")).to_have_count(0)


def test_the_highlight_stays_in_its_run_when_the_step_changes(view: View) -> None:
    view.choose_preset(preset("prefix").title["en"])
    one, other = view.find(".pane").nth(0), view.find(".pane").nth(1)
    one.locator('.pool [data-block="2"]').hover()
    view.page.keyboard.press("ArrowRight")
    view.expect_step(1)
    expect(one.locator(".pool .lit")).to_have_attribute("data-block", "2")
    expect(one.locator(".info")).to_contain_text("block 2 · held by ann")
    expect(other.locator(".lit")).to_have_count(0)
    expect(other.locator(".info")).to_have_text(
        "Point at a block, or move through the pool with the arrow keys."
    )


def test_the_text_of_a_block_and_the_token_of_the_step_are_shown(view: View) -> None:
    view.choose_preset(preset("copy").title["en"])
    view.scrub(2)
    row = view.find('.row[data-request="poem"]')
    expect(row.locator(".chip").nth(0).locator(".words")).to_have_text("Write a short poem")
    chosen = preset("copy")
    run = record("x", chosen.workload(0))
    token = run.info.pieces[run.traces[2].sampled_token_ids["poem"][0]]
    expect(row.locator("mark")).to_have_text(token.strip())


def test_the_keyboard_steps_plays_and_jumps(view: View) -> None:
    press = view.page.keyboard.press
    view.expect_step(0)
    press("ArrowRight")
    press("ArrowRight")
    view.expect_step(2)
    press("ArrowLeft")
    view.expect_step(1)
    press("End")
    view.expect_step(view.last)
    press("ArrowRight")
    view.expect_step(view.last)
    press("Home")
    view.expect_step(0)
    press(" ")
    expect(view.find(".playbtn")).to_have_attribute("aria-pressed", "true")
    view.page.wait_for_function("() => +document.querySelector('.tw').dataset.step >= 2")
    press(" ")
    expect(view.find(".playbtn")).to_have_attribute("aria-pressed", "false")


def test_arrow_keys_in_a_field_of_the_form_do_not_step(view: View) -> None:
    view.page.locator("#details button").first.click()
    view.page.locator("#changes textarea").focus()
    view.page.keyboard.press("ArrowRight")
    view.expect_step(0)


def test_arrow_keys_in_the_pool_move_through_its_blocks(view: View) -> None:
    view.find(".pool").first.focus()
    view.page.keyboard.press("ArrowRight")
    view.expect_step(0)
    expect(view.find(".pool .lit")).to_have_attribute("data-block", "2")


def test_buttons_and_scrubber_step(view: View) -> None:
    for name, step in (("next", 1), ("last", view.last), ("prev", view.last - 1), ("first", 0)):
        view.find(f'[data-do="{name}"]').click()
        view.expect_step(step)
    view.scrub(5)
    view.expect_step(5)
    expect(view.find(".where")).to_have_text(f"5 / {view.last}")
    expect(view.find(".say").nth(1)).to_have_text(re.compile("^Step 5: "))


def test_a_click_into_the_timeline_jumps_to_the_step(view: View) -> None:
    view.choose_preset(preset("copy").title["en"])
    cursor = view.find(".gantt .cursor").first
    unit = float(cursor.get_attribute("width") or 0)
    left = float(cursor.get_attribute("x") or 0)
    view.find(".gantt .lanes svg").click(position={"x": left + 3.5 * unit, "y": 12})
    view.expect_step(3)


def test_the_first_preset_plays_before_anything_is_touched(browser: Browser, address: str) -> None:
    view = open_view(browser, address, reduced_motion="no-preference")
    view.page.wait_for_function("() => +document.querySelector('.tw').dataset.step >= 2")
    assert view.complaints == []
    view.page.context.close()


def test_labels_come_in_chinese_too(view: View) -> None:
    view.find(".lang").click()
    expect(view.find("h2")).to_have_text("静态批处理与连续批处理")
    expect(view.find(".say").nth(0)).to_have_text(re.compile("^第 0 步："))
    expect(view.page.locator(".tw")).to_have_attribute("lang", "zh-Hans")


def test_a_browser_set_to_chinese_sees_chinese(browser: Browser, address: str) -> None:
    view = open_view(browser, address, locale="zh-CN")
    expect(view.find(".poolcard h4").first).to_have_text("物理块池")
    expect(view.page.locator("#preset")).to_contain_text("课程")
    told = view.page.locator("#status p")
    expect(told).to_have_text("就绪。", use_inner_text=True)
    view.page.locator("#run").click()
    expect(told).to_have_text("完成：27、18 步。", use_inner_text=True)
    view.find(".lang").click()
    expect(told).to_have_text("Done: 27 and 18 steps.", use_inner_text=True)
    view.page.context.close()


def test_tier_against_tier_is_equal_step_for_step(view: View) -> None:
    view.choose("tier", "both")
    view.page.wait_for_function(
        "() => document.querySelector('.tw .pane .name small')?.textContent.startsWith('reference')"
    )
    view.wait_for_status("Done")
    view.page.wait_for_function(
        "() => document.querySelector('.tw .parting')?.textContent.startsWith('Both runs are equal, step for step')"
    )
    expect(view.find(".name small")).to_have_text([re.compile("^reference "), re.compile("^fast ")])


def test_what_if_runs_the_same_requests_with_a_changed_option(view: View) -> None:
    view.page.locator("#details button").first.click()
    view.write("#changes textarea", "block_size = 8\nnum_blocks = 17")
    view.page.locator("#run").click()
    view.page.wait_for_function(
        "() => document.querySelectorAll('.tw .name')[1]?.textContent.includes('16 blocks of 8')"
    )
    parting = view.find(".parting")
    expect(parting).to_contain_text("“A” and “block_size = 8, num_blocks = 17” part in step 0: ")
    expect(parting).to_contain_text("A block holds 4 tokens in “A” and 8 in")


def test_what_if_forks_the_run_from_the_step_that_is_shown(view: View) -> None:
    view.choose_preset(preset("priority").title["en"])
    view.scrub(3)
    view.find(".whatifbtn").click()
    form = view.find(".whatif")
    # block_size stands there first
    expect(form.locator("legend")).to_have_text("The same requests, but with")
    expect(form.locator(".note")).to_contain_text("block_size: cannot change in mid-run")
    form.locator("select.what").select_option("scheduling_policy")
    expect(form.locator("legend")).to_have_text("The same run, but from step 3 on with")
    expect(form.locator(".was")).to_have_text("now fcfs")
    form.locator(".go").click()
    view.wait_for_title("What if")
    view.wait_for_status("Done: 22 and 22 steps.")
    expect(view.find("h2")).to_have_text("What if scheduling_policy = priority, from step 3 on?")
    view.expect_step(3)
    expect(view.find(".parting span")).to_contain_text("“as it was” and “what if” part in step 3")
    expect(view.find(".pane").nth(1).locator(".forkline")).to_have_count(1)
    expect(view.find(".pane").nth(0).locator(".forkline")).to_have_count(0)
    waiting = view.find(".pane").locator('[data-queue="waiting"] .id')
    expect(waiting).to_have_text(["dan", "eve", "finn", "urgent", "urgent", "dan", "eve", "finn"])
    view.scrub(9)
    view.find(".parting button").click()
    view.expect_step(3)


def test_the_form_of_what_if_works_by_keyboard_and_refuses_nonsense_with_a_sentence(view: View) -> None:
    view.find(".whatifbtn").focus()
    press = view.page.keyboard.press
    press("Enter")
    expect(view.find(".whatifbtn")).to_have_attribute("aria-expanded", "true")
    press("Escape")
    expect(view.find(".whatif")).to_be_hidden()
    press("Enter")
    view.find(".whatif select.of").select_option("1")
    view.find('.whatif [data-what="add"]').click()
    view.find(".whatif select.what").nth(1).select_option("num_blocks")
    view.find('.whatif [data-what="drop"]').first.click()
    expect(view.find(".whatif .change")).to_have_count(1)
    expect(view.find(".whatif select.what")).to_have_value("num_blocks")
    view.find('.whatif input[aria-label="num_blocks"]').fill("2")
    view.find(".whatif .go").click()
    view.wait_for_status("Request 'ann'")
    expect(view.page.locator("#status [role=alert]")).to_have_count(1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("blocksize = 8", "Write the options to compare with as lines like block_size = 8"),
        ("block_size = 0", "block_size must be at least 1, got 0."),
        ("num_blocks = 2", "Request 'ann'"),
    ],
)
def test_a_wrong_option_is_answered_with_a_sentence(view: View, text: str, sentence: str) -> None:
    view.page.locator("#details button").first.click()
    view.write("#changes textarea", text)
    view.page.locator("#run").click()
    view.wait_for_status(sentence)
    expect(view.page.locator("#status [role=alert]")).to_have_count(1)


def test_a_run_is_saved_and_loaded_again(view: View, tmp_path: Path) -> None:
    view.choose_preset(preset("copy").title["en"])
    view.page.locator("#details button").first.click()
    view.page.locator("#save").click()
    link = view.page.locator("#files a[download]").first
    with view.page.expect_download() as download:
        link.click()
    path = tmp_path / "saved.json"
    download.value.save_as(path)
    assert json.loads(path.read_text())["run"]["block_size"] == 4
    view.choose_preset(preset("chunked").title["en"])
    choose_file(view, path)
    view.wait_for_status("Loaded: 7 steps.")
    view.page.wait_for_function("() => document.querySelector('.tw .scrub').max === '6'")
    view.scrub(1)
    expect(view.find(".pool .ev-copy")).to_have_count(3)


def load(view: View, path: Path) -> None:
    view.page.locator("#details button").first.click()
    choose_file(view, path)


def choose_file(view: View, path: Path) -> None:
    with view.page.expect_file_chooser() as chooser:
        view.page.locator("#load").click()
    chooser.value.set_files(path)


def test_a_damaged_file_is_answered_with_a_sentence(view: View, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    save_run(record("x", preset("copy").workload(0)), path)
    path.write_text(path.read_text()[:500])
    load(view, path)
    view.wait_for_status("broken.json is no trace, or only a part of one")


def test_what_a_model_writes_is_never_markup(view: View, tmp_path: Path) -> None:
    evil = "<img src=x onerror=window.hit=1>"
    requests = (
        WorkloadRequest(
            evil,
            prompt=f"<b>bold</b> {evil} </script><script>window.hit=1</script>",
            params=SamplingParams(max_tokens=2),
        ),
    )
    path = tmp_path / "evil.json"
    save_run(record(evil, Workload(requests, {"block_size": 4, "num_blocks": 9})), path)
    load(view, path)
    view.wait_for_status("Loaded")
    view.page.wait_for_function("evil => document.querySelector('.tw h2').textContent === evil", arg=evil)
    expect(view.find("img")).to_have_count(0)
    expect(view.find("script")).to_have_count(0)
    assert view.page.evaluate("window.hit") is None
    expect(view.find(".chip").first).to_contain_text("<b>bold</b>")


def test_a_run_can_be_cancelled_and_keeps_what_had_come(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = app.scripted.scripted_token

    def slow(request_id: str, position: int) -> int:
        time.sleep(0.15)
        return quick(request_id, position)

    monkeypatch.setattr(app.scripted, "scripted_token", slow)
    view.page.locator("#run").click()
    view.wait_for_status("Running:")
    view.page.locator("#cancel").click()
    view.wait_for_status("Cancelled. Shown are the ")
    monkeypatch.undo()
    view.page.wait_for_timeout(1500)
    expect(view.page.locator("#status")).to_contain_text("Cancelled")
    expect(view.find(".pane")).to_have_count(1)


def make_long_run(path: Path, steps: int, requests: int) -> None:
    """A trace of so many steps with so many requests at once."""
    workload = Workload(
        tuple(
            WorkloadRequest(
                f"r{i}",
                prompt=f"request {i}" + " and so on" * (i % 5),  # blocks fill up in different steps
                params=SamplingParams(max_tokens=steps, ignore_eos=True),
            )
            for i in range(requests)
        ),
        {"block_size": 16, "num_blocks": requests * (steps // 16 + 2), "max_num_seqs": requests},
    )
    save_run(record("long", workload), path)


def test_of_a_large_trace_only_a_window_is_drawn(view: View, tmp_path: Path) -> None:
    make_long_run(tmp_path / "long.json", 120, 32)
    load(view, tmp_path / "long.json")
    view.wait_for_status("Loaded: 120 steps.")
    view.page.wait_for_function("() => document.querySelector('.tw .scrub').max === '119'")
    expect(view.find(".row")).to_have_count(8)
    # A prefill and one merged decode a request.
    expect(view.find(".gantt rect[class^=s-]")).to_have_count(64)
    view.find(".pager button").last.click()
    expect(view.find(".row").first).to_have_attribute("data-request", "r8")


def num_nodes(view: View) -> int:
    return view.page.evaluate("document.querySelectorAll('.tw *').length")


def test_what_is_drawn_is_bounded_by_the_window_and_not_by_the_trace(view: View, tmp_path: Path) -> None:
    drawn = []
    for steps, requests in ((60, 60), (150, 60), (60, 120)):
        path = tmp_path / f"{steps}-{requests}.json"
        make_long_run(path, steps, requests)
        if not drawn:
            view.page.locator("#details button").first.click()
        choose_file(view, path)
        view.wait_for_status(f"Loaded: {steps} steps.")
        expect(view.find(".gantt .lanes svg")).to_have_attribute("height", str(20 * requests))
        view.scrub(40)
        drawn.append(num_nodes(view) - 5 * view.find(".pool .cell").count())
    fewer, longer, wider = drawn
    assert abs(longer - fewer) < 100  # some ticks of the axis
    assert abs(wider - fewer) < 100
    last = view.find(".lanes rect[class^=s-] title", has_text="r119")
    expect(last).to_have_count(0)
    view.find(".lanes").evaluate("node => node.scrollTo(0, node.scrollHeight)")
    expect(last).to_have_count(2)
    assert num_nodes(view) - 5 * view.find(".pool .cell").count() < wider + 100


@pytest.mark.parametrize("width", [390, 768, 1440, 3840])
def test_nothing_sticks_out_sideways(browser: Browser, address: str, width: int) -> None:
    view = open_view(browser, address, width=width)
    view.scrub(3)
    assert view.page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth") <= 0
    for card in view.find(".card, .fact, .controls").all():
        assert card.evaluate("node => node.scrollWidth - node.clientWidth") <= 0
    view.page.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_violation(browser: Browser, address: str, theme: str) -> None:
    view = open_view(browser, address, theme=theme)
    view.choose_preset(preset("preemption").title["en"])
    view.scrub(11)
    assert serious(view.page) == []
    view.choose_preset(preset("prefix").title["en"])
    view.scrub(3)
    view.page.locator("#details button").first.click()
    view.find(".whatifbtn").click()
    assert serious(view.page) == []
    view.find(".whatif select.what").select_option("max_num_seqs")
    view.find(".whatif .go").click()
    view.wait_for_title("What if")
    view.wait_for_status("Done")
    assert serious(view.page) == []
    view.choose_preset(preset("blocksize").title["en"])
    assert serious(view.page) == []
    assert view.complaints == []
    view.page.context.close()
