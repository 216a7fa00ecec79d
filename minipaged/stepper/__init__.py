"""Runs, step by step, in a web page: what the engine did, beside the lines of its source that did it.

    with record("Two requests share a prompt") as run:
        engine = Engine(...)
        ...
    run                         # in a notebook: the stepper
    run.page()                  # a page of its own, that needs nothing else

`recording.py` listens to an engine and watches which lines run; `page.py` writes the page; `stepper.js` is the web
component that shows it; `storyteller.py` is a model without weights, for runs whose words do not matter. `edited.py`
runs what a reader has changed in a page, where there is no NumPy; `reciter.py` is the model for that.

`watch_attention` looks into the reference's attention instead: one query walks its block table (`attention.py`, shown
by `attention.js`).
"""

from minipaged.stepper.attention import Walk, watch_attention
from minipaged.stepper.page import page
from minipaged.stepper.reciter import Reciter
from minipaged.stepper.recording import Recording, record
from minipaged.stepper.storyteller import Storyteller

__all__ = ["Reciter", "Recording", "Storyteller", "Walk", "page", "record", "watch_attention"]
