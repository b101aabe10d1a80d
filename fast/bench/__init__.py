"""`twinfer bench`: what the engine costs, and what other engines cost beside it.

Everything here takes a tier through the same Protocol as the command line, so that one stopwatch measures both. It
stands in `fast` because three of the benchmarks cannot stand in the front end, which knows no tier and no torch:
`roofline` asks the machine with this tier's kernels, and `peers` runs other engines, most of which are torch programs.
Nothing of it is imported before `twinfer bench` is called, and the other benchmarks run without torch.
"""
