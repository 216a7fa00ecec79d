"""The demo: a live memory map of paging on a real model. `minipaged demo`, or `python -m minipaged.demo`.

scenes.py     what is shown: six scenes, one idea of the paper each, and one for the user's own prompts
stage.py      one loaded model, an engine for each run, requests that arrive step by step
state.py      queues, block tables and reference counts, folded from the engine's events alone; forwards and back
ticker.py     what just happened and why, one sentence an event
view.py       a state, drawn
player.py     a run, played at a pace that can be followed
terminal.py   the terminal it is played on
recording.py  what was drawn, as a moving SVG or an asciinema file
measures.py   paging against contiguous reservation, in bytes; what sharing and preemption did
report.py     all that as lines of text, or as JSON, where there is no terminal to draw on
show.py       puts them together: this is where the command line comes in
"""

from __future__ import annotations

from minipaged.demo.show import replay, run_demo

__all__ = ["replay", "run_demo"]
