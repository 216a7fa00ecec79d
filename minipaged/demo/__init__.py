"""The demo: a live memory map of paging on a real model. `minipaged demo`, or `python -m minipaged.demo`.

scenes.py     what is shown: six scenes, one idea of the paper each, one of two ranks, one of two engines, and one for
              one's own prompts
stage.py      one loaded model, an engine for each run, requests that arrive step by step
ticker.py     a run in plain lines
view.py       a state, drawn
player.py     a run, played at a pace that can be followed
terminal.py   the terminal it is played on
recording.py  what was drawn, as a moving SVG or an asciinema file
measures.py   paging against contiguous reservation, in bytes; what sharing and preemption did
report.py     all that as lines of text, or as JSON, where there is no terminal to draw on
show.py       puts them together: this is where the command line comes in

What is drawn, and the sentences beside it, come from `minipaged.replay`, which knows nothing but the engine's events.
"""

from __future__ import annotations

from minipaged.demo.show import replay, run_demo

__all__ = ["replay", "run_demo"]
