"""The vocabulary shared by both tiers: what they may exchange, and the rules that are written once.

Nothing in here imports NumPy except `noise` and `logits`, so that the scheduler and the cache manager can be read, run
and tested without it.
"""
