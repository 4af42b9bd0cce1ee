"""A fleet without GPUs.

``cache`` and ``worker`` model one vLLM worker, with time as an argument and no I/O; ``profiles`` says how fast it is.
``server`` runs that model against the clock as a real HTTP and ZMQ server (``kvway worker``).

``engine`` simulates whole fleets on traces, under the policies of the gateway (``kvway sim``): ``fleet`` says what
they consist of, ``batch`` is their worker, from batch change to batch change, with ``tiers`` and ``eviction``, and
``router`` the gateway in front of them.
"""
