"""ExLlamaV3's generator, every iteration composed by us: the successor of `exllamav2`.

`provision.open_backend` is the door. Importing this package loads no library; opening a model imports torch
and exllamav3, and raises `ModelError` that says what is missing. Nothing else in the engine imports that.

Source: exllamav3 1.6.5 (PyPI). Its iteration, drafting, page table and forward passes are used as they are;
admission, chunks, sampling, text and the release of pages are ours.

What it cannot do: stop a forward pass half-way (`abort` takes effect between two of them), load LoRA
adapters, and preempt models that keep a recurrent state beside the pages, which are therefore refused.
"""
