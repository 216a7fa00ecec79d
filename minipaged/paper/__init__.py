"""The executable paper: a command reproduces each figure of "Efficient Memory Management for Large Language Model
Serving with PagedAttention" (Kwon et al., SOSP 2023) in simulation.

    python -m minipaged paper list
    python -m minipaged paper run 12a

The engine is this repository's own, with its scheduler, block tables and allocators. The GPU is simulated. ACM calls
such results *replicated in simulation*, not reproduced.

    published.py          the paper's printed numbers               data/paper.json
    workloads.py          request lengths from Fig. 11, Poisson arrivals
    calibration.py        the cost of a step, fitted to the paper's flat points and to measured kernels
    machines.py           the machines of Table 1
    orca.py orca_memory.py chunk.py buddy.py faster_transformer.py    the baselines, as policy and memory of the engine
    vllm.py               vLLM's scheduler at the time of the paper, and its later prefill-first scheduler
    divergence.py         which beams survive: measured runs, and a model of them
    serving.py            serves one workload on one system at one rate
    telling.py            Figs. 4 to 10: recorded runs, and pictures drawn from their events
    figure.py figures/    the jobs, plots and checks of each figure
    running.py            runs the jobs and stores the results
    drawing.py            draws the plots
    commands.py           the commands of `minipaged paper`
"""
