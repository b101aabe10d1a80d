"""The visualiser: runs the real engine, of either tier, and shows every block, every step and every reason.

    presets.py   one small workload for each lesson
    form.py      what stands in the fields, and what is run
    scripted.py  a model without weights, on the real scheduler and cache manager
    runs.py      plays a workload and keeps its trace; a run as a file
    state.py     trace -> what the page draws, as pure functions; with timeline.py, facts.py, compare.py, sentences.py
    page.py      the page itself, in Gradio; stepping happens in the browser (assets/viewer)

It uses the front end's public classes and `contracts.trace`, as any other program could.
"""
