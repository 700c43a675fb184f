"""A household that runs for real: Home Assistant and the engine as processes, residents, work, measures.

Shared by `scripts/demo`, `scripts/screenshots` and the end-to-end tests. Talks to both programs from outside
only, over HTTP and WebSocket, as any other client would; imports neither. Runs on Python 3.11 to 3.14.
"""
