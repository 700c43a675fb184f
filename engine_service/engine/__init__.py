"""The shell around the core: a thread that plans and steps, sessions, metrics."""
