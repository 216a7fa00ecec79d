"""The executable paper: the figures of "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., SOSP 2023), each made again by a command.

    python -m minipaged paper list
    python -m minipaged paper run 12a

What runs is this repository's engine with its scheduler, block tables and allocators; the GPU is simulated. In ACM's
words the results are *replicated in simulation*, not reproduced.

    published.py          what the paper printed, as numbers        data/paper.json
    workloads.py          lengths of Fig. 11, Poisson arrivals
    calibration.py        what a step costs, from the paper's flat points and from measured kernels
    machines.py           the machines of Table 1
    orca.py orca_memory.py chunk.py buddy.py faster_transformer.py    the baselines, as policy and memory of the engine
    vllm.py               vLLM's scheduler of then, and prompts first
    divergence.py         which beams survive: as measured, and by a model
    serving.py            one workload, one system, one rate
    telling.py            Figs. 4 to 10: recorded runs, and pictures from their events
    figure.py figures/    what each figure runs, draws and compares
    running.py drawing.py commands.py
"""
