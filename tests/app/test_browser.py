"""The page in headless Chromium: every preset with its headline, and everything that can be done with a run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import app.scripted
from app.facts import facts
from app.files import save_run
from app.presets import PRESETS, Preset, preset
from app.runs import record
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.workload import Workload, WorkloadRequest
from tests.app.axe import serious
from tests.app.browser import View, open_view

pytestmark = pytest.mark.xdist_group("browser")  # one server and one browser for all of them


def shown(value: float | int | None) -> str:
    """A figure as JavaScript writes it."""
    return "–" if value is None else f"{value:g}"


@pytest.mark.parametrize("chosen", PRESETS, ids=[chosen.key for chosen in PRESETS])
def test_every_preset_runs_and_shows_its_facts(view: View, chosen: Preset) -> None:
    if chosen is not PRESETS[0]:
        view.choose_preset(chosen.title["en"])
    runs = [record("x", chosen.workload(i), is_static=side.is_static) for i, side in enumerate(chosen.sides)]
    for key in chosen.facts:
        assert view.fact(key) == [shown(facts(run)[key]) for run in runs], key
    assert view.last == max(len(run.traces) for run in runs) - 1
    assert view.find(".pane").count() == len(runs)
    if len(runs) > 1:
        names = view.find(".pane .name").all_text_contents()
        assert all(name.startswith(side.title["en"]) for name, side in zip(names, chosen.sides, strict=True))
    view.page.keyboard.press("End")
    longest = max(range(len(runs)), key=lambda i: len(runs[i].traces))
    ended = view.find(".pane").nth(longest).locator('[data-queue="finished"] h5 b').text_content()
    assert ended == str(len(runs[longest].info.requests))


def test_the_step_of_a_preemption_says_why(view: View) -> None:
    view.choose_preset(preset("preemption").title["en"])
    view.scrub(int(view.fact("first_preemption")[0]))
    swap = view.find(".pane").nth(1)
    assert "C is preempted" in (swap.locator(".say").text_content() or "")
    assert "preempted cleo: ann needed 1 block, 0 free" in (swap.locator(".why").text_content() or "")
    assert swap.locator('[data-queue="swapped"]').text_content() == "swapped 1Ccleo"
    assert swap.locator(".chip.host").count() == 4
    assert view.find(".pane").nth(0).locator('[data-queue="waiting"]').text_content() == "waiting 1Ccleo"


def test_copies_and_shared_blocks_are_marked_in_the_pool(view: View) -> None:
    view.choose_preset(preset("copy").title["en"])
    view.scrub(1)
    assert [cell.get_attribute("data-block") for cell in view.find(".pool .ev-copy").all()] == ["4", "5", "6"]
    assert view.find('.pool [data-block="1"] .sub').text_content() == "×4"
    assert "block 3 is copied to 4, 5, 6" in (view.find(".say").text_content() or "")


def test_a_block_under_the_pointer_lights_up_wherever_it_is_held(view: View) -> None:
    view.choose_preset(preset("prefix").title["en"])
    view.scrub(3)
    pane = view.find(".pane").nth(1)
    pane.locator('.pool [data-block="2"]').hover()
    assert pane.locator(".chip.lit").count() == 4
    assert pane.locator(".pool .lit").count() == 1
    info = pane.locator(".info").text_content() or ""
    assert "held by ann, ben, cleo, dan (×4)" in info
    assert "4/4 slots filled" in info
    assert "hash " in info
    pane.locator(".say").hover()
    assert pane.locator(".lit").count() == 0


def test_the_text_of_a_block_and_the_token_of_the_step_are_shown(view: View) -> None:
    view.choose_preset(preset("copy").title["en"])
    view.scrub(2)
    row = view.find('.row[data-request="poem"]')
    assert row.locator(".chip").nth(0).locator(".words").text_content() == "Write a short poem"
    chosen = preset("copy")
    run = record("x", chosen.workload(0))
    token = run.info.pieces[run.traces[2].sampled_token_ids["poem"][0]]
    assert row.locator("mark").text_content() == token.strip()


def test_the_keyboard_steps_plays_and_jumps(view: View) -> None:
    press = view.page.keyboard.press
    assert view.step == 0
    press("ArrowRight")
    press("ArrowRight")
    assert view.step == 2
    press("ArrowLeft")
    assert view.step == 1
    press("End")
    assert view.step == view.last
    press("ArrowRight")
    assert view.step == view.last
    press("Home")
    assert view.step == 0
    press(" ")
    assert view.find(".playbtn").get_attribute("aria-pressed") == "true"
    view.page.wait_for_function("() => +document.querySelector('.tw').dataset.step >= 2")
    press(" ")
    assert view.find(".playbtn").get_attribute("aria-pressed") == "false"


def test_arrow_keys_in_a_field_of_the_form_do_not_step(view: View) -> None:
    view.page.locator("#details button").first.click()
    view.page.locator("#changes textarea").focus()
    view.page.keyboard.press("ArrowRight")
    assert view.step == 0


def test_arrow_keys_in_the_pool_move_through_its_blocks(view: View) -> None:
    view.find(".pool").first.focus()
    view.page.keyboard.press("ArrowRight")
    assert view.step == 0
    assert view.find(".pool .lit").get_attribute("data-block") == "2"


def test_buttons_and_scrubber_step(view: View) -> None:
    for name, step in (("next", 1), ("last", view.last), ("prev", view.last - 1), ("first", 0)):
        view.find(f'[data-do="{name}"]').click()
        assert view.step == step
    view.scrub(5)
    assert view.step == 5
    assert view.find(".where").text_content() == f"5 / {view.last}"
    assert (view.find(".say").nth(1).text_content() or "").startswith("Step 5: ")


def test_a_click_into_the_timeline_jumps_to_the_step(view: View) -> None:
    view.choose_preset(preset("copy").title["en"])
    box = view.find(".gantt svg").bounding_box()
    cursor = view.find(".gantt .cursor")
    assert box is not None
    unit = float(cursor.get_attribute("width") or 0)
    left = float(cursor.get_attribute("x") or 0)
    view.find(".gantt svg").click(position={"x": left + 3.5 * unit, "y": 30})
    assert view.step == 3


def test_the_first_preset_plays_before_anything_is_touched(browser: Browser, address: str) -> None:
    view = open_view(browser, address, reduced_motion="no-preference")
    view.page.wait_for_function("() => +document.querySelector('.tw').dataset.step >= 2")
    assert view.complaints == []
    view.page.context.close()


def test_labels_come_in_chinese_too(view: View) -> None:
    view.find(".lang").click()
    assert view.find("h2").text_content() == "静态批处理与连续批处理"
    assert (view.find(".say").nth(0).text_content() or "").startswith("第 0 步：")
    assert view.page.locator(".tw").get_attribute("lang") == "zh-Hans"


def test_a_browser_set_to_chinese_sees_chinese(browser: Browser, address: str) -> None:
    view = open_view(browser, address, locale="zh-CN")
    assert view.find(".poolcard h4").first.text_content() == "物理块池"
    assert "课程" in (view.page.locator("#preset").text_content() or "")
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
    tiers = [text.split(" ")[0] for text in view.find(".name small").all_text_contents()]
    assert tiers == ["reference", "fast"]


def test_what_if_runs_the_same_requests_with_a_changed_option(view: View) -> None:
    view.page.locator("#details button").first.click()
    view.page.locator("#changes textarea").fill("block_size = 8\nnum_blocks = 17")
    view.page.locator("#run").click()
    view.page.wait_for_function(
        "() => document.querySelectorAll('.tw .name')[1]?.textContent.includes('16 blocks of 8')"
    )
    parting = view.find(".parting").text_content() or ""
    assert "“A” and “block_size = 8, num_blocks = 17” part in step 0: " in parting
    assert "A block holds 4 tokens in “A” and 8 in" in parting


def test_what_if_forks_the_run_from_the_step_that_is_shown(view: View) -> None:
    view.choose_preset(preset("priority").title["en"])
    view.scrub(3)
    view.find(".whatifbtn").click()
    form = view.find(".whatif")
    assert (
        form.locator("legend").text_content() == "The same requests, but with"
    )  # block_size stands there first
    assert "block_size: cannot change in mid-run" in (form.locator(".note").text_content() or "")
    form.locator("select.what").select_option("scheduling_policy")
    assert form.locator("legend").text_content() == "The same run, but from step 3 on with"
    assert form.locator(".was").text_content() == "now fcfs"
    form.locator(".go").click()
    view.page.wait_for_function("() => document.querySelector('.tw h2').textContent.startsWith('What if')")
    view.wait_for_status("Done: 22 and 22 steps.")
    assert view.find("h2").text_content() == "What if scheduling_policy = priority, from step 3 on?"
    assert view.step == 3
    assert "“as it was” and “what if” part in step 3" in (view.find(".parting span").text_content() or "")
    assert view.find(".pane").nth(1).locator(".forkline").count() == 1
    assert view.find(".pane").nth(0).locator(".forkline").count() == 0
    waiting = view.find(".pane").locator('[data-queue="waiting"] .id')
    assert waiting.all_text_contents() == ["dan", "eve", "finn", "urgent", "urgent", "dan", "eve", "finn"]
    view.scrub(9)
    view.find(".parting button").click()
    assert view.step == 3


def test_the_form_of_what_if_works_by_keyboard_and_refuses_nonsense_with_a_sentence(view: View) -> None:
    view.find(".whatifbtn").focus()
    press = view.page.keyboard.press
    press("Enter")
    assert view.find(".whatifbtn").get_attribute("aria-expanded") == "true"
    press("Escape")
    assert view.find(".whatif").is_hidden()
    press("Enter")
    view.find(".whatif select.of").select_option("1")
    view.find('.whatif [data-what="add"]').click()
    view.find(".whatif select.what").nth(1).select_option("num_blocks")
    view.find('.whatif [data-what="drop"]').first.click()
    assert view.find(".whatif .change").count() == 1
    assert view.find(".whatif select.what").input_value() == "num_blocks"
    view.find('.whatif input[aria-label="num_blocks"]').fill("2")
    view.find(".whatif .go").click()
    view.wait_for_status("Request 'ann'")
    assert view.page.locator("#status [role=alert]").count() == 1


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
    view.page.locator("#changes textarea").fill(text)
    view.page.locator("#run").click()
    view.wait_for_status(sentence)
    assert view.page.locator("#status [role=alert]").count() == 1


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
    assert view.find(".pool .ev-copy").count() == 3


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
    assert view.find("img").count() == 0
    assert view.find("script").count() == 0
    assert view.page.evaluate("window.hit") is None
    assert "<b>bold</b>" in (view.find(".chip").first.text_content() or "")


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
    assert "Cancelled" in (view.page.locator("#status").text_content() or "")
    assert view.find(".pane").count() == 1


def make_long_run(path: Path, steps: int, requests: int) -> None:
    """A trace of so many steps with so many requests at once."""
    workload = Workload(
        tuple(
            WorkloadRequest(
                f"r{i}", prompt=f"request {i}", params=SamplingParams(max_tokens=steps, ignore_eos=True)
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
    assert view.find(".row").count() == 8
    assert view.find(".gantt rect[class^=s-]").count() == 64  # a prefill and one merged decode a request
    view.find(".pager button").last.click()
    assert view.find(".row").first.get_attribute("data-request") == "r8"


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
    view.page.wait_for_function("() => document.querySelector('.tw h2').textContent.startsWith('What if')")
    view.wait_for_status("Done")
    assert serious(view.page) == []
    view.choose_preset(preset("blocksize").title["en"])
    assert serious(view.page) == []
    assert view.complaints == []
    view.page.context.close()
