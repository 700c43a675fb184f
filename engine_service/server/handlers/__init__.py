"""One module per subject; each handler reads a message, asks the engine, writes a message."""
