"""A fleet without GPUs.

``cache`` and ``worker`` model one vLLM worker, with time as an argument and no I/O; ``profiles`` says how fast it is.
``server`` runs that model against the clock as a real HTTP and ZMQ server (``kvway worker``).
"""
