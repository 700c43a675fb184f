"""The tests. A package, so that shared parts are imported as ``tests.<suite>.<module>`` from anywhere."""
