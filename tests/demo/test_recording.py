"""Recordings show what was shown: an SVG that needs nothing from outside, and asciinema's format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.segment import Segment

from minipaged import InvalidRequest
from minipaged.demo import replay, run_demo
from minipaged.demo.player import Film, Player
from minipaged.demo.recording import COLUMN, ROW, SVG_SECONDS, Screencast
from minipaged.demo.view import Caption, Frame, StateView
from minipaged.replay.timeline import Timeline
from tests.demo.test_view import small_run
from tests.workloads import letters

SVG = "{http://www.w3.org/2000/svg}"


def recorded(path: Path, width: int = 90, height: int = 26) -> Screencast:
    recording = Screencast(path)
    player = Player(Film(width, height), StateView(letters), recording=recording)
    player.caption = Caption("a <small> run & more", "Watch it.")
    player.play(Timeline(small_run()), lambda: False)
    recording.save()
    return recording


def check_self_contained(svg: str) -> None:
    ElementTree.fromstring(svg)
    without_namespace = svg.replace('xmlns="http://www.w3.org/2000/svg"', "")
    for outside in ("http", "//", "url(", "@import", "href", "<script", "<image", "<foreignObject", "@font-face"):
        assert outside not in without_namespace, outside


def row_at(window: ElementTree.Element, keyframes: str, share: float) -> str:
    """The text that the strip of one row shows at a moment between 0 and 1."""
    moved = window.find(f"{SVG}g[@class='s']")
    place = 0
    if moved is not None:
        for percent, offset in re.findall(r"([\d.]+)%\{transform:translateY\((-?\d+)px\)\}", keyframes):
            if float(percent) / 100 <= share:
                place = -int(offset) // ROW
    line = ""
    for group in window.iter(f"{SVG}g"):
        if group.get("transform") == f"translate(0,{place * ROW + ROW // 2})":
            for text in group.iter(f"{SVG}text"):
                line = line.ljust(round(float(text.get("x", "0")) / COLUMN)) + (text.text or "")
    return line.rstrip()


def test_the_svg_shows_each_picture_at_its_time_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "run.svg")
    svg = (tmp_path / "run.svg").read_text(encoding="utf-8")
    check_self_contained(svg)
    assert len(svg) < 300_000
    root = ElementTree.fromstring(svg)
    duration = float(re.search(r"animation-duration:([\d.]+)s", svg)[1])  # type: ignore[index]
    windows = {int(w.get("y", "0")) // ROW: w for w in root.findall(f"{SVG}svg")}
    keyframes = {int(number): text for number, text in re.findall(r"@keyframes k(\d+)\{(.*?)\}</style>", svg)}
    start = recording.frames[0][0]
    ends = [at for at, _ in recording.frames[1:]] + [start + duration]
    compared = 0
    for (at, frame), end in zip(recording.frames, ends, strict=True):
        if end - at < SVG_SECONDS:
            continue  # left out
        share = ((at + end) / 2 - start) / duration
        shown = [row_at(windows[row], keyframes.get(row, ""), share) if row in windows else "" for row in range(26)]
        assert shown == [line.rstrip() for line in frame.text().split("\n")]
        compared += 1
    assert compared > 20


def first_picture(svg: str) -> list[str]:
    """The rows that it shows when it begins; under reduced motion it stays so."""
    root = ElementTree.fromstring(svg)
    keyframes = {int(number): text for number, text in re.findall(r"@keyframes k(\d+)\{(.*?)\}</style>", svg)}
    duration, first = (float(re.search(rf"animation-{of}:-?([\d.]+)s", svg)[1]) for of in ("duration", "delay"))  # type: ignore[index]
    windows = {int(w.get("y", "0")) // ROW: w for w in root.findall(f"{SVG}svg")}
    return [row_at(windows[row], keyframes.get(row, ""), first / duration) for row in sorted(windows)]


def num_held(rows: list[str]) -> int:
    """Of the blocks of the device."""
    (said,) = [found for row in rows if (found := re.search(r"device: .*?(\d+) held", row))]
    return int(said[1])


def test_the_svg_begins_with_a_picture_on_which_about_the_most_is_held(tmp_path: Path) -> None:
    recording = recorded(tmp_path / "run.svg")
    ends = [at for at, _ in recording.frames[1:]] + [float("inf")]
    stood = [frame for (at, frame), end in zip(recording.frames, ends, strict=True) if end - at >= SVG_SECONDS]
    most = max(num_held(frame.text().split("\n")) for frame in stood)
    first = first_picture((tmp_path / "run.svg").read_text(encoding="utf-8"))
    assert num_held(first) > 0.9 * most > 10  # of equal ones, it may be that with more of the host, or fuller blocks


def test_the_cast_draws_the_same_pictures(tmp_path: Path) -> None:
    pyte = pytest.importorskip("pyte")
    recording = recorded(tmp_path / "run.cast")
    header, *lines = (json.loads(line) for line in (tmp_path / "run.cast").read_text(encoding="utf-8").splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, 90, 26)
    screen = pyte.Screen(90, 26)
    stream = pyte.Stream(screen)
    times = [at for at, _, _ in lines]
    assert times == sorted(times)
    for (at, kind, data), (shown_at, frame) in zip(lines, recording.frames, strict=False):
        stream.feed(data)
        assert (kind, at) == ("o", round(shown_at, 3))
        assert [line.rstrip() for line in screen.display] == [line.rstrip() for line in frame.text().split("\n")]


def test_a_cast_leaves_nothing_of_a_larger_picture_behind(tmp_path: Path) -> None:
    pyte = pytest.importorskip("pyte")
    recording = Screencast(tmp_path / "run.cast")
    large, small = (Frame(8, [[Segment(text)]] * rows) for text, rows in (("before", 5), ("now", 2)))
    recording.add(0.0, large)
    recording.add(1.0, small)
    recording.save()
    screen = pyte.Screen(8, 5)
    for line in (tmp_path / "run.cast").read_text(encoding="utf-8").splitlines()[1:3]:
        pyte.Stream(screen).feed(json.loads(line)[2])
    assert [line.strip() for line in screen.display] == ["now", "now", "", "", ""]


@pytest.mark.parametrize("suffix", ["svg", "cast"])
def test_a_scene_can_be_recorded_without_a_terminal(
    tiny_model: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"demo.{suffix}"
    (outcome,) = run_demo(model=tiny_model, tier="reference", scene="parallel-sampling", record=path)
    text = path.read_text(encoding="utf-8")
    assert "Parallel sampling" in text
    assert "copied to block" in text
    assert "measured" in text
    assert outcome.findings[0] in " ".join(capsys.readouterr().out.split())
    if suffix == "svg":
        check_self_contained(text)


def test_a_replay_can_be_recorded(tmp_path: Path) -> None:
    events = tmp_path / "run.jsonl"
    events.write_text("".join(f"{event.to_json()}\n" for event in small_run()))
    replay(events, record=tmp_path / "run.svg")
    check_self_contained((tmp_path / "run.svg").read_text(encoding="utf-8"))


def test_a_recording_needs_a_name_that_says_its_format(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"must end in \.svg or \.cast"):
        Screencast(tmp_path / "run.gif")
    with pytest.raises(InvalidRequest, match="cannot write the recording"):
        Screencast(tmp_path / "nowhere" / "run.svg")


def test_the_picture_in_the_readme_needs_nothing_from_outside_and_begins_with_a_full_pool() -> None:
    svg = (Path(__file__).parents[2] / "docs/assets/demo.svg").read_text(encoding="utf-8")
    check_self_contained(svg)
    assert "21 held, 1 free" in "\n".join(first_picture(svg))
