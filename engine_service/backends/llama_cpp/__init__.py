"""The embedded default backend: any GGUF model, computed by llama.cpp on this machine.

`provision.open_backend` is the door. Importing this package loads no library; building a backend does, and
raises `ModelError` that says what to install when there is none.

Source: llama.h of ggml-org/llama.cpp, called through ctypes; the library comes from a PyPI wheel.
"""

from engine_service.backends.llama_cpp.backend import LlamaCppBackend
from engine_service.backends.llama_cpp.provision import open_backend

__all__ = ["LlamaCppBackend", "open_backend"]
