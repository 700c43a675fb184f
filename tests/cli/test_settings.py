"""Settings: what is read, who wins, and what a mistake is told."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from engine_service.errors import SettingsError
from engine_service.scheduling.model import ClassPolicy, FairnessGoal, Policy, ResidencyPolicy, WorkloadClass
from engine_service.settings import (
    BackendName,
    CacheType,
    ExLlamaV2Settings,
    ExLlamaV3Settings,
    LogFormat,
    LogSettings,
    ModelSettings,
    NamedModel,
    Overrides,
    PathSettings,
    SchedulerName,
    Scope,
    ServerSettings,
    Settings,
    check_options,
    load,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
TOKEN = "a-token-of-the-household"


def read(folder: Path, text: str, overrides: Overrides | None = None, **environment: str) -> Settings:
    path = folder / "fairhearth.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, overrides, environment)


def test_without_anything_the_documented_defaults_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(environment={})
    assert settings.server == ServerSettings()
    assert settings.model == ModelSettings()
    assert settings.policy == Policy()
    assert settings.scheduler is SchedulerName.FAIRHEARTH
    assert [entry.resident_id for entry in settings.residents] == ["guest", "house"]


def test_a_file_is_read_as_documented(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        f"""
        [server]
        host = "0.0.0.0"
        port = 0
        token = "{TOKEN}"
        [[server.tokens]]
        name = "prometheus"
        token = "another-token-for-it"
        scopes = ["metrics"]
        [model]
        backend = "simulated"
        path = "models/some.gguf"
        [policy]
        scheduler = "fifo"
        time_zone = "Europe/Berlin"
        fairness = "waiting"
        background_reserve = 0.2
        [policy.classes.voice]
        max_wait_s = 1
        inter_token_target_s = false
        [residents.alice]
        name = "Alice"
        weight = 2
        [residents.guest]
        daily_tokens = 1000
        [paths]
        state_dir = "state"
        [log]
        format = "json"
        """,
    )
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 0)
    assert [(t.name, t.scopes) for t in settings.server.tokens] == [
        ("admin", frozenset({Scope.ADMIN})),
        ("prometheus", frozenset({Scope.METRICS})),
    ]
    assert settings.model.backend is BackendName.SIMULATED
    assert settings.model.path == tmp_path / "models" / "some.gguf"
    assert settings.scheduler is SchedulerName.FIFO
    assert settings.time_zone == ZoneInfo("Europe/Berlin")
    assert settings.policy.fairness is FairnessGoal.WAITING
    assert settings.policy.background_reserve == 0.2
    assert settings.policy.classes[WorkloadClass.VOICE] == ClassPolicy(
        max_wait_s=1, inter_token_target_s=None
    )
    assert settings.policy.classes[WorkloadClass.CHAT] == Policy().classes[WorkloadClass.CHAT]
    residents = {str(entry.resident_id): entry for entry in settings.residents}
    assert residents.keys() == {"alice", "guest", "house"}
    assert (residents["alice"].name, residents["alice"].resident.weight) == ("Alice", 2)
    assert residents["guest"].resident.daily_tokens == 1000
    assert settings.paths.state_dir == tmp_path / "state"
    assert settings.log.format is LogFormat.JSON


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nport = 'eight'", "server.port must be a whole number from 0 to 65535, not 'eight'"),
        ("[server]\nport = 99999", "server.port must be a whole number from 0 to 65535, not 99999"),
        ("[server]\nprot = 1", "server.prot is not a known key; did you mean 'port'?"),
        ("[sever]\nport = 1", "sever is not a known table; did you mean 'server'?"),
        ("server = 1", "server must be an object, not 1"),
        ("[server]\ntoken = 'short'", "server.token must be at least 16 printable ASCII characters"),
        (
            "[server]\nwebhook_hosts = ['http://hub.local']",
            'server.webhook_hosts[0] must be a host like "homeassistant.local" or "192.168.1.5:8123", '
            "not 'http://hub.local'",
        ),
        ("[server]\nwebhook_secret = 'short'", "server.webhook_secret must be at least 16 printable ASCII"),
        ("[server]\nwebhook_hosts = ['hub.local:0']", "server.webhook_hosts[0] must be a host like"),
        ("[[server.tokens]]\nname = 'x'", "server.tokens[0].scopes is missing"),
        (
            f"[[server.tokens]]\nname = 'x'\ntoken = '{TOKEN}'\nscopes = ['all']",
            "server.tokens[0].scopes[0] must be one of generate, residents, metrics, policy, admin, "
            "not 'all'",
        ),
        (
            "[model]\nbackend = 'cuda'",
            "model.backend must be one of llama_cpp, exllamav2, exllamav3, simulated, not 'cuda'",
        ),
        (
            "[model.exllamav2]\nchunk_tokens = 128",
            "chunk_tokens must be a whole number >= 256",
        ),
        ("[model.exllamav2]\nchunk_tokens = 700", "model.exllamav2.chunk_tokens must be a multiple of 256"),
        ("[model.exllamav2]\ncache_type = 'fp8'", "cache_type must be one of fp16, q8, q6, q4, not 'fp8'"),
        ("[model.exllamav2]\ndraft_tokens = 9", "draft_tokens must be a whole number from 0 to 8"),
        ("[model.exllamav3]\nchunk_tokens = 700", "model.exllamav3.chunk_tokens must be a multiple of 256"),
        ("[model.exllamav3]\nlora_paths = ['x']", "model.exllamav3.lora_paths"),
        ("[model]\nthreads = 0", "model.threads must be a whole number from 1"),
        ("[model]\nthreads = 9999", "model.threads must be a whole number from 1 to"),
        (
            "[model]\ncontext_tokens = 999999999999",
            "model.context_tokens must be a whole number from 128 to 1073741824, not 999999999999",
        ),
        ("[model]\ncontext_tokens = 1" + "0" * 5000, "holds a number of more than 4300 digits"),
        ("[server]\nport = true", "server.port must be a whole number from 0 to 65535, not true"),
        ("[policy]\nvoice_window_s = inf", "policy.voice_window_s must be a number >= 0, not infinity"),
        (
            '[server]\nname = "Hearth\\u001b[2J"',
            "server.name must have printable characters only, on one line, not 'Hearth\\x1b[2J'",
        ),
        (
            f"[server]\ntoken = '{TOKEN}'\ntokens = [{{name = 'x', token = '{TOKEN}', scopes = ['admin']}}]",
            "server.tokens: 'admin' and 'x' are the same token",
        ),
        (
            f"[server]\ntoken = '{TOKEN}'\n"
            "tokens = [{name = 'admin', token = 'another-token-for-it', scopes = ['admin']}]",
            "server.tokens: two tokens are named 'admin' (server.token is named so); names must differ",
        ),
        ("[policy]\nbackground_reserve = 1.0", "policy: background_reserve must be in [0, 1), not 1.0"),
        (
            "[policy]\nmin_chunk_tokens = 1024",
            "policy: max_chunk_tokens (512) must be >= min_chunk_tokens (1024)",
        ),
        ("[policy]\nfairness = 'equal'", "policy.fairness must be one of service, waiting"),
        ("[policy]\ntime_zone = 'Mars'", 'policy.time_zone must be an IANA time zone like "Europe/Berlin"'),
        ("[policy.classes.urgent]\nmax_wait_s = 1", "policy.classes.urgent is not a known workload class"),
        ("[policy.classes.voice]\nmax_wait = 1", "did you mean 'max_wait_s'?"),
        ("[residents.Alice]", "residents.Alice: a resident id is 1 to 64 of a-z"),
        ("[residents.system]", "residents.system: 'system' is the engine's own account"),
        ("[residents.alice]\nweight = 0", "residents.alice: weight must be a whole number from 1"),
        (
            "[residents.alice]\nwheight = 1",
            "residents.alice: wheight is not a known field; did you mean 'weight'?",
        ),
        (
            "[model]\nbackend = 'simulated'\ndivided_cache = true",
            'model.divided_cache is only for backend = "llama_cpp"',
        ),
        ("[log]\nlevel = 'loud'", "log.level must be one of debug, info, warning, error, not 'loud'"),
        ("[server\nport = 1", "is not valid TOML"),
    ],
)
def test_a_mistake_is_told_with_file_key_and_what_was_expected(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        read(tmp_path, text)
    assert refused.value.message.startswith(f"{tmp_path / 'fairhearth.toml'}: ")
    assert message in refused.value.message


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load(missing, environment={})
    missing.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="is not UTF-8"):
        load(missing, environment={})


def test_the_example_of_the_document_can_be_used_as_it_is(tmp_path: Path) -> None:
    example = DOCUMENT.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    assert "residents.alice" in example
    assert [token.name for token in read(tmp_path, example).server.tokens] == ["home-assistant"]


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "fairhearth.toml"
    path.write_bytes(b"\xef\xbb\xbf[server]\nport = 7\n")
    assert load(path, environment={}).server.port == 7


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    text = "[server]\nport = 1\ntoken = 'token-of-the-file-0'\n[model]\nthreads = 1"
    token = "token-of-the-environment"
    by_environment = read(tmp_path, text, FAIRHEARTH_TOKEN=token)
    assert [t.token for t in by_environment.server.tokens] == [token]
    given = Overrides(port=2, threads=3, token="token-of-the-command", policy="fifo", log_level="debug")
    by_command = read(tmp_path, text, given, FAIRHEARTH_TOKEN=token)
    assert [t.token for t in by_command.server.tokens] == ["token-of-the-command"]
    assert (by_command.server.port, by_command.model.threads) == (2, 3)
    assert by_command.scheduler is SchedulerName.FIFO
    assert by_command.log.level == "debug"


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.toml"
    path.write_text("[server]\nname = 'Hearth'", encoding="utf-8")
    assert load(environment={"FAIRHEARTH_CONFIG": str(path)}).server.name == "Hearth"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(port=70000), "command line: --port must be a whole number from 0 to 65535, not 70000"),
        (Overrides(threads=0), "command line: --threads must be a whole number from 1 to"),
        (Overrides(threads=9999), "command line: --threads must be a whole number from 1 to"),
        (
            Overrides(context_tokens=999_999_999_999),
            "command line: --context-tokens must be a whole number from 128 to 1073741824, not 999999999999",
        ),
        (Overrides(token="short"), "command line: --token must be at least 16"),
    ],
)
def test_a_mistake_on_the_command_line_is_told(tmp_path: Path, overrides: Overrides, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(tmp_path, "", overrides)
    assert message in refused.value.message


TWO = """
[[models]]
name = "house"
path = "house.gguf"
pinned = true
max_iteration_s = 30
[[models]]
name = "coder"
backend = "exllamav2"
path = "coder"
embeddings = true
exllamav2 = { cache_type = "q8" }
[residency]
max_loaded = 2
min_stay_s = 5
"""


def test_several_models_are_read_in_their_order(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO)
    house, coder = settings.models
    assert (house.name, house.pinned, house.settings.path) == ("house", True, tmp_path / "house.gguf")
    assert coder.settings.cache_type == coder.settings.exllamav2.cache_type == "q8"
    assert settings.model == house.settings
    assert settings.embedding_model == "coder"
    assert (settings.residency.max_loaded, settings.residency.min_stay_s) == (2, 5)
    assert read(tmp_path, "[model]\ncontext_tokens = 512").models == ()


def test_each_library_has_a_table_of_its_own(tmp_path: Path) -> None:
    text = """
[model]
backend = "exllamav3"
[model.exllamav2]
cache_type = "q8"
lora_paths = ["adapter"]
[model.exllamav3]
cache_type = "q4"
draft_tokens = 3
draft_path = "small"
gpu_split = [20.5, 20]
"""
    model = read(tmp_path, text).model
    assert model.exllamav3 == ExLlamaV3Settings(
        cache_type=CacheType.Q4, draft_tokens=3, draft_path=tmp_path / "small", gpu_split=(20.5, 20)
    )
    assert model.cache_type is CacheType.Q4
    assert model.exllamav2.lora_paths == (tmp_path / "adapter",)
    assert model.exllamav2.draft_path is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO + "[model]\npath = 'x'", "model and models exclude each other"),
        (TWO.replace('"coder"', '"house"'), "models: two are named 'house'"),
        (TWO.replace("embeddings = true", "pinned = true").replace("= 2", "= 1"), "models: 2 are pinned"),
        (TWO.replace("pinned", "embeddings"), "embeddings is true of house and of coder"),
        (
            TWO.replace("pinned = true", "").replace("embeddings", "pinned").replace("= 2", "= 1"),
            "models: 'house' is the first and could never be loaded",
        ),
        (TWO.replace("= 2", "= 0"), "residency: max_loaded must be >= 1"),
        (TWO.replace("= 5", "= 0"), "residency: min_stay_s must be > 0"),
        ("[[models]]\npath = 'x'", "models[0].name"),
        ("models = []", "models"),
    ],
)
def test_models_that_cannot_share_an_engine_are_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(tmp_path, text)
    assert message in refused.value.message


def test_an_option_that_could_mean_any_of_several_models_is_refused(tmp_path: Path) -> None:
    settings = read(tmp_path, TWO)
    with pytest.raises(SettingsError, match="--context-tokens means one model"):
        check_options(settings, Overrides(context_tokens=512))
    check_options(settings, Overrides(port=1))
    check_options(read(tmp_path, ""), Overrides(context_tokens=512))


def test_a_token_never_shows_when_settings_are_printed(tmp_path: Path) -> None:
    assert TOKEN not in repr(read(tmp_path, f"[server]\ntoken = '{TOKEN}'"))


@pytest.mark.parametrize(
    ("section", "kind", "without"),
    [
        ("## `[server]`", ServerSettings, set()),
        ("## `[model]`", ModelSettings, {"exllamav2", "exllamav3"}),
        ("## `[model.exllamav2]`", ExLlamaV2Settings, set()),
        ("## `[model.exllamav3]`", ExLlamaV3Settings, set()),
        ("## `[[models]]`", NamedModel, {"settings"}),
        ("## `[residency]`", ResidencyPolicy, set()),
        ("## `[policy]`", Policy, {"classes"}),
        ("## `[policy]`", ClassPolicy, set()),
        ("## `[paths]`", PathSettings, set()),
        ("## `[log]`", LogSettings, set()),
    ],
)
def test_every_key_is_documented(section: str, kind: type, without: set[str]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition(section)[2].partition("\n## ")[0]
    missing = {f.name for f in fields(kind)} - without - set(text.split("`")[1::2])
    assert not missing


@pytest.mark.parametrize(
    "policy_field", [f for f in fields(Policy) if f.name not in ("classes", "fairness", "unit")]
)
def test_the_documented_defaults_are_those_of_the_policy(policy_field: object) -> None:
    name = policy_field.name  # type: ignore[attr-defined]
    default = getattr(Policy(), name)
    shown = str(list(default) if isinstance(default, tuple) else default).lower()
    assert f"| `{name}` | `{shown}` |" in DOCUMENT.read_text(encoding="utf-8")
