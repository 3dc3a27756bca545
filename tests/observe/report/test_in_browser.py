"""The page in a real Chromium: curves, filters, keyboard, small windows, no network, no injection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stppo.observe.report import page
from tests.observe.report import browser as chromium
from tests.observe.report import hostile
from tests.observe.report.browser import Browser

pytestmark = pytest.mark.skipif(chromium.FOUND is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (page of a run with a hostile name and damaged files, page of two runs)."""
    root = tmp_path_factory.mktemp("runs")
    runs = [hostile.write(root / "a"), hostile.write(root / "b", preset="ppo", iterations=6)]
    damaged = hostile.write(root / "<img src=x onerror=window.struck=3>")
    hostile.damage(damaged)
    page.draw([damaged], root / "one.html")
    page.draw(runs, root / "two.html")
    return root / "one.html", root / "two.html"


def opened(browser: Browser, path: Path, width: int = 1200, scheme: str = "light") -> Browser:
    browser.look(width, scheme=scheme)
    browser.open(path)
    return browser


def text(browser: Browser, selector: str) -> str:
    return str(browser.ask(f"document.querySelector({selector!r}).textContent"))


def count(browser: Browser, selector: str) -> int:
    return int(browser.ask(f"document.querySelectorAll({selector!r}).length"))


def enter(browser: Browser, name: str, value: str) -> None:
    browser.ask(
        f"(() => {{ const field = document.querySelector('#filters').elements[{name!r}];"
        f" field.value = {value!r};"
        " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_hostile_text_is_shown_and_does_nothing(browser: Browser, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[0])
    enter(browser, "outcome", "wrong")
    assert text(browser, ".turn .text") == hostile.MARKUP
    assert f"metrics{hostile.MARKUP} 1, score 0.5" in text(browser, ".facts")
    shown = text(browser, ".passage:last-child .text")
    assert shown == "leftU+202Eright U+001B[2J U+2028 U+D800 zeroU+200Bwidth"
    assert text(browser, "h1") == "<img src=x onerror=window.struck=3>"
    assert browser.ask("window.struck") is None
    assert browser.complaints == []
    assert browser.requests == [pages[0].as_uri()]
    assert "8 damaged lines" in text(browser, "#notes")


def test_the_histories_of_an_agents_episode_are_marked(browser: Browser, tmp_path: Path) -> None:
    run = hostile.write(tmp_path / "run")
    episodes = [
        hostile.episode("ok", 1.0, hostile.turn(text), branch=branch, tool_calls=1 - branch)
        for branch, text in enumerate(("first", "second"))
    ]
    (run / "trajectories" / "iteration-00002.jsonl").write_text(hostile.lines(*episodes))
    page.draw([run], tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    enter(browser, "iteration", "2")
    assert text(browser, "#found") == "2 of 5 histories of episodes on this page"
    entries = "[...document.querySelectorAll('#list .where')].map((one) => one.textContent)"
    assert browser.ask(entries) == ["2·1", "2·2 ↳"]
    assert "tool calls1" in text(browser, ".facts") and "history" not in text(browser, ".facts")
    browser.ask("document.querySelector('#list li:last-child').click()")
    assert "history2 of the episode that begins on line 1" in text(browser, ".facts")
    assert "tool calls" not in text(browser, ".facts") and text(browser, ".turn .text") == "second"


def test_the_content_security_policy_blocks_injected_markup(
    browser: Browser, pages: tuple[Path, Path]
) -> None:
    opened(browser, pages[0])
    browser.ask(
        """document.body.insertAdjacentHTML('beforeend',
        '<img src="data:," onerror="window.struck = 4"><iframe src="http://127.0.0.1:9/"></iframe>')"""
    )
    browser.ask("void fetch('http://127.0.0.1:9/').catch(() => 0)")
    browser.ask("new Promise((done) => setTimeout(done, 200))", wait=True)
    assert browser.ask("window.struck") is None
    refused = "".join(browser.complaints)
    assert all(f"{kind}-src" in refused for kind in ("script", "img", "frame", "connect"))


def test_every_metric_has_a_panel_that_can_be_read_by_keyboard(
    browser: Browser, pages: tuple[Path, Path]
) -> None:
    opened(browser, pages[0])
    titles = browser.ask("[...document.querySelectorAll('figcaption')].map((one) => one.textContent)")
    assert titles == [
        "Reward",
        "Action tokens clipped, share",
        "Gradient norm, actor",
        "Seconds per iteration",
        "Environment: score",
        "Time by phase, share",
    ]
    browser.ask("document.querySelector('svg').focus()")
    browser.press("End")
    assert text(browser, "#cursor") == "6"
    assert text(browser, ".legend b") == "not a number at 5"
    assert count(browser, "figure:first-child .refused") == 1
    assert "× marks" in browser.ask("document.querySelector('#curves .hint').innerText")
    for key, iteration in (
        ("ArrowLeft", "5"),
        ("ArrowLeft", "4"),
        ("ArrowLeft", "3"),
        ("ArrowLeft", "2"),
        ("Home", "1"),
        ("ArrowLeft", "1"),
    ):
        browser.press(key)
        assert text(browser, "#cursor") == iteration
    assert text(browser, ".legend b") == "0.25"
    told = browser.ask("document.querySelector('svg').getAttribute('aria-valuetext')")
    assert told == "iteration 1: training 0.25"
    shares = browser.ask(
        "[...document.querySelectorAll('figure:last-child b')].map((one) => one.textContent)"
    )
    assert shares == ["75.0 %, 3 s", "25.0 %, 1 s"]


def test_an_asynchronous_run_shows_who_waited_and_how_old_its_tokens_were(
    browser: Browser, tmp_path: Path
) -> None:
    folder = hostile.write(tmp_path / "run")
    served = {
        "serving/replicas": 1,
        "serving/trainer_idle_share": 0.5,
        "serving/idle_share": 0.25,
        "serving/episodes_finished": 3,
        "staleness/tokens_0": 0.25,
        "staleness/tokens_1": 0.75,
    }
    (folder / "metrics.jsonl").write_text(hostile.lines(*({"iteration": k} | served for k in (1, 2))))
    page.draw([folder], tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    panels = browser.ask(
        "[...document.querySelectorAll('figure')].map((one) =>"
        " [one.querySelector('figcaption'), ...one.querySelectorAll('li')].map((part) => part.textContent))"
    )
    assert panels == [
        ["Waiting, share of time", "trainer0.5", "replicas0.25"],
        ["Episodes admitted and not trained on", "finished3"],
        ["Action tokens by staleness, share", "0 versions old25.0 %", "1 version old75.0 %"],
    ]


def test_filters_and_search_find_episodes(browser: Browser, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[0])
    assert count(browser, "#list li") == 4
    for name, value, found in (
        ("iteration", "2", 1), ("iteration", "", 4), ("least", "0.5", 3), ("most", "0.7", 1),
        ("least", "", 2), ("most", "", 4), ("text", "PARIS IS", 1), ("text", "a(", 0),
        ("text", "</script>", 1), ("text", "", 4),
    ):  # fmt: skip
        enter(browser, name, value)
        assert count(browser, "#list li") == found, (name, value)
    enter(browser, "text", "paris")
    assert "Paris" in browser.ask("[...document.querySelectorAll('mark')].map((one) => one.textContent)")
    browser.ask("document.querySelector('[name=clipped]').click()")
    assert text(browser, "#found") == "1 of 4 episodes on this page"


def test_turns_are_coloured_and_clipped_ones_marked(browser: Browser, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[0])
    strengths = (
        "[...document.querySelectorAll('.turn')].map((one) => one.style.getPropertyValue('--strength'))"
    )
    assert browser.ask(strengths) == ["0%", "100%"]
    assert text(browser, ".turn.clipped h4") == "Turn 2clipped: 5 of 5 tokens"
    assert browser.ask(
        "getComputedStyle(document.querySelector('.turn')).backgroundColor"
        " !== getComputedStyle(document.querySelector('.turn.clipped')).backgroundColor"
    )
    colour = "getComputedStyle(document.querySelector('{} .text')).color"
    assert browser.ask(colour.format(".passage")) != browser.ask(colour.format(".turn"))  # shown in grey
    browser.ask("document.querySelector('[value=advantage][name=tone]').click()")
    assert browser.ask(strengths) == ["50%", "100%"]
    enter(browser, "iteration", "2")
    assert "the update recorded nothing for this turn" in text(browser, ".turn h4")


def test_the_full_colour_is_the_bound_of_a_turn_of_this_length(browser: Browser, tmp_path: Path) -> None:
    # 5 tokens: the bound is 1.2^(1/5) = 1.037, and log 1.0184 is half of its logarithm.
    run = hostile.write(tmp_path / "run")
    bounds = "segments: turn, clip_low: 0.2, clip_high: 0.2, clip_length_power: 1"
    (run / "config.yaml").write_text(f"algorithm: {{{bounds}}}\n")
    of_turns = hostile.lines({"turns": [hostile.told(ratio=1.2**0.1), hostile.told(ratio=1.05)]})
    (run / "trajectories" / "iteration-00001.turns.jsonl").write_text(of_turns)
    page.draw([run], tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    strengths = (
        "[...document.querySelectorAll('.turn')].map((one) => one.style.getPropertyValue('--strength'))"
    )
    assert browser.ask(strengths) == ["50%", "100%"]
    assert text(browser, "#scale").startswith("0.8^(1/n)1.2^(1/n), n tokens")


def test_arrow_keys_move_through_the_list(browser: Browser, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[0])
    seen: list[str] = []
    for _ in range(40):
        browser.press("Tab")
        seen.append(str(browser.ask("document.activeElement.id || document.activeElement.name || ''")))
        if browser.ask("document.activeElement.getAttribute('role')") == "option":
            break
    controls = [
        "smoothing",
        "log",
        "other",
        "to-episodes",
        "iteration",
        "outcome",
        "least",
        "most",
        "text",
        "clipped",
        "order",
    ]
    assert [name for name in seen if name in controls] == controls
    browser.press("ArrowDown")
    assert text(browser, "#episode h3") == "Iteration 1, episode 2"
    assert browser.ask("document.activeElement === document.querySelector('[aria-selected=true]')")
    browser.press("End")
    assert text(browser, "#episode h3") == "Iteration 2, episode 1"
    browser.press("Enter")
    assert browser.ask("document.activeElement.id") == "episode"
    browser.press("ArrowLeft")
    assert text(browser, "#episode h3") == "Iteration 1, episode 3"
    assert browser.ask("document.activeElement.id") == "episode"
    browser.press("c")
    assert browser.ask("document.querySelector('[name=tone]:checked').value") == "advantage"
    browser.press("Escape")
    assert browser.ask("document.activeElement === document.querySelector('[aria-selected=true]')")
    browser.press("ArrowRight")
    assert text(browser, "#episode h3") == "Iteration 2, episode 1"
    browser.press("/")
    assert browser.ask("document.activeElement.name") == "text"


def test_runs_are_compared(browser: Browser, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[1])
    differs = browser.ask("[...document.querySelectorAll('#config tbody tr')].map((row) => row.textContent)")
    assert differs == ['run.name"a""b"', 'algorithm.preset"st_ppo""ppo"']
    browser.ask("document.getElementById('config-differs').click()")
    assert count(browser, "#config tbody tr") == 4
    assert text(browser, ".legend") == "a1 at 4b1.5"
    enter(browser, "run", "1")
    assert count(browser, "#list li") == 4


def test_runs_of_one_algorithm_share_a_colour_and_have_a_mean(browser: Browser, tmp_path: Path) -> None:
    """Two algorithms have two runs each, of 4 and 6 iterations. The reward of iteration k is k/4."""
    made = [
        hostile.write(tmp_path / f"{preset}-{iterations}", preset, iterations)
        for preset in ("ppo", "st_ppo")
        for iterations in (4, 6)
    ]
    page.draw(made, tmp_path / "page.html")
    opened(browser, tmp_path / "page.html")
    legend = "[...document.querySelectorAll('figure:first-child .legend li')].map((one) => one.textContent)"
    assert browser.ask("document.getElementById('grouping').value") == "algorithm.preset"
    assert browser.ask(legend) == [f"{name}1.5 (1.5 to 1.5, 1 of 2 runs)" for name in ("ppo", "st_ppo")]
    assert count(browser, "figure:first-child .faint") == 4
    browser.ask("document.querySelector('#runs input').click()")
    assert browser.ask(legend) == ["ppo1.5", "st_ppo1.5 (1.5 to 1.5, 1 of 2 runs)"]
    enter(browser, "order", "task")
    assert browser.ask("browser.shown.slice(0, 5).map((one) => one.r)") == [0, 1, 2, 3, 0]


def test_means_include_only_runs_that_have_not_ended(browser: Browser, pages: tuple[Path, Path]) -> None:
    opened(browser, pages[0])
    two = "[[[1, 3], [0, 4]], [[1, 2, 3, 4], [2, 4, 6, null]]]"
    assert browser.ask(f"mean({two})") == [[1, 2, 3, 4], [1, 2, 5, None]]
    assert browser.ask(f"reading({two}, 2)") == "2 (0 to 4, 2 of 2 runs)"
    assert browser.ask(f"reading({two}, 4)") == "0 of 2 runs"
    assert browser.ask("smooth([[1, 2, 3, 4], [1, 3, null, 5]], 2)[1]") == [1, 2, None, 5]


@pytest.mark.parametrize("which", [0, 1])
def test_the_page_fits_the_width_of_a_phone(browser: Browser, pages: tuple[Path, Path], which: int) -> None:
    opened(browser, pages[which], width=360)
    assert browser.ask("document.documentElement.scrollWidth") <= 360


def test_the_page_follows_the_setting_for_light_or_dark(browser: Browser, pages: tuple[Path, Path]) -> None:
    ask = "getComputedStyle(document.body).backgroundColor"
    assert opened(browser, pages[0]).ask(ask) == "rgb(255, 255, 255)"
    assert opened(browser, pages[0], scheme="dark").ask(ask) == "rgb(20, 22, 26)"
