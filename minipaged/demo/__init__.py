"""The demo: a live memory map of paging on a real model. `minipaged demo`, or `python -m minipaged.demo`.

scenes.py       the scenes: six with one idea of the paper each, one with several ranks, one with two engines, and one
                for the user's own prompts
trace_scene.py  one more scene: thousands of requests on a simulated machine
stage.py        one loaded model, an engine for each run, requests that arrive step by step
ticker.py       a run in plain lines
view.py         draws a state
player.py       plays a run at a pace that the user can follow
terminal.py     the terminal that is drawn on
recording.py    writes a recording of the pictures: an animated SVG or an asciinema file
measures.py     paging compared with contiguous reservation, in bytes; the effects of sharing and preemption
report.py       the results as lines of text or as JSON, for outputs that cannot be drawn on
show.py         puts them together, for the command line

The states and the sentences come from `minipaged.replay`, which reads only the engine's events.
"""

from __future__ import annotations

from minipaged.demo.show import replay, run_demo

__all__ = ["replay", "run_demo"]
