"""The questions of the tutorials: a reader predicts, and then sees. As they are written, checked, and shown on a page.

In a tutorial:

    # **Predict.** 6 of the 16 slots are free. Will a request for 5 get its memory?
    #
    # - yes, 6 are enough
    # - no
    #
    # <details><summary>See</summary>
    #
    # **no** (`"D" not in cache.pieces`). The free slots lie in two pieces.
    #
    # </details>

The answer is what is bold: one of the choices in the list above it, or words around numbers, such as `**6 passes, 12
slots**`. In parentheses stands what the run has to say to that, once the cells up to the next text have run: something
true, or the numbers in their order (a share, where the answer says %), which are the run's up to what was rounded away.
A reader is near enough within `, give or take 10` (units of the number) or `, give or take 20 %` (of it).

In a notebook this is what it is here. On a page what stands in those parentheses is left out. The code up to the next
text goes into the fold, too, unless it makes a recording, and so does the first paragraph of that text, unless it ends
in a colon; and `assets/predict.js` makes a question of it; without JavaScript there are the choices and the fold.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass

MARK = "**Predict.**"
QUESTION = re.compile(
    r"^\*\*Predict\.\*\* (?P<asked>.*?)\n\n<details><summary>See</summary>\n\n"
    r"\*\*(?P<answer>.+?)\*\*(?:\s\(`(?P<run>[^`]+)`(?:,\sgive\sor\stake\s(?P<within>[\d.]+)(?P<relative>\s%)?)?\))?"
    r"(?P<seen>.*?)\n\n</details>",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")


@dataclass(frozen=True)
class Question:
    """What is asked, and what is right."""

    answer: str
    choices: list[str]
    """None of them: the answer has numbers."""
    run: str | None
    """An expression in the names of the tutorial."""
    within: list[float]
    """For each number, by how much a reader may miss it, in its own unit."""

    @property
    def numbers(self) -> list[float]:
        return [] if self.choices else [float(number[0].replace(",", "")) for number in NUMBER.finditer(self.answer)]

    def check(self) -> str:
        """Code that fails in a tutorial whose run says something else; of a choice that stands by itself, none."""
        told = f"the answer to be predicted is {self.answer!r}, and the run says {{_told}}"
        if self.run is None:
            return ""
        if self.choices:
            lines = [f"_told = bool({self.run})", f"assert _told, f{told!r}"]
        else:
            scales = [100 if percent else 1 for percent in self._between_numbers("%")]
            lines = [
                f"_told = [{self.run}]",
                "_told = [*_told[0]] if len(_told) == 1 and hasattr(_told[0], '__iter__') else _told",
                f"_told = [scale * float(now) for scale, now in zip({scales}, _told, strict=True)]",
                f"_off = [abs(now - said) for now, said in zip(_told, {self.numbers})]",
                f"assert all(by <= most for by, most in zip(_off, {self._rounded_away()})), f{told!r}",
            ]
        return "\n    ".join(["def _check():", *lines]) + "\n_check()"  # its names are not the tutorial's

    def data(self) -> str:
        """As JSON, for the page."""
        if self.choices:
            return json.dumps({"choice": self.choices.index(self.answer)})
        return json.dumps({"between": NUMBER.split(self.answer), "numbers": self.numbers, "within": self.within})

    def _rounded_away(self) -> list[float]:
        """Of each number, at most."""
        return [0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9 for number in NUMBER.findall(self.answer)]

    def _between_numbers(self, sign: str) -> list[bool]:
        """For each number, whether the sign comes right after it."""
        return [after.lstrip().startswith(sign) for after in NUMBER.split(self.answer)[1:]]


def question(found: re.Match[str]) -> Question:
    """Raises ValueError where the answer is none of the choices, or has no number that the run says."""
    choices = [line[2:] for line in found["asked"].split("\n\n")[-1].splitlines() if line.startswith("- ")]
    answer, numbers = " ".join(found["answer"].split()), NUMBER.findall(found["answer"])
    if choices and answer not in choices:
        raise ValueError(f"the answer {answer!r} is none of the choices: {choices}")
    if not choices and not (numbers and found["run"]):
        raise ValueError(f"the answer {answer!r} is no choice: it needs a number, and what the run has to say to it")
    within = float(found["within"] or 0)
    each = [within / 100 * float(n.replace(",", "")) if found["relative"] else within for n in numbers]
    run = " ".join(found["run"].split()) if found["run"] else None
    return Question(answer, choices, run, [] if choices else each)


def questions(text: str) -> list[Question]:
    """Those of a text. Raises ValueError for one without an answer."""
    found = [question(match) for match in QUESTION.finditer(text)]
    if len(found) != text.count(MARK):
        raise ValueError(f"a question has no answer to be seen: {text[text.index(MARK) :][:80]!r}")
    return found


def on_the_page(text: str) -> tuple[str, str]:
    """The text with its questions as a page has them, and what ends the last one, if code may still come into it."""
    shown = QUESTION.sub(_as_html, text)
    ends = "\n\n</details>\n\n</div>"
    return (shown.removesuffix(ends), ends) if shown.endswith(ends) else (shown, "")


def _as_html(found: re.Match[str]) -> str:
    asked, _ = found[0].split("<details><summary>See</summary>")
    data = html.escape(question(found).data())
    opening = f'<details class="see" markdown="1" data-answer="{data}"><summary>See</summary>'
    parts = [f"{asked}{opening}", f"**{found['answer']}**{found['seen']}", "</details>", "</div>"]
    return '<div class="predict" markdown="1">\n\n' + "\n\n".join(parts)
