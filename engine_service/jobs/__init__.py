"""Jobs that survive the engine: on disk before they are accepted, run by the engine, kept a while."""
