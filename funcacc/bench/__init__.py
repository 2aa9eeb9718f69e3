"""Comparing training steps: the same work, by funcacc and by its peers, in paired runs.

work.py      models, data and losses
peers.py     how each library takes the step, in PyTorch
plain_jax.py the same step written by hand in JAX; runs without PyTorch
worker.py    one peer in a process of its own, told what to do line by line
compare.py   alternating runs, medians, tables
"""
