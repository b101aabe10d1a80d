"""The kernel view: what the tracer saw, and what of it the page shows."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

import app.kernel
from app.kernel import MAX_EVENTS, Problem, counts_of, make_kernel_page, rungs, trace_rung, why_unavailable
from app.page import make_app
from tests.app.axe import serious
from tests.app.browser import View, open_view

RUNGS = rungs()


def numbers(row: Any) -> list[int]:
    """What the browser makes of a row."""
    if isinstance(row, dict):
        return row["all"]
    first, step, count = row
    return [first + i * step for i in range(count)]


@pytest.mark.parametrize("rung", RUNGS)
def test_the_page_holds_what_the_tracer_saw_phase_by_phase(rung: str) -> None:
    problem = Problem(length=9, dtype="float16" if counts_of(rung, Problem()) is None else "float32")
    trace, page = trace_rung(rung, problem), json.loads(json.dumps(make_kernel_page(rung, problem)))
    assert page["num_events"] == len(trace.events) == len(page["events"])
    assert sorted(page["events"], key=lambda event: event[:2]) == page["events"]
    shown = iter(page["events"])
    for event in sorted(trace.events, key=lambda event: (event.launch, event.phase)):
        launch, phase, warp, did, site, width, lanes, array, offsets, values, cost, least = next(shown)
        assert (launch, phase, warp, did, site) == (
            event.launch, event.phase, event.warp, event.did, event.site,
        )  # fmt: skip
        assert numbers(lanes) == list(event.lanes)
        assert numbers(offsets) == list(event.offsets)
        assert len(values) == len(event.values)
        if event.space:
            assert page["arrays"][array]["name"] == event.arrays[0]
            assert 1 <= least <= cost
            assert width == event.width
        else:
            assert array == -1


def test_slots_of_the_cache_hold_the_tokens_that_the_kernel_reads() -> None:
    page = make_kernel_page("v2_shared_reduce", Problem(length=11, block_size=8))
    tokens = {slot: (seq, position) for slot, seq, position in page["cache"]["tokens"]}
    assert sorted(tokens.values()) == [
        (0, position) for position in range(11)
    ]  # of the sequence of this block
    slot_bytes = page["head_dim"] * page["kv_heads"] * 4
    k_cache = next(i for i, array in enumerate(page["arrays"]) if array["name"] == "k_cache")
    read = {
        offset // slot_bytes
        for event in page["events"]
        if event[7] == k_cache
        for offset in numbers(event[8])
    }
    assert read == tokens.keys()


def test_rungs_differ_in_what_they_cost() -> None:
    counts = {rung: counts_of(rung, Problem()) for rung in RUNGS}
    naive, shared, vectorised = (counts[rung] for rung in RUNGS[:3])
    assert naive is not None
    assert shared is not None
    assert vectorised is not None
    assert naive["barriers"] == naive["shared_instructions"] == 0 < shared["barriers"]
    assert shared["shuffles"] == 0 < vectorised["shuffles"]
    assert vectorised["sectors"] == vectorised["fewest_sectors"] < shared["sectors"]


def test_a_long_naive_trace_is_cut_and_says_so() -> None:
    page = make_kernel_page("v1_naive", Problem(length=64))
    assert len(page["events"]) == MAX_EVENTS < page["num_events"]
    assert page["counts"]["v1_naive"]["global_instructions"] > MAX_EVENTS


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (Problem(length=0), "1 to 128 tokens long, got 0"),
        (Problem(length=129), "1 to 128 tokens long"),
        (Problem(block_size=5), "There is no such kernel"),
        (Problem(dtype="float64"), "There is no such kernel"),
    ],
)
def test_what_is_not_offered_is_refused_with_a_sentence(problem: Problem, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_kernel_page("v1_naive", problem)
    with pytest.raises(ValueError, match="There is no rung 'v0'"):
        make_kernel_page("v0", Problem())


def test_without_the_extension_there_is_a_sentence_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unavailable() is None
    monkeypatch.setattr(app.kernel, "find_spec", lambda name: None)
    assert rungs() == ()
    texts = [str(getattr(block, "value", "")) for block in make_app().blocks.values()]
    assert any("The kernel view needs the compiled extension: build it with `make`" in text for text in texts)
    assert any("内核视图需要编译好的扩展：在仓库中用 `make`" in text for text in texts)


# ---- in the browser ----

browser_group = pytest.mark.xdist_group("second-browser")


def open_kernel(view: View) -> Page:
    view.page.get_by_role("tab", name="Kernel").click()
    view.page.wait_for_selector("#kernel-viewer .kcards", timeout=30_000)
    return view.page


def go(page: Page, number: int) -> None:
    page.locator("#kernel-viewer .scrub").fill(str(number))


def part(page: Page, selector: str) -> Locator:
    return page.locator(f"#kernel-viewer {selector}")


def first_event(view: dict[str, Any], did: str, array: str) -> int:
    index = next(i for i, entry in enumerate(view["arrays"]) if entry["name"] == array)
    return next(i for i, event in enumerate(view["events"]) if event[3] == did and event[7] == index)


@browser_group
def test_a_rung_is_stepped_through_and_its_counts_stand_beside_the_others(view: View) -> None:
    page, expected = open_kernel(view), make_kernel_page("v2_shared_reduce", Problem())
    for rung in RUNGS:
        counts = expected["counts"][rung]
        if counts is not None:
            cell = page.locator(f'#kernel-viewer [data-rung="{rung}"] [data-count="barriers"]')
            expect(cell).to_have_text(str(counts["barriers"]))
    go(page, first_event(expected, "read", "k_cache"))
    expect(part(page, ".say")).to_have_text(
        "Warp 0, lanes 0–23, reads k_cache: 24 × 4 bytes. Sectors moved: 24, needed: 3."
    )
    expect(page.locator("#kernel-viewer .warp.active .q-bad")).to_have_count(24)
    expect(page.locator("#kernel-viewer .slots .slot-now")).to_have_count(24)
    expect(page.locator("#kernel-viewer .sectors i")).to_have_count(24)
    expect(part(page, ".k-sectorscard")).to_contain_text("96 / 768 bytes asked for (13 %)")
    page.locator('#kernel-viewer [data-rung="v3_vectorised"] button').click()
    page.wait_for_function(
        "() => document.querySelector('#kernel-viewer .chosen').dataset.rung === 'v3_vectorised'"
    )
    expect(page.locator("#rung input")).to_have_value("v3_vectorised")
    go(page, first_event(make_kernel_page("v3_vectorised", Problem()), "read", "k_cache"))
    expect(part(page, ".say")).to_have_text(re.compile(r"32 × 16 bytes\. Sectors moved: 16, needed: 16\.$"))
    expect(page.locator("#kernel-viewer .warp.active .q-perfect")).to_have_count(32)


@browser_group
def test_the_tree_in_shared_memory_halves_level_by_level_to_the_sum_of_the_softmax(view: View) -> None:
    page, expected = open_kernel(view), make_kernel_page("v2_shared_reduce", Problem())
    watches = [
        (i, event) for i, event in enumerate(expected["events"])
        if event[3] == "watch" and expected["sites"][event[4]]["name"] == "sum"
    ]  # fmt: skip
    number, event = watches[0]
    go(page, number)
    levels = page.locator("#kernel-viewer .level .who").all_text_contents()
    assert levels[-8:] == [f"scratch · {1 << i}" for i in reversed(range(8))]
    total = event[9][0][0]
    expect(part(page, ".level.present .cells")).to_have_text(f"{total:.3g}")
    expect(part(page, ".k-softmaxcard")).to_contain_text(f"{total:.3g}")
    expect(part(page, ".k-softmaxcard")).to_contain_text("running maximum")


@browser_group
def test_the_naive_rung_shows_the_softmax_as_it_runs(view: View) -> None:
    page = open_kernel(view)
    page.locator('#kernel-viewer [data-rung="v1_naive"] button').click()
    page.wait_for_function(
        "() => document.querySelector('#kernel-viewer .chosen').dataset.rung === 'v1_naive'"
    )
    page.keyboard.press("End")
    expect(part(page, ".k-sharedcard")).to_contain_text("This rung has no shared memory.")
    expect(part(page, ".k-reductioncard")).to_contain_text("This rung reduces nothing across threads.")
    path = page.locator("#kernel-viewer .watch path").first.get_attribute("d") or ""
    assert path.count("L") == 23  # the largest logit after each of 24 positions


@browser_group
def test_the_kernel_view_by_keyboard_pointer_and_in_chinese(view: View) -> None:
    page, expected = open_kernel(view), make_kernel_page("v2_shared_reduce", Problem())
    page.locator("#kernel-viewer h2").click()
    at = page.locator("#kernel-viewer .tw")
    for key, step in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", len(expected["events"]) - 1),
    ):
        page.keyboard.press(key)
        expect(at).to_have_attribute("data-step", str(step))
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    phase = next(i for i, event in enumerate(expected["events"]) if event[1] == 1)
    expect(at).to_have_attribute("data-step", str(phase))
    page.keyboard.press("ArrowUp")
    expect(at).to_have_attribute("data-step", "0")
    number = first_event(expected, "read", "k_cache")
    go(page, number)
    page.locator("#kernel-viewer .slots .slot-now").first.hover()
    expect(page.locator("#kernel-viewer .warp .lit")).to_have_count(1)
    page.locator("#kernel-viewer .lang").click()
    expect(part(page, "h2")).to_have_text("分页注意力的一个线程块")
    expect(part(page, ".say")).to_have_text(re.compile("^warp 0，lane 0–23，读 k_cache"))
    page.locator("#kernel-viewer .k-hotcard button").first.click()
    expect(at).to_have_attribute("data-step", str(number))


@browser_group
def test_a_context_that_is_too_long_is_refused_with_a_sentence(view: View) -> None:
    page = open_kernel(view)
    page.locator("#length input").fill("1000")
    page.locator("#length input").press("Enter")
    page.wait_for_function("() => document.querySelector('#kernel-status [role=alert]')")
    expect(page.locator("#kernel-status")).to_contain_text("1 to 128 tokens long")


@browser_group
@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_axe_finds_no_serious_violation_in_the_kernel_view(
    browser: Browser, address: str, theme: str, width: int
) -> None:
    view = open_view(browser, address, theme=theme, width=width)
    page, expected = open_kernel(view), make_kernel_page("v2_shared_reduce", Problem())
    for number in (first_event(expected, "read", "k_cache"), len(expected["events"]) - 1):
        go(page, number)
        assert serious(page) == []
    assert page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth") <= 0
    assert view.complaints == []
    page.context.close()
