"""Kills at random moments: of trainings, resumed ones, sweeps, saves, and builds of the cache."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from minigen.text import corpus
from minigen.training.config import Config
from minigen.training.run import Run
from tests.conftest import TINY
from tests.faults.campaign import TRAIN, Campaign, Ended, Process, Reference

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TRAININGS, SAVES, BUILDS, SWEEPS = 120, 60, 60, 8
OPTIONS = {"documents": "line", "validation_fraction": 0.1, "vocab_size": 300}


def strike(campaign: Campaign, process: Process, seconds: float, number: int) -> Ended:
    """Send a signal at a random moment of so many seconds."""
    time.sleep(campaign.random.random() * seconds)
    if not process.has_ended():
        os.kill(process.pid, number)
        campaign.counts["kills"] += 1
    return process.wait()


def trainings(campaign: Campaign, reference: Reference) -> None:
    """Kill a training, and the resumed one again and again; the last resume ends the same."""
    for _ in range(TRAININGS):
        folder = campaign.fresh("train")
        for _ in range(campaign.random.randint(1, 3)):
            resumes = (folder / "config.toml").exists()
            command = ["train", "--resume"] if resumes else TRAIN
            number = campaign.random.choice(SIGNALS)
            promised = reference.promises(folder)
            process = Process([*command, "--out", str(folder)], campaign.fresh("said"))
            ended = strike(campaign, process, reference.seconds * 1.1, number)
            what = f"{folder.name}, {'resumed, ' * resumes}{signal.Signals(number).name}"
            campaign.expect_one_line(ended, what)
            expected = (0, 130, -number) if number != signal.SIGKILL else (0, -number)
            campaign.expect(ended.status in expected, f"{what}: status {ended.status}: {ended.err}")
            if ended.status == 130 and "saved" in ended.err:
                campaign.expect("to go on: minigen train" in ended.err, f"{what}: {ended.err}")
            kept = reference.promises(folder)
            campaign.expect(promised.items() <= kept.items(), f"{what}: a saved file was lost")
        reference.finish(folder, folder.name)
        shutil.rmtree(folder, ignore_errors=True)


def saves(campaign: Campaign) -> None:
    """Kill a process that saves all the time: the file is one of those that it saved, whole."""
    one, two = (Run(Config.load("fables", {**TINY, "run.seed": seed})) for seed in (1, 2))
    contents = []
    for run in (one, two):
        path = campaign.fresh("whole")
        run.save(path)
        contents.append(path.read_bytes())
    for _ in range(SAVES):
        folder = campaign.fresh("save")
        folder.mkdir()
        path = folder / "model.safetensors"
        one.save(path)

        def save_on(path: Path = path) -> int:
            while True:
                two.save(path)
                one.save(path)

        strike(campaign, Process(save_on, campaign.fresh("said")), 0.05, signal.SIGKILL)
        campaign.expect(path.read_bytes() in contents, f"{path}: neither the old nor the new file")
        one.save(path)
        left = [entry.name for entry in folder.iterdir()]
        campaign.expect(left == [path.name], f"{folder}: left behind: {left}")


def builds(campaign: Campaign) -> None:
    """Kill the building of the cache: the next one finds all of a file or none."""
    text = campaign.fresh("text")
    words = ["fox", "crow", "grapes", "sun", "river", "once", "again", "tall"]
    lines = (" ".join(campaign.random.choices(words, k=9)) for _ in range(6_000))
    text.write_text("\n".join(lines))
    start = time.monotonic()
    whole = _parts(corpus.load([text], **OPTIONS, cache=campaign.fresh("cache")))  # type: ignore[arg-type]
    seconds = time.monotonic() - start
    for _ in range(BUILDS):
        cache = campaign.fresh("cache")

        def build(cache: Path = cache) -> int:
            corpus.load([text], **OPTIONS, cache=cache)  # type: ignore[arg-type]
            return 0

        strike(campaign, Process(build, campaign.fresh("said")), seconds, signal.SIGKILL)
        parts = _parts(corpus.load([text], **OPTIONS, cache=cache))  # type: ignore[arg-type]
        campaign.expect(parts == whole, f"{cache}: other tokens")
        odd = [p.name for p in cache.iterdir() if p.suffix != ".tokens"]
        campaign.expect(not odd, f"{cache}: left behind: {odd}")
        shutil.rmtree(cache)


def _parts(text: corpus.Corpus) -> list[object]:
    parts = (text.training, text.validation)
    return [text.tokenizer.merges, *(part.array.tolist() for part in parts)]


def sweeps(campaign: Campaign, reference: Reference) -> None:
    """Kill a sweep: its helpers end with it, and resumed it comes to the same runs."""
    sweep = ["sweep", *TRAIN[1:], "--seeds", "0:2"]
    start = time.monotonic()
    whole = campaign.fresh("sweep")
    ended = campaign.run([*sweep, "--out", str(whole)])
    seconds = time.monotonic() - start
    campaign.expect(ended.status == 0, f"a sweep failed: {ended.err}")
    files = _files(whole)
    for _ in range(SWEEPS):
        folder = campaign.fresh("sweep")
        number = campaign.random.choice(SIGNALS)
        what = f"{folder.name}, {signal.Signals(number).name}"
        process = Process([*sweep, "--out", str(folder)], campaign.fresh("said"))
        ended = strike(campaign, process, seconds * 1.1, number)
        campaign.expect_one_line(ended, what)
        deadline = time.monotonic() + 15
        while (left := _of_session(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not campaign.expect(not left, f"{what}: helpers live on: {left}"):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        if not folder.exists():  # before it had begun
            continue
        ended = campaign.run(["sweep", "--resume", "--out", str(folder)])
        campaign.expect(ended.status == 0, f"{what}: it does not go on: {ended.err}")
        found = _files(folder)
        for name, data in files.items():
            campaign.expect(found.get(name) == data, f"{what}: {name} is not what it was to be")
        odd = [n for n in found.keys() - files.keys() if ".safetensors" not in n]
        campaign.expect(not odd, f"{what}: left behind: {odd}")


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "timing.jsonl" and not path.name.endswith(".lock")
    }


def _of_session(session: int) -> list[int]:
    """Return the processes of a session that are alive; where /proc is missing, none."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


def kills(campaign: Campaign, reference: Reference) -> None:
    """All of them."""
    trainings(campaign, reference)
    saves(campaign)
    builds(campaign)
    sweeps(campaign, reference)
