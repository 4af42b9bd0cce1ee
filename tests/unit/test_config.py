"""Every kind of mistake in ``kvway.yaml`` or the environment: one line each, naming the key and what would be right."""

from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import ValidationError

from gateway.config import Config, WorkerConfig, load_config
from gateway.config_docs import reference
from gateway.config_source import models_in
from gateway.errors import ConfigError
from gateway.fleet.registry import Worker


@pytest.fixture
def load(tmp_path):
    def load(text="", **environ):
        path = tmp_path / "kvway.yaml"
        path.write_text(text)
        return load_config(path, environ)

    return load


@pytest.fixture
def mistakes(load, tmp_path):
    def mistakes(text="", **environ):
        with pytest.raises(ConfigError) as caught:
            load(text, **environ)
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()

    return mistakes


def test_an_empty_file_is_the_defaults(load):
    assert load() == Config()


def test_no_file_is_the_defaults():
    assert load_config(None, {}) == Config()


def test_a_whole_file_is_read(load):
    config = load("""
        server: {port: 9000}
        workers:
          - url: http://10.0.0.1:8000
            kv_events: {endpoint: "tcp://10.0.0.1:5557"}
            tiers: {kv_bytes_per_token: 131072}
          - {url: "https://worker.example/", name: b, models: [llama, adapter]}
        models: {"*": {source: bytes}}
    """)
    first, second = config.workers
    assert config.server.port == 9000
    assert (first.label, first.tiers.kv_bytes_per_token) == ("10.0.0.1:8000", 131072)
    assert (second.label, second.url, second.models) == ("b", "https://worker.example", ("llama", "adapter"))
    assert config.model_config_for("anything").source == "bytes"


def test_a_section_or_key_without_value_keeps_its_default(load):
    assert load("server:\nworkers:\nhealth:\n  failures:\n") == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sever: {}", "kvway.yaml: unknown key 'sever'; did you mean 'server'?"),
        ("server: {prot: 1}", "kvway.yaml: unknown key 'server.prot'; did you mean 'port'?"),
        (
            "workers: [{url: 'http://a:1'}, {url: 'http://b:1', modles: []}]",
            "kvway.yaml: unknown key 'workers[1].modles'; did you mean 'models'?",
        ),
        (
            "workers: [{url: 'http://a:1', kv_events: {endpoint: 'tcp://a:1', replay_endpont: x}}]",
            "kvway.yaml: unknown key 'workers[0].kv_events.replay_endpont'; did you mean 'replay_endpoint'?",
        ),
        (
            "models: {llama: {tokeniser: /x}}",
            "kvway.yaml: unknown key 'models.llama.tokeniser'; did you mean 'tokenizer'?",
        ),
        ("chunk_tokens: 128", "kvway.yaml: unknown key 'chunk_tokens'; did you mean 'prompt.chunk_tokens'?"),
        ("port: 9000", "kvway.yaml: unknown key 'port'; did you mean 'server.port'?"),
        (
            "policy: {params: {prcie: true}}",
            "kvway.yaml: policy: policy 'expected-cost': unknown parameter 'prcie'; did you",
        ),
        ("retries: {zzz: 1}", "kvway.yaml: unknown key 'retries.zzz'; valid keys: max_attempts, "),
    ],
)
def test_an_unknown_key_gets_the_nearest_valid_name(mistakes, text, message):
    (line,) = mistakes(text)
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {port: eighty}", "kvway.yaml: server.port: must be a valid integer"),
        ("server: {port: 70000}", "kvway.yaml: server.port: must be less than or equal to 65535, not 70000"),
        ("server: 8000", "kvway.yaml: server: must be a mapping of keys, not 8000"),
        ("workers: {url: 'http://a:1'}", "kvway.yaml: workers: must be a list, not a mapping"),
        ("workers: ['http://a:1']", "kvway.yaml: workers[0]: must be a mapping of keys, not 'http://a:1'"),
        ("workers: [{name: a}]", "kvway.yaml: workers[0].url: is required"),
        ("workers: [{url: 'http://a:1', name: 'a b'}]", "kvway.yaml: workers[0].name: must match pattern"),
        ("health: {interval_s: .inf}", "kvway.yaml: health.interval_s: must be a finite number, not inf"),
        ("health: {interval_s: -1}", "kvway.yaml: health.interval_s: must be greater than 0, not -1"),
        ("index: {backend: reddis}", "kvway.yaml: index.backend: must be 'memory' or 'redis', not 'reddis'"),
        (
            "server: {tls_cert: /nowhere/a, tls_key: /nowhere/b}",
            "kvway.yaml: server.tls_cert: /nowhere/a does not exist",
        ),
        ("server: {port: 8000, admin_port: 8000}", "kvway.yaml: server: port and admin_port are both 8000"),
        ("models: {llama: {source: tokenizer}}", "kvway.yaml: models.llama: source is 'tokenizer', but no tokenizer"),
        ("index: {url: nonsense}", "kvway.yaml: index.url: must match pattern"),
        ("index: {url: 'redis://h/x'}", "kvway.yaml: index.url: 'x' is not the number of a database"),
        ("health: {path: health}", "kvway.yaml: health.path: must match pattern"),
        ("health: {path: /a b}", "kvway.yaml: health.path: must match pattern"),
        ("? [a]\n: 1", "kvway.yaml: is not valid YAML: a key must be a plain word"),
        ("workers: [{url: 'http://a:1', api_key_file: /}]", "kvway.yaml: workers[0].api_key_file: / is a directory"),
        ("models: {llama: {tokenizer: [a]}}", "kvway.yaml: models.llama.tokenizer: must be a path, not a list"),
        (
            "models: {llama: {chat_template: /nowhere}}",
            "kvway.yaml: models.llama.chat_template: /nowhere does not exist",
        ),
        (
            f"models: {{llama: {{chat_template: {'x' * 300}}}}}",
            f"kvway.yaml: models.llama.chat_template: {'x' * 300} cannot be reached: File name too long",
        ),
        (
            "replication: {domains: 1000000}",  # a metric has a label for each
            "kvway.yaml: replication.domains: must be less than or equal to 64, not 1000000",
        ),
        (
            "models: {llama: {tokenizer: /a, hub: b/c}}",
            "kvway.yaml: models.llama: tokenizer and hub exclude each other",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key(mistakes, text, message):
    assert mistakes(text)[0].startswith(message)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.1:8000",
        "ftp://a:1",
        "http://",
        "http://:80",
        "http://a:99999",
        "http://a:0",
        "http://a:b",
        "http://a:1/v1",
        "http://a:1?x",
        "http://user:pass@a:1",
        "http://[::1:80",
        "http://a b:1",
        "http://a..b:1",
        f"http://{'a' * 64}:1",
    ],
)
def test_a_bad_worker_url_is_refused(mistakes, url):
    (line,) = mistakes(f"workers: [{{url: '{url}'}}]")
    assert line == f"kvway.yaml: workers[0].url: '{url}' is not a worker URL; write http://host:port without a path"


@pytest.mark.parametrize(
    ("url", "taken"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://[::1]/", "https://[::1]/v1/traces"),
        ("http://collector:4318/otlp/v1/traces", "http://collector:4318/otlp/v1/traces"),
    ],
)
def test_a_collector_without_a_path_has_the_usual_one(load, url, taken):
    assert load(f"tracing: {{endpoint: '{url}'}}").tracing.endpoint == taken


@pytest.mark.parametrize(
    "url", ["", "collector:4318", "grpc://collector:4317", "http://", "http://c:0", "http://c/a?key=1", "http://u:pw@c"]
)
def test_a_bad_collector_url_is_refused(mistakes, url):
    (mistake,) = mistakes(f"tracing: {{endpoint: '{url}'}}")
    assert mistake.startswith("kvway.yaml: tracing.endpoint: ")
    assert "is not an OTLP/HTTP URL; write http://host:4318" in mistake
    assert "pw" not in mistake


@pytest.mark.parametrize("endpoint", ["10.0.0.1:5557", "tcp://10.0.0.1", "tcp://a:99999", "udp://a:1", "tcp://"])
def test_a_bad_zmq_endpoint_is_refused(mistakes, endpoint):
    (line,) = mistakes(f"workers: [{{url: 'http://a:1', kv_events: {{endpoint: '{endpoint}'}}}}]")
    assert "workers[0].kv_events.endpoint" in line
    assert "write tcp://host:port" in line


def test_a_certificate_without_its_key_is_refused(mistakes, tmp_path):
    (tmp_path / "cert.pem").touch()
    (line,) = mistakes(f"server: {{tls_cert: {tmp_path}/cert.pem}}")
    assert line == "kvway.yaml: server: tls_cert and tls_key go together; give both or neither"


@pytest.mark.parametrize(
    "workers",
    [
        "[{url: 'http://a:80'}, {url: 'http://a'}]",
        "[{url: 'http://a:1', name: x}, {url: 'http://b:1', name: x}]",
        "[{url: 'http://a:1'}, {url: 'http://b:1', name: 'a:1'}]",
    ],
)
def test_two_workers_of_one_name_are_refused(mistakes, workers):
    (line,) = mistakes(f"workers: {workers}")
    assert line.startswith("kvway.yaml: workers: two workers are called ")


def test_an_ipv6_worker_keeps_its_brackets_in_its_name_only():
    worker = Worker.from_config(WorkerConfig(url="http://[::1]:8000"))
    assert (worker.name, worker.host, worker.port) == ("[::1]:8000", "::1", 8000)


def test_every_mistake_is_told_at_once(mistakes):
    lines = mistakes("server: {port: x}\nworkers: [{urll: a}]\nlog: {level: loud}", KVWAY_INDEX__BAKEND="redis")
    assert len(lines) == 5
    assert [line.partition(":")[0] for line in lines] == ["kvway.yaml"] * 3 + ["KVWAY_INDEX__BAKEND", "kvway.yaml"]


def test_numbers_written_as_strings_are_numbers(load):
    config = load("server: {port: '9000'}\nhealth: {interval_s: '0.5'}")
    assert (config.server.port, config.health.interval_s) == (9000, 0.5)


def test_bad_yaml_is_told_with_line_and_column(mistakes):
    (line,) = mistakes("server:\n  port: 1\n bad: [")
    assert line.startswith("kvway.yaml: is not valid YAML: ")
    assert line.endswith("(line 3, column 2)")


@pytest.mark.parametrize("value", ["2001-99-99", "0x_", "!!int x", "9" * 5000])
def test_what_looks_like_a_date_or_a_number_and_is_none_is_told_with_line_and_column(mistakes, value):
    (line,) = mistakes(f"server:\n  port: {value}")
    assert line.startswith("kvway.yaml: is not valid YAML: ")
    assert line.endswith("(line 2, column 9)")
    (line,) = mistakes(KVWAY_SERVER__PORT=value)
    assert line.startswith("KVWAY_SERVER__PORT: is not a valid value: ")


def test_yaml_nested_beyond_all_measure_is_told(mistakes):
    (line,) = mistakes("server: " + "[" * 3000)
    assert line.startswith("kvway.yaml: is not valid YAML: ")
    (line,) = mistakes(KVWAY_SERVER="[" * 3000)
    assert line.startswith("KVWAY_SERVER: is not a valid value: ")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "42"])
def test_a_file_that_is_no_mapping_is_refused(mistakes, text):
    assert mistakes(text) == ["kvway.yaml: must be a mapping of sections such as 'server:' and 'workers:'"]


def test_a_key_given_twice_is_refused(mistakes):
    (line,) = mistakes("server:\n  port: 1\nlog: {}\nserver:\n  port: 2\n")
    assert line == "kvway.yaml: is not valid YAML: key 'server' is given twice (line 4, column 1)"


def test_keys_that_are_not_text_are_refused(mistakes):
    (line,) = mistakes("8000: server")
    assert line.startswith("kvway.yaml: ")


def test_yaml_anchors_and_merge_keys_work(load):
    config = load("""
        workers:
          - &first {url: "http://a:1", prefill: {b_s: 0.001}}
          - {<<: *first, url: "http://b:1"}
    """)
    assert [(worker.url, worker.prefill.b_s) for worker in config.workers] == [
        ("http://a:1", 0.001),
        ("http://b:1", 0.001),
    ]


def test_no_yaml_tag_runs_code(mistakes):
    (line,) = mistakes("server: !!python/object/apply:os.getcwd []")
    assert "could not determine a constructor" in line


def test_a_missing_file_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.yaml: cannot be read: No such file or directory"):
        load_config(tmp_path / "missing.yaml", {})


def test_bytes_that_are_not_text_are_one_message(tmp_path):
    (tmp_path / "kvway.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"kvway.yaml: is not valid YAML"):
        load_config(tmp_path / "kvway.yaml", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: {name: round-robbin}", "Did you mean 'round-robin'?"),
        ("policy: {name: round-robin, params: {speed: 1}}", "speed"),
        ("policy: {name: prefix-hash, params: {load_factor: fast}}", "load_factor"),
    ],
)
def test_a_wrong_policy_or_parameter_is_told(mistakes, text, message):
    (line,) = mistakes(text)
    assert line.startswith("kvway.yaml: policy: ")
    assert message in line


def test_the_environment_wins_over_the_file(load):
    config = load("server: {port: 1, host: a}", KVWAY_SERVER__PORT="2", KVWAY_LOG__REQUESTS="false")
    assert (config.server.port, config.server.host, config.log.requests) == (2, "a", False)


def test_workers_of_the_command_line_win_over_the_environment_and_answer_for_their_mistakes():
    environ = {"KVWAY_WORKERS": "[{url: 'http://a:1'}]"}
    config = load_config(None, environ, worker_urls=["http://b:1"])
    assert [worker.url for worker in config.workers] == ["http://b:1"]
    with pytest.raises(ConfigError, match=r"^--worker: workers\[0\].url: 'b' is not a worker URL"):
        load_config(None, environ, worker_urls=["b"])


def test_the_environment_sets_lists_and_parameters_as_yaml(load):
    config = load(KVWAY_WORKERS="[{url: 'http://a:1'}]", KVWAY_POLICY__NAME="round-robin", KVWAY_POLICY__PARAMS="{}")
    assert [worker.url for worker in config.workers] == ["http://a:1"]
    assert config.policy.name == "round-robin"


@pytest.mark.parametrize("secret", ["0123456", "yes", "it's: {", "a #b", "@x", "'q"])
def test_the_environment_sets_secrets_as_they_are(load, secret):
    config = load(KVWAY_INDEX__PASSWORD=secret, KVWAY_INDEX__SENTINEL_PASSWORD=secret, KVWAY_RECORDER__SALT=secret)
    assert (config.index.password, config.index.sentinel_password, config.recorder.salt) == (secret,) * 3


def test_a_mistake_in_a_secret_does_not_show_it(mistakes):
    (line,) = mistakes("index: {password: 31415926}")
    assert "index.password: must be a valid string" in line and "31415926" not in line
    (line,) = mistakes("index: {url: 'redi://me:secret@host'}")
    assert "redi://me:***@host" in line


def test_the_environment_reaches_into_an_empty_section(load):
    assert load("server:\n", KVWAY_SERVER__PORT="2").server.port == 2


def test_variables_of_tools_are_no_keys(load):
    assert load(KVWAY_CONFIG="x", KVWAY_TRACES="/t", KVWAYX_SERVER__PORT="x", HOME="/h") == Config()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("KVWAY_SEVER__PORT", "1", "unknown section 'sever'; did you mean 'server'?"),
        ("KVWAY_SERVER__PROT", "1", "unknown key 'server.prot'; did you mean 'port'?"),
        ("KVWAY_SERVER__PORT", "x", "server.port: must be a valid integer"),
        ("KVWAY_SERVER__PORT", "[1", "is not a valid value: "),
        (
            "KVWAY_SERVER__PORT__X",
            "1",
            "'server.port' has no keys of its own; set it whole, as YAML, with KVWAY_SERVER__PORT",
        ),
        ("KVWAY_SERVER", "8000", "server: must be a mapping of keys, not 8000"),
        (
            "KVWAY_WORKERS__0__URL",
            "http://b:1",
            "'workers' has no keys of its own; set it whole, as YAML, with KVWAY_WORKERS",
        ),
        ("KVWAY_WORKERS", "[{url: b}]", "workers[0].url: 'b' is not a worker URL"),
        ("KVWAY_POLICY__NAME", "nope", "policy: unknown policy 'nope'"),
    ],
)
def test_a_mistake_in_a_variable_names_the_variable(mistakes, variable, value, message):
    (line,) = mistakes("server: {port: 1}\nworkers: [{url: 'http://a:1'}]", **{variable: value})
    assert line.startswith(f"{variable}: {message}")


def test_a_list_that_only_the_environment_reaches_into_is_told(mistakes):
    (line,) = mistakes(KVWAY_WORKERS__0__URL="http://a:1")
    assert line == "KVWAY_WORKERS__0__URL: workers: must be a list, not a mapping"


def numeric_fields(model=Config, path=()):
    """Where numbers are expected: paths of keys, with 0 for an entry of a list and ``m`` for one of a mapping."""
    for name, field in model.model_fields.items():
        nested = models_in(field.annotation)
        if not nested:
            if {int, float} & {field.annotation, *get_args(field.annotation)}:
                yield (*path, name)
            continue
        entry = {tuple: (0,), dict: ("m",)}.get(get_origin(field.annotation), ())
        yield from numeric_fields(nested[0], (*path, name, *entry))


@pytest.mark.parametrize("path", list(numeric_fields()), ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_no_numbers(path, value):
    data = value
    for part in reversed(path):
        data = [data] if part == 0 else {part: data}
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(data)
    said = {error["loc"]: error["msg"] for error in caught.value.errors()}
    assert said[path] == f"Value error, must be a number, not {str(value).lower()}"


def test_a_port_that_is_true_is_said_in_the_words_of_yaml(mistakes):
    assert mistakes("server: {port: yes}") == ["kvway.yaml: server.port: must be a number, not true"]
    assert mistakes(KVWAY_HEALTH__FAILURES="true") == [
        "KVWAY_HEALTH__FAILURES: health.failures: must be a number, not true"
    ]


def test_true_is_a_value_where_one_of_two_is_asked_for(load):
    assert load("log: {requests: false}").log.requests is False


def test_configuration_does_not_change_after_loading(load):
    with pytest.raises(ValueError, match="frozen"):
        load().server.port = 1


def test_a_model_takes_its_own_settings_then_the_default_ones():
    config = Config.model_validate({"models": {"a": {"source": "engine"}, "*": {"source": "bytes"}}})
    assert [config.model_config_for(model).source for model in ("a", "b")] == ["engine", "bytes"]


@pytest.mark.parametrize("password", ["secret", "a@secret", "a%2Fsecret", "a:secret"])
def test_the_password_in_a_url_is_masked_whatever_it_holds(password):
    config = Config.model_validate({"index": {"url": f"redis://user:{password}@host"}})
    assert config.masked()["index"]["url"] == "redis://user:***@host"


@pytest.mark.parametrize("url", ["rdis://user:{}@host", "redis://user:{}@host:port", "redis+sentinel://user:{}@host"])
@pytest.mark.parametrize("password", ["secret", "a@secret", "a/secret", "a:secret"])
def test_what_is_wrong_with_a_url_is_told_without_its_password(mistakes, url, password):
    (line,) = mistakes(f"index: {{url: '{url.format(password)}'}}")
    assert "secret" not in line


def test_the_passwords_of_the_index_are_masked():
    secrets = {"url": "redis://user:secret@host:6379/0", "password": "secret", "sentinel_password": "secret"}
    config = Config.model_validate({"index": secrets})
    assert config.masked()["index"]["url"] == "redis://user:***@host:6379/0"
    assert "secret" not in str(config.masked()).replace("sentinel_password", "")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"tls_cert": "a.pem"}, "tls_key"),
        ({"password": "x", "password_file": "y"}, "password_file"),
        ({"sentinel_password": "x", "sentinel_password_file": "y"}, "sentinel_password_file"),
        ({"url": "http://host"}, "url"),
    ],
)
def test_settings_of_the_index_that_cannot_be_are_named(settings, names):
    with pytest.raises(ValidationError, match=names):
        Config.model_validate({"index": settings})


def test_the_reference_page_is_the_one_in_the_repository():
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text("utf-8") == reference(), "run: python -m gateway.config > docs/configuration.md"


def test_a_tokenizer_that_is_not_there_is_no_mistake_it_may_lie_on_a_volume_that_is_not_mounted(tmp_path: Path) -> None:
    file = tmp_path / "kvway.yaml"
    file.write_text("models: {llama: {tokenizer: /nowhere}}")
    assert load_config(file, {}).models["llama"].tokenizer == Path("/nowhere")
