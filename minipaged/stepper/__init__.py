"""Step through a run in a web page, which shows the engine's actions next to the lines of source that ran.

    with record("Two requests share a prompt") as run:
        engine = Engine(...)
        ...
    run                         # in a notebook: the stepper
    run.page()                  # a self-contained page

`recording.py` records an engine's events and the lines that run; `page.py` writes the page; `stepper.js` is the web
component that shows it; `storyteller.py` is a model without weights, for runs whose words do not matter. `edited.py`
runs code that a reader has changed in a page, where there is no NumPy; `reciter.py` is the model for that.

`watch_attention` shows the reference's attention instead: one query walks its block table (`attention.py`, shown by
`attention.js`).
"""

from minipaged.stepper.attention import Walk, watch_attention
from minipaged.stepper.page import page
from minipaged.stepper.reciter import Reciter
from minipaged.stepper.recording import Recording, record
from minipaged.stepper.storyteller import Storyteller

__all__ = ["Reciter", "Recording", "Storyteller", "Walk", "page", "record", "watch_attention"]
