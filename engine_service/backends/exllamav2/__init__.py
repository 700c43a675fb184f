"""The production backend on a GPU: ExLlamaV2's dynamic generator, every iteration composed by us.

`provision.open_backend` is the door. Importing this package loads no library; opening a model imports torch
and exllamav2, and raises `ModelError` that says what is missing. Nothing else in the engine imports that.
What it shares with its successor is in `exllama`.

Source: exllamav2 0.3.2 (PyPI). Its generator, page table and forward pass are used as they are; admission,
chunks, sampling, text and the release of pages are ours. The upstream project is archived, so what it does
will not change.
"""
