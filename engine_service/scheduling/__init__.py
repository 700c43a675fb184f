"""The core: a pure function of (state, event, now) that returns decisions.

Nothing in this package reads a clock, draws a random number, awaits, logs or touches a device. The same
code runs in the engine, in the simulator and in the property tests.
"""
