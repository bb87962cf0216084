"""Configuration files: YAML and TOML, what they mean and what is refused."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import yaml
from configs import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_parallel.config import TABLES, Config
from mcp_parallel.config_schema import field_types
from mcp_parallel.config_text import MAX_CONFIG_BYTES, parse_yaml
from mcp_parallel.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


# --- files ---------------------------------------------------------------------------------------


def test_yaml_and_toml_say_the_same(write):
    yaml_file = write("model: {preset: 7b}\ntrain:\n  lr: 3e-4\ndata: {path: null}\n")
    toml_file = write('model.preset = "7b"\n[train]\nlr = 3e-4\n', "config.toml")
    config = Config.from_file(yaml_file)
    assert config == Config.from_file(toml_file)
    assert config.train.lr == 3e-4


@pytest.mark.parametrize(
    "text, value",
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-1.5e+3", -1.5e3),
        (".5", 0.5),
        ("1_000", 1000),
        ("+7", 7),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("yes", "yes"),
        ("on", "on"),
        ("2020-01-01", "2020-01-01"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'3'", "3"),
        ("1f1b", "1f1b"),
        ("1.3b", "1.3b"),
    ],
)
def test_scalars_mean_what_they_look_like(text, value):
    (parsed,) = parse_yaml(f"key: {text}").values()
    assert parsed == value
    assert type(parsed) is type(value)


# Strings to one YAML reader, numbers or words to another.
NUMBER_LIKE = ["NAN", "inf", "1e5", "010", "0x1", "1_0", "yes", "~", "null", "", "1:30", "9" * 5000]

ROUND_TRIP = st.builds(
    lambda lr, norm, path, seed, asynchronous: Config.from_mapping(
        {
            "model": {"preset": "34b", "norm_eps": norm},
            "train": {"lr": lr, "seed": seed},
            "data": {"path": path},
            "checkpoint": {"async": asynchronous},
        }
    ),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    norm=st.floats(1e-300, 1e300),
    path=st.none() | st.text() | st.sampled_from(NUMBER_LIKE),
    seed=st.integers(-(2**70), 2**70),
    asynchronous=st.booleans(),
)


@given(config=ROUND_TRIP)
@settings(deadline=None)
def test_a_config_written_is_the_config_read(config):
    text = config.to_yaml()
    assert text.isascii()
    assert Config.from_mapping(parse_yaml(text)) == config
    # Other programs read it with PyYAML's own rules.
    assert Config.from_mapping(yaml.safe_load(text)) == config
    assert Config.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


def test_written_keys_are_those_of_the_attributes_but_for_async():
    mapping = Config().to_mapping()
    assert list(mapping) == list(TABLES)
    for table, keys in mapping.items():
        assert list(keys) == list(field_types(TABLES[table]))
    assert "async" in mapping["checkpoint"]


BILLION_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

BAD_FILES = [
    ("train: !!python/object/apply:os.system ['true']", "tags are not taken, got"),
    ("train: {lr: !!float 3}", "tags are not taken"),
    ("train: !mine {lr: 3}", "tags are not taken"),
    ("train: {lr: ! 3}", "tags are not taken"),
    (BILLION_LAUGHS, "anchors and aliases"),
    ("train: &x {lr: 3}", "anchors and aliases"),
    ("train: {lr: 1}\ntrain: {lr: 2}", "line 2: key 'train' is given twice"),
    ("train:\n  lr: 1\n  lr: 2", "line 3: key 'lr' is given twice"),
    ("? [a]\n: 3", "a key must be a word"),
    ("[1, 2]", "top level of"),
    ("hello", "must be a mapping of tables, got a single value"),
    ("", "got nothing"),
    ("# only a remark\n", "got nothing"),
    ("a: b: c", "line 1"),
    ("a: {", "line 1"),
    ("a: 1\n---\nb: 2", "line 2"),
    ("a: " + "[" * 3000, "nested too deeply"),
    ("train: {steps: " + "9" * 5000 + "}", "the number is too long"),
    ("a\0b: 1", "must be YAML"),
    (b"\xff\xfe\x00", "must be UTF-8 text"),
    ("#" * (MAX_CONFIG_BYTES + 1), f"at most {MAX_CONFIG_BYTES} bytes"),
]


@pytest.mark.parametrize("text, words", BAD_FILES)
def test_bad_yaml_is_refused_in_words(write, text, words):
    start = time.process_time()
    assert words in problem_of(lambda: Config.from_file(write(text)))
    # Not a benchmark: an expansion of these texts would take hours and gigabytes.
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "text, words",
    [
        ("a = 1\na = 2", "must be TOML"),
        ("[train]\nlr = nan", "must be a finite number, got nan"),
        ("[train]\nlr = 2020-01-01", "must be a finite number, got datetime.date(2020, 1, 1)"),
        ("a = " + "[" * 5000, "must be TOML"),
        ("train = [", "must be TOML"),
    ],
)
def test_bad_toml_is_refused_in_words(write, text, words):
    assert words in problem_of(lambda: Config.from_file(write(text, "c.toml")))


def test_bad_paths_are_refused_in_words(tmp_path, write):
    assert "existing file" in problem_of(lambda: Config.from_file(tmp_path / "none.yaml"))
    (tmp_path / "folder.yaml").mkdir()
    assert "existing file" in problem_of(lambda: Config.from_file(tmp_path / "folder.yaml"))
    assert "end in .yaml" in problem_of(lambda: Config.from_file(write("{}", "c.json")))
    assert problem_of(lambda: Config.from_file("a\0.yaml"))


def test_paths_with_spaces_and_accents(write):
    path = write("data: {path: 'my d\u00e4ta'}", "my caf\u00e9.yaml")
    assert Config.from_file(path).data.path == "my d\u00e4ta"


@given(st.text(max_size=200))
@settings(deadline=None)
def test_any_text_is_read_or_refused(text):
    """Never another exception."""
    with contextlib.suppress(ConfigError):
        parsed = parse_yaml(text)
        Config.from_mapping(parsed if isinstance(parsed, dict) else {})
