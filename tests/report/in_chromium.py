"""The report in a real browser: `make test-browser` (Debian's chromium, driven by Playwright)."""

import json
import random
import shutil
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from minigen import cli, load
from minigen.decoding.generation import Task, complete, generate
from minigen.decoding.policy import Policy
from minigen.exact.streams import Stream
from minigen.report import page, trainable
from minigen.report.facts import gather
from minigen.report.page import write_report
from minigen.training import checkpoint
from minigen.training.checkpoint import locate
from minigen.training.config import Config
from minigen.training.folder import RunFolder
from minigen.training.logs import read_lines
from minigen.training.run import Run

CHROMIUM = shutil.which("chromium")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><b>&lt;"
OPTIONS = ("temperature", "top_k", "top_p", "min_p")
SETTINGS = {
    "training.steps": 120,
    "evaluation.every": 40,
    "sampling.every": 40,
    "sampling.prompt": "Once",
    "checkpoint.every": 0,
}
TALKATIVE = {  # writes texts that are long enough to be looked at
    "tokenizer.vocab_size": 1024,
    "model.embedding_dim": 40,
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.5,
    "training.batch_size": 512,
}


def train(path, name="fables", **settings):
    config = Config.load(name, {**SETTINGS, **settings})
    for _ in RunFolder.create(path, Run(config)).steps():
        pass
    return path


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        # No sandbox, so that root can run it, and no requests of the browser's own.
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("browser") / "run", **TALKATIVE)


class Tab:
    """An opened report; what the browser complained about and asked for."""

    def __init__(self, browser, file, width=1280, **options):
        self.page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = Path(file).resolve().as_uri()
        self.page.goto(self.url)
        self.page.wait_for_function("document.querySelectorAll('#embedding-chart svg').length")
        self.written()

    def bars(self):
        """Map the ids of the listed tokens to their probabilities."""
        cells = "Array.from(document.querySelectorAll('#bars td[data-p]'), (cell) => cell.dataset)"
        return {int(cell["id"]): float(cell["p"]) for cell in self.page.evaluate(cells)}

    def fill(self, **fields):
        for name, value in fields.items():
            self.page.fill(f"#{name}", str(value))
        self.written()

    def written(self):
        """Wait until the text has been written to its end."""
        self.page.wait_for_function("document.getElementById('text').ariaBusy !== 'true'")


@pytest.fixture
def open_tab(browser):
    tabs = []

    def open_report(file, **options):
        tabs.append(Tab(browser, file, **options))
        return tabs[-1]

    yield open_report
    for tab in tabs:
        tab.page.close()


@pytest.fixture
def tab(open_tab, run):
    return open_tab(write_report(run))


def test_it_opens_without_a_complaint_and_asks_for_nothing(tab):
    tab.page.wait_for_timeout(500)
    assert tab.complaints == []
    assert tab.requests == [tab.url]
    assert tab.page.locator(".chart svg").count() == 4


def test_all_that_it_checks_is_right(tab):
    assert tab.page.locator("#checks li").count() == 3
    assert tab.page.locator("#checks li.right").count() == 3


def test_weights_that_are_not_the_runs_are_found_out(open_tab, run, tmp_path):
    text = write_report(run).read_text()
    start = text.index('"weights":"') + len('"weights":"')
    other = "A" if text[start + 1000] != "A" else "B"
    damaged = tmp_path / "damaged.html"
    damaged.write_text(text[: start + 1000] + other + text[start + 1001 :])
    tab = open_tab(damaged)
    assert "The weights in this page have fingerprint" in tab.page.inner_text(
        "#checks li.wrong >> nth=0"
    )


def test_typing_a_context_changes_the_bars_and_the_text(tab):
    bars, text = tab.bars(), tab.page.inner_text("#text")
    tab.page.focus("#prompt")
    tab.page.keyboard.press("Control+End")
    tab.page.keyboard.type(" a fo")
    tab.written()
    assert tab.bars() != bars
    assert tab.page.inner_text("#text").startswith("Once a fo")
    assert tab.page.inner_text("#text") != text


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("prompt", ["", "Once", "The fox said to the"])
def test_probabilities_are_those_of_minigen_next(tab, run, capsys, prompt, policy):
    neutral = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    tab.fill(prompt=prompt, **neutral, **{})
    tab.fill(**policy)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in policy.items()]
    assert cli.run(["next", str(run), prompt, "--top=1000", "--json", *options]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    expected = {candidate["token_id"]: candidate["probability"] for candidate in candidates}
    bars = tab.bars()
    assert len(bars) >= 12
    assert bars == {token: expected.get(token, 0.0) for token in bars}


def random_case(dice):
    alphabet = dice.choice(["abc ", "Once upon a time.\n", "äß€😀 “x”"])
    policy = {
        "temperature": dice.choice([1, 0.8, 0.3, 1.7, 0]),
        "top_k": dice.choice([0, 0, 1, 3, 40]),
        "top_p": dice.choice([1, 1, 0.95, 0.8, 0, round(dice.random(), 3)]),
        "min_p": dice.choice([0, 0, 0.1, round(dice.random(), 3)]),
    }
    return {
        "prompt": "".join(dice.choices(alphabet, k=dice.randrange(30))),
        **policy,
        "seed": dice.choice([0, 1, dice.randrange(10**12), 10**30]),
        "length": dice.randrange(1, 40),
    }


def test_200_random_cases_give_the_token_ids_of_python(tab, run):
    dice = random.Random(6)
    cases = [random_case(dice) for _ in range(200)]
    script = """async (cases) => {
        const text = document.getElementById("text");
        const answers = [];
        for (const fields of cases) {
            for (const id in fields) document.getElementById(id).value = fields[id];
            document.getElementById("prompt").dispatchEvent(new Event("input", { bubbles: true }));
            while (text.ariaBusy === "true") await new Promise((resolve) => setTimeout(resolve));
            const tokens = text.querySelectorAll("b");
            answers.push(Array.from(tokens, (token) => Number(token.dataset.id)));
        }
        return answers;
    }"""
    answers = tab.page.evaluate(script, [{k: str(v) for k, v in case.items()} for case in cases])
    loaded = load(run)
    model, tokenizer = loaded.model, loaded.tokenizer
    for case, answer in zip(cases, answers, strict=True):
        policy = Policy(**{name: case[name] for name in OPTIONS})
        task = Task(model, tokenizer, policy, max_new_tokens=case["length"])
        own = Stream(case["seed"], "inference")
        pieces = generate(task, [case["prompt"]], lambda _, own=own: own)
        assert answer == complete(pieces)[0].token_ids, case


def test_each_token_of_the_text_can_be_looked_at(tab):
    tab.page.focus("#place")
    seen = set()
    for number in range(1, 6):
        assert tab.page.inner_text("#place-value") == f"{number} of 60"
        assert tab.page.locator("#text b.chosen").count() == 1
        assert tab.page.locator("#bars tr.drawn").count() == 1
        assert tab.page.locator("#cumulative .drawn").count() == 1
        seen.add(tab.page.inner_text("#draw-words"))
        tab.page.keyboard.press("ArrowRight")
    assert len(seen) == 5
    tab.page.locator("#text b").nth(30).click()
    assert tab.page.inner_text("#place-value") == "31 of 60"


def test_the_needle_stands_on_the_drawn_token(tab):
    box = "(item) => [item.getBoundingClientRect().left, item.getBoundingClientRect().right]"
    for number in range(1, 20):
        tab.page.fill("#place", str(number))
        needle = sum(tab.page.locator("#cumulative .needle").evaluate(box)) / 2
        left, right = tab.page.locator("#cumulative i.drawn").evaluate(box)
        assert left - 0.1 <= needle <= right + 0.1


def test_marks_say_what_each_filter_did(tab):
    tab.fill(temperature=0.8, top_k=8, top_p=0.7, min_p=0.2)
    outcomes = tab.page.inner_text("#bars")
    for mark in ("kept", "greedy", "drawn", "crosses top-p", "dropped by top-k"):
        assert mark in outcomes
    tab.fill(temperature=0)
    assert "no random word is drawn" in tab.page.inner_text("#draw-words")
    assert tab.page.locator("#cumulative .needle").count() == 0


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("temperature", "-1", "Temperature must be a number of at least 0."),
        ("top_k", "1.5", "Top-k must be a whole number of at least 0."),
        ("top_p", "1.01", "Top-p must be a number from 0 to 1."),
        ("min_p", "", "Min-p must be a number from 0 to 1."),
        ("seed", "x", "Seed must be a whole number of at least 0."),
        ("length", "401", "Tokens must be a whole number from 1 to 400."),
    ],
)
def test_a_field_out_of_range_says_its_rule_and_recovers(tab, field, value, sentence):
    before = tab.page.input_value(f"#{field}")
    tab.page.fill(f"#{field}", value)
    assert tab.page.inner_text(f"#{field}-error") == sentence
    assert f"{field}-error" in tab.page.get_attribute(f"#{field}", "aria-describedby")
    assert tab.page.get_attribute(f"#{field}", "aria-invalid") == "true"
    # Of one moment: the text above may still be growing.
    distance = """(field) => document.querySelector(`#${field}-error`).getBoundingClientRect().y
        - document.querySelector(`#${field}`).getBoundingClientRect().y"""
    assert 0 < tab.page.evaluate(distance, field) < 120  # beside its field
    assert tab.page.locator(".error:visible").count() == 1
    tab.page.fill(f"#{field}", before)
    assert tab.page.locator(".error:visible").count() == 0
    assert tab.complaints == []


def test_typing_stays_smooth_at_400_tokens(tab):
    """No piece of work that a key must wait for is a whole text long."""
    tab.fill(length=400)
    script = """async () => {
        const before = new Set(document.querySelectorAll("#text b"));
        const prompt = document.getElementById("prompt");
        prompt.value += " x";
        prompt.dispatchEvent(new Event("input", { bubbles: true }));
        const written = document.querySelectorAll("#text b").length;
        prompt.value += "y"; // the next key comes before the text is done
        prompt.dispatchEvent(new Event("input", { bubbles: true }));
        return written;
    }"""
    assert tab.page.evaluate(script) < 400
    tab.written()
    assert tab.page.inner_text("#text").startswith("Once xy")
    assert tab.page.inner_text("#text .prompt") == "Once xy"
    last = tab.page.locator("#text b").last.get_attribute("data-id")
    assert tab.page.locator("#text b").count() == 400 or last == "256"


def numbers_are_whole(tab):
    """Whether each word of each chart lies inside its picture."""
    script = """Array.from(document.querySelectorAll(".chart svg text"), (word) => {
        const [inner, outer] = [word, word.closest("svg")].map((x) => x.getBoundingClientRect());
        return !word.textContent.trim() ||
            (inner.left >= outer.left - 0.5 && inner.right <= outer.right + 0.5 &&
             inner.top >= outer.top - 0.5 && inner.bottom <= outer.bottom + 0.5)
            ? "" : word.textContent;
    }).filter((word) => word)"""
    return tab.page.evaluate(script)


@pytest.mark.parametrize("width", [1280, 360])
def test_numbers_of_charts_are_whole_in_both_units(open_tab, run, width):
    tab = open_tab(write_report(run), width=width)
    for unit in ("nats", "bits", "nats"):
        tab.page.check(f'input[value="{unit}"]')
        tab.page.wait_for_timeout(300)
        assert numbers_are_whole(tab) == []


def test_the_runs_name_stands_in_title_and_headline(open_tab, run, tmp_path):
    turned = shutil.copytree(run, tmp_path / "night\u202e run")
    tab = open_tab(write_report(turned))
    assert tab.page.title().startswith("night\ufffd run: minigen run report, step 120, ")
    assert tab.page.inner_text("h1") == "night\ufffd run: one config, one fingerprint."


def test_a_prompt_that_turns_the_text_round_turns_nothing_else(open_tab, tmp_path):
    prompt = "abc\u202edef"
    run = train(tmp_path / "run", **{"sampling.prompt": prompt, "training.steps": 40})
    tab = open_tab(write_report(run))
    assert "\\u202e" in tab.page.text_content("#config")
    for place in ("#command", "#config", "#reproduce"):
        assert "\u202e" not in tab.page.text_content(place)
    isolated = "(part) => getComputedStyle(part).unicodeBidi"
    for place in ("#text .prompt", "#sample-text .prompt"):
        assert tab.page.text_content(place) == prompt
        assert tab.page.locator(place).evaluate(isolated) == "isolate"


def test_bars_are_printed(tab):
    tab.page.emulate_media(media="print")
    for part in ("#bars .policy", "#cumulative .track i", "#bars .model"):
        adjust = "(part) => getComputedStyle(part).printColorAdjust"
        assert tab.page.locator(part).first.evaluate(adjust) == "exact"
    assert tab.page.is_hidden("nav")
    assert tab.page.is_hidden("#train-form")
    assert tab.page.is_visible("#bars")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(open_tab, run, scheme):
    """Contrast among others, of the page with an error shown and a run trained."""
    tab = open_tab(write_report(run), color_scheme=scheme, bypass_csp=True)
    assert trained(tab)[0] == "right"
    tab.page.fill("#top_p", "2")
    faults = Axe().run(tab.page).response["violations"]
    assert [(fault["id"], [node["html"] for node in fault["nodes"]]) for fault in faults] == []


def test_everything_has_a_label_and_can_be_reached_by_keyboard(tab):
    unlabelled = tab.page.evaluate("""Array.from(document.querySelectorAll("input, textarea"))
        .filter((field) => !field.getAttribute("aria-label") && !(field.labels || []).length)
        .map((field) => field.id)""")
    assert unlabelled == []
    pictures = tab.page.locator('[role="img"]')
    assert pictures.count() == 5
    assert all(picture.get_attribute("aria-label") for picture in pictures.all())
    reached = []
    for _ in range(40):
        tab.page.keyboard.press("Tab")
        reached.append(
            tab.page.evaluate("document.activeElement.id || document.activeElement.name")
        )
    controls = [*OPTIONS, *(f"{option}-range" for option in OPTIONS), "prompt", "seed", "length"]
    assert {*controls, "place", "unit", "sample"} <= set(reached)


def test_sliders_and_units_work_by_keyboard(tab):
    tab.page.focus("#temperature-range")
    bars = tab.bars()
    tab.page.keyboard.press("ArrowRight")
    assert tab.bars() != bars
    assert tab.page.input_value("#temperature") == tab.page.input_value("#temperature-range")
    tab.page.focus("#sample")
    assert tab.page.inner_text("#sample-step") == "120"
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.inner_text("#sample-step") == "80"
    axis = tab.page.inner_text("#loss-chart")
    tab.page.focus('input[value="nats"]')
    tab.page.keyboard.press("ArrowRight")
    tab.page.wait_for_function(
        "(axis) => document.getElementById('loss-chart').innerText !== axis", arg=axis
    )
    assert tab.complaints == []


def test_samples_are_those_of_the_run(tab, run):
    for number, sample in enumerate(read_lines(run / "samples.jsonl")):
        tab.page.fill("#sample", str(number))
        assert tab.page.text_content("#sample-text") == sample["prompt"] + sample["text"]


def test_hostile_text_is_shown_as_text(open_tab, tmp_path):
    run = train(tmp_path / "run", **{"sampling.prompt": HOSTILE, "training.steps": 40})
    lines = read_lines(run / "samples.jsonl")
    for line in lines:
        line["text"] = HOSTILE
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tab = open_tab(write_report(run))
    tab.page.wait_for_timeout(300)
    assert tab.complaints == []
    assert tab.page.text_content("#sample-text") == HOSTILE * 2
    assert tab.page.input_value("#prompt") == HOSTILE
    assert tab.page.text_content("#text").startswith(HOSTILE)
    assert tab.page.locator("script").count() == 4
    assert tab.page.locator("img, #sample-text b").count() == 0


def test_a_checkpoint_alone_says_what_it_does_not_know(open_tab, run, tmp_path):
    alone = shutil.copy(locate(run), tmp_path / "model.safetensors")
    tab = open_tab(write_report(alone))
    assert tab.complaints == []
    for section in ("loss", "samples", "streams"):
        assert "A checkpoint alone" in tab.page.inner_text(f"#{section}")
    assert len(tab.bars()) >= 12


def test_a_page_without_weights_says_so(open_tab, run, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_WEIGHT_BYTES", 1000)
    tab = open_tab(write_report(run, tmp_path / "large.html"))
    assert tab.complaints == []
    assert "not in this page" in tab.page.inner_text("#next-missing")
    assert tab.page.is_hidden("#next-form")


# Training


@pytest.fixture(scope="session")
def names(tmp_path_factory):
    path = tmp_path_factory.mktemp("browser") / "names"
    return train(
        path, "names", **{"training.steps": 60, "sampling.every": 20, "checkpoint.every": 30}
    )


def trained(tab):
    """Let the page train to the end; return its verdict: (right or wrong, sentence)."""
    tab.page.click("#train-go")
    done = "document.getElementById('train-go').textContent === 'Done'"
    tab.page.wait_for_function(done, timeout=300_000)
    return (
        tab.page.get_attribute("#train-verdict", "class").removeprefix("verdict "),
        tab.page.inner_text("#train-verdict"),
    )


def test_the_page_trains_its_run_to_its_fingerprint(open_tab, names):
    tab = open_tab(write_report(names))
    state, sentence = trained(tab)
    assert state == "right"
    assert "All 60 losses and learning rates" in sentence
    assert gather(names).fingerprint in sentence
    assert tab.page.inner_text("#checks li.right >> nth=-1").endswith(sentence)
    assert tab.complaints == []


@pytest.mark.slow
def test_the_page_trains_all_of_names(open_tab, tmp_path):
    run = train(tmp_path / "names", "names", **{"training.steps": 1500, "sampling.every": 250})
    state, sentence = trained(open_tab(write_report(run)))
    assert state == "right"
    assert gather(run).fingerprint in sentence


def test_training_stops_goes_on_and_starts_over(open_tab, names):
    tab = open_tab(write_report(names))
    tab.page.click("#train-go")
    tab.page.wait_for_function("Number(document.getElementById('train-bar').value) > 0")
    tab.page.click("#train-go")
    tab.page.wait_for_function("document.getElementById('train-go').textContent === 'Go on'")
    stopped = tab.page.inner_text("#train-state")
    assert "Stopped." in stopped
    tab.page.wait_for_timeout(400)
    assert tab.page.inner_text("#train-state") == stopped
    assert trained(tab)[0] == "right"
    tab.page.click("#train-again")
    assert tab.page.is_hidden("#train-verdict")
    tab.page.select_option("#train-from", "30")
    state, sentence = trained(tab)
    assert state == "right"
    assert "All 30 losses" in sentence


def test_the_classic_mistake_parts_after_the_first_sample(open_tab, names):
    tab = open_tab(write_report(names))
    tab.page.check("#train-mistake")
    state, sentence = trained(tab)
    assert state == "wrong"
    assert sentence.startswith("The losses part at step 21: ")
    assert "Up to step 20 every bit was the same." in sentence


def test_a_run_forged_in_one_weight_is_found_out(open_tab, names, tmp_path):
    """The forger sealed the checkpoint again, so that its own checksums are right."""
    run = shutil.copytree(names, tmp_path / "run")
    saved = checkpoint.load(locate(run))
    saved.tensors["W"][3, 2, 101] += 2.0**-40
    checkpoint.save(locate(run), saved)
    forged = write_report(run)
    tab = open_tab(forged)
    assert "The run’s log says that step 60 had fingerprint" in tab.page.inner_text("#checks")
    state, sentence = trained(tab)
    assert state == "wrong"
    assert sentence.startswith("The fingerprints part at step 60: ")
    assert "The weights of this run are not those that its config and text give." in sentence


def test_a_page_without_its_text_says_that_it_cannot_train(open_tab, run, tmp_path, monkeypatch):
    monkeypatch.setattr(trainable, "MOST_TOKEN_BYTES", 1000)
    tab = open_tab(write_report(run, tmp_path / "long.html"))
    assert "Above 500 of them it does not travel in the page" in tab.page.inner_text(
        "#train-missing"
    )
    assert tab.page.is_hidden("#train-form")
    assert tab.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400, 360])
def test_nothing_is_wider_than_the_window(open_tab, tmp_path, width, scheme):
    text = tmp_path / "text.txt"
    text.write_text("One day a crow, and then a fox. " * 300)
    settings = {"corpus.text": [str(text)], "sampling.prompt": "x" * 90, "training.steps": 20}
    run = train(tmp_path / ("long-name-" * 9), **settings)
    tab = open_tab(write_report(run), width=width, color_scheme=scheme)
    tab.page.wait_for_timeout(300)
    assert tab.page.evaluate("document.documentElement.scrollWidth") == width
    tab.page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
