"""Routing policies and the mathematics under them: pure functions, no I/O, no clock, no await.

The gateway and the simulator call the same objects through the same ``FleetView``.
"""
