"""The page, in a browser: it opens in peace, its numbers are the simulation's, it finds parameters, obeys keys, draws to scale."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from zfx.certificate import certify
from zfx.dump import save
from zfx.ir import Bucket, Instruction, Limits, Parameter, Program, Schedule, Step
from zfx.passes import gather_on_demand, keep_parameters, plan
from zfx.picture import to_html
from zfx.reasons import tell
from zfx.simulate import Moment, simulate
from zfx.text import printable

from .browser import chromium
from .strategies import chain, problems
from .test_dump import ODD, schedules
from .test_reasons import network

HOSTILE = (
    "</script><script>document.title='broken'</script>",
    "<!-- <script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "a'\"`\\ ${document.title='broken'} {a|b}",
    "line\u2028separator\u2029and\x00zero\nnew",
    "right\u202eto left",
    "\ud800 alone",
    "&lt;b&gt;&amp;",
    "__proto__",
    "constructor",
    "é漢😀" * 20,
)


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, dict[str, str | None], str]] = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if self.open:
            self.inside.append((*self.elements[-1], data))


def data_of(text: str) -> dict[str, Any]:
    (content,) = (content for _, attributes, content in Page(text).inside if attributes.get("id") == "schedule")
    return json.loads(content)


def hostile() -> Schedule:
    """A chain whose names are markup, quotes and odd characters."""
    program = chain(len(HOSTILE))
    names = {f"p{i}": name for i, name in enumerate(HOSTILE)}
    steps = tuple(
        replace(s, name=f"{s.name}{HOSTILE[i % len(HOSTILE)]}", op=HOSTILE[-1 - i % len(HOSTILE)],
                reads=tuple(names[n] for n in s.reads), completes=tuple(names[n] for n in s.completes))
        for i, s in enumerate(program.steps)
    )  # fmt: skip
    parameters = tuple(replace(p, name=names[p.name]) for p in program.parameters)
    costs = replace(program.costs, source=HOSTILE[0])
    return plan(replace(program, parameters=parameters, steps=steps, costs=costs), Limits(max_live_parameters=40))


# ------------------------------------------------------------------------------------------------------- without a browser


def check_data(schedule: Schedule) -> None:
    """What the page draws is the schedule and its simulation, to the last bit."""
    data, result, story = data_of(to_html(schedule)), simulate(schedule), tell(schedule)
    program, moments = schedule.program, data["moments"]
    names = [p.name for p in program.parameters]
    assert data["parameters"]["name"] == list(map(printable, names))
    assert data["parameters"]["bytes"] == [p.num_bytes for p in program.parameters]
    assert [(a, b) for a, b in zip(data["steps"]["start"], data["steps"]["end"])] == [(t.start_us, t.end_us) for t in result.steps]
    assert [[names[i] for i in row] for row in data["steps"]["reads"]] == [list(dict.fromkeys(s.reads)) for s in program.steps]
    assert "".join(s.phase[0] for s in program.steps) == data["steps"]["phase"]
    kinds = ("parameters", "packing", "gradients", "activations")
    drawn = list(zip(moments["time"], moments["point"], *(moments[kind] for kind in kinds)))
    assert drawn == [(m.time_us, m.point, *(getattr(m, kind) for kind in kinds)) for m in result.moments]
    assert all(m.shards == data["shards"] for m in result.moments)
    columns = ("bucket", "bytes", "launch", "start", "end", "wait", "exposed")
    assert list(zip(*(data["collectives"][c] for c in columns))) == [s[1:] for s in result.spans]
    assert [c["why"] for c in data["lives"]] == [list(life.why) for life in story.lives]
    assert data["totals"] == {name: getattr(result, name) for name in ("finish_us", "compute_us", "overhead_us", "exposed_us")}
    for name in ("peak", "forward_end", "backward_end"):
        place = data["marks"][name]
        assert (result.moments[place] if result.moments else result.peak) == getattr(result, name)


def test_the_data_of_a_plan() -> None:
    check_data(network())


@settings(max_examples=25)
@given(problems(replicas=(1, 2)))
def test_the_data_of_any_plan(problem: tuple[Program, Limits]) -> None:
    check_data(plan(*problem))


@settings(max_examples=15)
@given(schedules())
def test_any_schedule_is_a_page_or_refused(schedule: Schedule) -> None:
    try:
        text = to_html(schedule)
    except ValueError as error:
        assert "for ever" in str(error)
    else:
        assert data_of(text)["world_size"] == schedule.program.world_size


def test_the_policy_admits_our_scripts_and_nothing_else(tmp_path: Path) -> None:
    save(network(), tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text("utf-8")
    assert text == to_html(network())
    page = Page(text)
    (policy,) = (a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"

    def digests(tag: str) -> set[str]:
        rows = [content for name, attributes, content in page.inside if name == tag and "id" not in attributes]
        return {f"'sha256-{base64.b64encode(hashlib.sha256(row.encode()).digest()).decode()}'" for row in rows}

    assert set(rules["script-src"].split()) == digests("script") and len(digests("script")) == 2
    assert set(rules["style-src"].split()) == digests("style") and len(digests("style")) == 1


def test_hostile_names_stay_inside_the_data() -> None:
    ours, theirs = to_html(network()), to_html(hostile())
    assert theirs.encode("utf-8").isascii() == ours.encode("utf-8").isascii()
    for markup in ("<script", "</script", "<!--", "<img"):
        assert ours.count(markup) == theirs.count(markup)
    names = data_of(theirs)["parameters"]["name"]
    assert sorted(names) == sorted(map(printable, HOSTILE))
    assert all(name.isprintable() for name in names)
    odd = Schedule(Program(tuple(Parameter(n, 1, 4) for n in ODD), tuple(Step(n, "forward", n, ODD) for n in ODD)), Limits())
    assert data_of(to_html(odd))["parameters"]["name"] == list(map(printable, ODD))


def test_text_can_be_read_on_what_it_stands_on() -> None:
    """Contrast of at least 4.5 to 1 (WCAG AA), in light and in dark."""
    style = (Path(__file__).parents[1] / "zfx" / "assets" / "picture.css").read_text("utf-8")
    found = {name: pair for name, *pair in re.findall(r"--(\w+): light-dark\(#(\w{6}), #(\w{6})\)", style)}

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))

    grounds = [("ink", "paper"), ("ink", "panel"), ("soft", "paper"), ("soft", "panel"), ("good", "panel"), ("limit", "paper")]
    grounds += [("on", color) for color in ("accent", "forward", "turn", "backward", "gather", "reduce", "all_reduce", "exposed")]
    for text, ground in grounds:
        for scheme in (0, 1):
            low, high = sorted((luminance(found[text][scheme]), luminance(found[ground][scheme])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground, scheme)


# ------------------------------------------------------------------------------------------------------------ in a browser

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a schedule, offline; at the end nothing may have been asked of the network, nor reported to the console."""
    troubles: list[str] = []
    contexts = []

    def open_(schedule: Schedule, *, width: int = 1440, height: int = 900, scheme: str = "light") -> Any:
        path = tmp_path / f"page{len(contexts)}.html"
        save(schedule, path)
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # a busy machine is no reason to fail
        page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("request", lambda request: troubles.append(request.url) if request.url != path.as_uri() else None)
        page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert troubles == []


def numbers(page: Any, selector: str) -> list[float]:
    """The exact values of the numbers shown under a selector."""
    values = page.eval_on_selector_all(f"{selector} data", "nodes => nodes.map(node => node.value)")
    return [float(value) for value in values]


def fact(page: Any, name: str, within: str = "#details") -> float:
    rows = page.eval_on_selector_all(
        f"{within} dl.facts dt", "nodes => nodes.map(n => [n.textContent, n.nextElementSibling.querySelector('data')?.value])"
    )
    return float(dict(rows)[name])


def view(page: Any) -> tuple[float, float]:
    start, end = numbers(page, "#view")
    return start, end


def test_all_reduces_have_a_lane(open_page: Open) -> None:
    schedule = plan(chain(3, replicas=2), Limits(max_reuse_distance=0, param_persistence_threshold=0, reduce_bucket_size=0))
    page, spans = open_page(schedule), simulate(schedule).spans
    assert fact(page, "all-reduces") == 3 and fact(page, "all-reduced") == 60
    for span in sorted(spans, key=lambda s: s.start_us):
        page.keyboard.press("n")
        assert (fact(page, "bytes"), fact(page, "starts")) == (span.num_bytes, span.start_us)
        title = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}[span.kind]
        assert title in page.inner_text("#selected h2")


def test_numbers_on_the_page_are_the_simulations(open_page: Open) -> None:
    schedule = network()
    page, result, certificate = open_page(schedule), simulate(schedule), certify(schedule)
    assert numbers(page, "#card-time") == [certificate.time_us, certificate.time_ratio, certificate.time_bound_us]
    assert numbers(page, "#card-volume") == [certificate.volume_bytes, certificate.volume_ratio, certificate.volume_bound_bytes]
    assert numbers(page, "#card-peak") == [certificate.peak_bytes, certificate.peak_ratio, certificate.peak_bound_bytes]
    assert numbers(page, "#card-exposed") == [result.exposed_us, result.compute_us, result.overhead_us]
    for name in ("time", "volume", "peak"):
        assert getattr(certificate, f"{name}_binds") in page.inner_text(f"#card-{name}")
    assert fact(page, "step time") == result.finish_us
    assert fact(page, "gathers") == sum(s.kind == "all_gather" for s in result.spans)
    assert fact(page, "reduced") == sum(s.num_bytes for s in result.spans if s.kind == "reduce_scatter")
    for name in ("peak", "forward_end", "backward_end"):
        moment = getattr(result, name)
        expected = [moment.parameters, moment.packing, moment.gradients, moment.activations, moment.shards, moment.total]
        assert numbers(page, f"td[data-mark={name}]") == expected

    page.keyboard.press("x")  # the peak
    assert (fact(page, "time"), fact(page, "in all")) == (result.peak.time_us, result.peak.total)
    page.keyboard.press("Escape")
    for span in sorted(result.spans, key=lambda s: s.start_us):  # every collective, one after the other
        page.keyboard.press("n")
        shown = {name: fact(page, name) for name in ("bytes", "launched", "starts", "arrives", "asked for", "exposed")}
        assert list(shown.values()) == [span.num_bytes, span.launch_us, span.start_us, span.end_us, span.wait_us, span.exposed_us]


def life_events(schedule: Schedule, name: str) -> list[tuple[float, str]]:
    """What happens to a parameter and when, read off the schedule and its simulation alone."""
    result, steps = simulate(schedule), schedule.program.steps
    buckets = {(s.kind, s.bucket): s for s in result.spans}
    found: list[tuple[float, str]] = []
    for t, step in enumerate(steps):
        if name in step.reads:
            found.append((result.steps[t].start_us, f"read by step {t} {step.name}"))
        if name in step.completes:
            found.append((result.steps[t].end_us, f"gradient complete after step {t} {step.name}"))
    for moment in result.moments:
        i = moment.instruction
        if i is None or name not in i.parameters:
            continue
        if i.kind == "release":
            found.append((moment.time_us, "released"))
        elif i.kind in ("all_gather", "reduce_scatter"):
            span, what = buckets[i.kind, i.bucket], "gather" if i.kind == "all_gather" else "reduce"
            found += [(span.launch_us, f"{what} {i.bucket} is launched"), (span.end_us, f"{what} {i.bucket} arrives")]
    return sorted(found)


def test_searching_finds_a_parameter_and_lists_its_life(open_page: Open) -> None:
    schedule = network()
    page = open_page(schedule)
    for name in ("layers.0.weight", "layers.3.bias", "layers.5.weight"):
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "search"
        page.keyboard.type(name.replace(".", " ").upper())
        assert name in page.inner_text("#results [aria-selected=true]")
        assert page.get_attribute("#search", "aria-activedescendant") == "hit-0"
        page.keyboard.press("Enter")
        assert page.is_hidden("#results")
        assert page.inner_text("#life h2 span:not(.tag)") == name
        read = "rows => rows.map(r => [r.children[1].textContent, r.children[2].value])"
        rows = page.eval_on_selector_all("#life .events button", read)
        shown = [(float(us), re.sub("^released, .*", "released", what)) for what, us in rows]
        assert shown == sorted(shown, key=lambda row: row[0]) and sorted(shown) == life_events(schedule, name)
        why = page.eval_on_selector_all("#life .why li", "rows => rows.map(r => r.textContent)")
        assert why == [line for life in tell(schedule).lives if life.parameter == name for line in life.why]
        assert name in page.inner_text("#spoken")
        start, end = view(page)  # all of it is in sight
        assert start <= shown[0][0] and shown[-1][0] <= end
    page.keyboard.press("n")
    assert page.locator("#life .events [aria-current=true]").count() >= 1
    page.fill("#search", "nothing is called that")
    assert "no parameter" in page.inner_text("#results")


def test_keys(open_page: Open) -> None:
    schedule = network()
    page, result = open_page(schedule), simulate(schedule)
    finish = result.finish_us
    assert view(page) == (0, finish)
    page.keyboard.press("+")
    start, end = view(page)
    assert end - start == pytest.approx(finish / 1.5, rel=1e-6)
    page.keyboard.press("ArrowRight")
    assert view(page)[0] == pytest.approx(start + 0.2 * (end - start), rel=1e-6, abs=1e-6 * finish)
    assert view(page)[1] - view(page)[0] == pytest.approx(end - start, rel=1e-6)
    page.keyboard.press("a")
    assert view(page)[0] == pytest.approx(start, rel=1e-6, abs=1e-6 * finish)
    page.keyboard.press("Home")
    assert view(page) == (0, finish)
    for _ in range(60):  # as far in as it goes; and then everything still works
        page.keyboard.press("w")
    assert 0 < view(page)[1] - view(page)[0] < finish / 1e5
    page.keyboard.press("0")

    stalls = [s for s in sorted(result.spans, key=lambda s: s.wait_us) if s.exposed_us > 0]
    assert stalls
    for span in stalls:
        page.keyboard.press("e")
        assert fact(page, "exposed") == span.exposed_us
        assert "Exposed" in page.inner_text("#spoken")
    page.keyboard.press("f")
    assert view(page)[0] <= stalls[-1].launch_us and stalls[-1].end_us <= view(page)[1]
    page.keyboard.press("Escape")
    assert page.locator("#selected").count() == 0 and page.locator("#overview").count() == 1

    assert page.inner_text("#unit") == "bytes"
    page.keyboard.press("m")
    assert page.inner_text("#unit") == "elements" and page.is_hidden("[data-kind=shards]")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1 and "next stall" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.keyboard.press("/")
    page.keyboard.type("weight")
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#search", "aria-activedescendant") == "hit-1"
    page.keyboard.press("Escape")
    assert page.is_hidden("#results") and page.input_value("#search") == ""


def test_everything_that_acts_has_a_name_and_can_be_reached(open_page: Open) -> None:
    page = open_page(network())
    nameless = "nodes => nodes.filter(n => !(n.textContent.trim() || n.getAttribute('aria-label'))).map(n => n.outerHTML)"
    page.keyboard.press("n")
    assert page.eval_on_selector_all("button", nameless) == []
    assert page.get_attribute("#chart", "tabindex") == "0" and page.get_attribute("#chart", "aria-label")
    assert page.get_attribute("html", "lang") == "en"
    assert page.locator("label[for=search]").count() == 1
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"search", "theme", "help", "to-peak", "to-stall", "unit", "in", "out", "whole", "chart"} <= reached


COLUMN = """([x, top, bottom]) => {
  const canvas = document.querySelector("#chart canvas"), ratio = canvas.width / canvas.clientWidth;
  const [left, from, height] = [x, top, bottom - top].map((length) => Math.round(length * ratio));
  const context = new OffscreenCanvas(1, height).getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, -left, -from);
  const { data } = context.getImageData(0, 0, 1, height), rows = [];
  for (let i = 0; i < data.length; i += 4) rows.push([data[i], data[i + 1], data[i + 2]]);
  return rows;
}"""
TOKEN = """(name) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  return found;
}"""
LEFT, RIGHT, TOP, BAND, BOTTOM = 92, 18, 8, 30, 66


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lanes_and_memory_are_drawn_to_scale(open_page: Open, scheme: str) -> None:
    """In the middle of every step and collective its lane has its colour; each kind of memory is as tall as it has bytes."""
    schedule = network()
    page, result = open_page(schedule, scheme=scheme), simulate(schedule)
    box = page.locator("#chart").bounding_box()
    width = box["width"] - LEFT - RIGHT
    kinds = ("parameters", "packing", "gradients", "activations", "shards")
    names = ("forward", "turn", "backward", "gather", "reduce", *kinds)
    colors = {tuple(page.evaluate(TOKEN, name)): name for name in reversed(names)}

    def x(us: float) -> float:
        return LEFT + us / result.finish_us * width

    def column(us: float, above: float, below: float) -> list[str | None]:
        return [colors.get(tuple(pixel)) for pixel in page.evaluate(COLUMN, [x(us), above, below])]

    def color(lane: int, us: float) -> str | None:
        return column(us, TOP + BAND * lane + 7, TOP + BAND * lane + 8)[0]

    wide = [t for t, step in enumerate(result.steps) if x(step.end_us) - x(step.start_us) > 6]
    assert len(wide) > 10
    for t in wide:
        assert color(1, (result.steps[t].start_us + result.steps[t].end_us) / 2) == schedule.program.steps[t].phase
    for span in result.spans:
        lane, name = (2, "gather") if span.kind == "all_gather" else (3, "reduce")
        assert color(lane, (span.start_us + span.end_us) / 2) == name

    top, bottom = TOP + BAND * 5 + 12, box["height"] - BOTTOM
    highest = 1.06 * max(result.peak.total, schedule.limits.memory_budget or 0)
    for t in wide[:: max(1, len(wide) // 8)]:
        middle = (result.steps[t].start_us + result.steps[t].end_us) / 2
        (held,) = (m for m in result.moments if m.instruction is None and m.point == t)
        counted = column(middle, top, bottom)
        for kind in kinds:
            tall = getattr(held, kind) / highest * (bottom - top)
            # gather and parameters may be one colour; the limit's line and the grid's take a pixel or two each
            assert abs(counted.count(kind) - tall) <= 6, (t, kind, counted.count(kind), tall)


def test_light_dark_and_the_toggle(open_page: Open) -> None:
    def brightness(page: Any) -> float:
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])) / 3

    light, dark = open_page(network()), open_page(network(), scheme="dark")
    assert brightness(light) > 200 > 60 > brightness(dark)
    place = [LEFT + 200, TOP + 15, TOP + 16]
    before = light.evaluate(COLUMN, place)
    light.keyboard.press("t")
    assert brightness(light) < 60
    light.wait_for_function(f"({COLUMN})({place}).join() !== '{','.join(map(str, before[0]))}'")
    light.keyboard.press("t")
    assert brightness(light) > 200
    dark.emulate_media(color_scheme="light")
    assert brightness(dark) > 200


def test_hostile_names_are_text(open_page: Open) -> None:
    schedule = hostile()
    page = open_page(schedule)
    assert page.title() == "zfx schedule"
    assert page.locator("img").count() == 0 and page.locator("script").count() == 3
    for name in HOSTILE:
        page.fill("#search", printable(name))
        options = page.eval_on_selector_all("#results [role=option] span:first-child", "nodes => nodes.map(n => n.textContent)")
        assert printable(name) in options
        page.keyboard.press("Enter")
        assert page.text_content("#life h2 span:not(.tag)") == printable(name)
        page.keyboard.press("n")
    box = page.locator("#chart").bounding_box()
    for lane in range(6):
        page.mouse.move(box["x"] + LEFT + 300, box["y"] + TOP + BAND * lane + 15)
    assert page.title() == "zfx schedule" and page.locator("img").count() == 0


def test_hovering_tells_bytes_time_and_reason(open_page: Open) -> None:
    schedule = network()
    page, story = open_page(schedule), tell(schedule)
    box = page.locator("#chart").bounding_box()
    width = box["width"] - LEFT - RIGHT

    def hover(us: float, y: float) -> None:
        page.mouse.move(box["x"] + LEFT + us / story.simulation.finish_us * width, box["y"] + y)

    collective = story.collectives[2]
    span = collective.span
    hover((span.start_us + span.end_us) / 2, TOP + BAND * 2 + 15)
    assert page.is_visible("#tip")
    assert numbers(page, "#tip") == [span.num_bytes, span.end_us - span.start_us, span.start_us, span.exposed_us]
    assert all(sentence in page.inner_text("#tip") for sentence in collective.why)
    page.mouse.down()
    page.mouse.up()
    assert fact(page, "launched") == span.launch_us
    step = 5
    times = story.simulation.steps[step]
    hover((times.start_us + times.end_us) / 2, TOP + BAND * 1 + 15)
    assert schedule.program.steps[step].name in page.inner_text("#tip")

    def total(moment: Moment) -> int:
        return moment.total

    hover((times.start_us + times.end_us) / 2, TOP + BAND * 5 + 200)
    (held,) = (m for m in story.simulation.moments if m.instruction is None and m.point == step)
    assert numbers(page, "#tip")[-1] == total(held)
    page.mouse.move(2, 2)
    assert page.is_hidden("#tip")


@pytest.mark.parametrize("size", [(1920, 1080), (1280, 720), (768, 1024), (390, 844)], ids=str)
def test_it_fits_the_window(open_page: Open, size: tuple[int, int]) -> None:
    page = open_page(network(), width=size[0], height=size[1])
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.fill("#search", "weight")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.locator("#chart canvas").bounding_box()["width"] >= min(size[0], 1000) * 0.9 - 350 * (size[0] > 1000)


def eighty_layers() -> Schedule:
    """As many steps and parameters as a model of 80 layers has: 10,081 and 720."""
    return keep_parameters(gather_on_demand(Schedule(chain(720, size=1_000_000, repeat=7), Limits(max_reuse_distance=0))))


def test_eighty_layers_in_a_few_megabytes_and_few_nodes(open_page: Open, tmp_path: Path) -> None:
    schedule = eighty_layers()
    assert len(schedule.program.steps) == 10_081
    page = open_page(schedule)
    assert next(tmp_path.glob("page*.html")).stat().st_size < 5_000_000
    shapes = "echarts.getInstanceByDom(document.getElementById('chart')).getZr().storage.getDisplayList(true).length"
    for keys in ("", "+++", "n", "0", "e", "f", "x"):
        for key in keys:
            page.keyboard.press(key)
        assert page.evaluate("document.querySelectorAll('*').length") < 600
        assert 20 < page.evaluate(shapes) < 6_000
    page.keyboard.press("/")
    page.keyboard.type("p")
    assert page.evaluate("document.querySelectorAll('*').length") < 900
    page.keyboard.type("360")
    page.keyboard.press("Enter")
    assert len(numbers(page, "#life .events")) == len(life_events(schedule, "p360")) > 14


@pytest.mark.slow
def test_a_parameter_that_is_read_everywhere_stays_a_short_list(open_page: Open) -> None:
    steps = tuple(Step(f"s{i}", "forward", reads=("w",), duration_us=1.0) for i in range(5_000))
    run = (Instruction("all_gather", 0, ("w",), 0), Instruction("wait", 0, ("w",), 0), Instruction("release", 5_000, ("w",)))
    schedule = Schedule(Program((Parameter("w", 4, 16),), steps), Limits(), (Bucket(0, "all_gather", ("w",)),), run)
    page = open_page(schedule)
    page.fill("#search", "w")
    page.keyboard.press("Enter")
    assert page.locator("#life .events button").count() < 100
    assert "5,003 events" in page.inner_text("#life")
    page.get_by_text("more", exact=False).last.click()
    assert 100 < page.locator("#life .events button").count() < 200


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(), (Step("f", "forward"),)], ids=["no step", "one step"])
def test_next_to_nothing(open_page: Open, steps: tuple[Step, ...]) -> None:
    page = open_page(Schedule(Program((), steps), Limits()))
    for key in "nex+-0mf?":
        page.keyboard.press(key)
