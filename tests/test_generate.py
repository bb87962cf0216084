"""Continuations from checkpoints: the same text for the same seed, greedy at temperature 0."""

import json
import math
from dataclasses import replace

import pytest
import torch

from mcp_parallel.cli.main import main
from mcp_parallel.config import Config
from mcp_parallel.errors import ConfigError
from mcp_parallel.generate import Codec, continue_tokens
from mcp_parallel.layout import Layout
from mcp_parallel.parallel.mesh import build_mesh
from mcp_parallel.snapshot import save_step
from mcp_parallel.step import TrainingStep

SMALL = {
    "preset": None,
    "num_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_size": 16,
    "vocab_size": 256,
    "seq_len": 12,
}


def make_step():
    config = Config.from_mapping({"model": SMALL})
    return TrainingStep(config, build_mesh(Layout(), torch.device("cpu")))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_step(folder, 7, make_step())
    return folder


def generate(capsys, *args):
    status = main(["generate", *map(str, args)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_text_goes_on_from_the_prompt(run_dir, capsys):
    args = (run_dir, "--prompt", "def ", "--max-new-tokens", 30, "--json")
    status, out, _ = generate(capsys, *args)
    report = json.loads(out)
    assert status == 0
    assert report["prompt"] == "def "
    assert report["step"] == 7
    assert report["continuation"]
    assert json.loads(generate(capsys, *args)[1]) == report
    other = json.loads(generate(capsys, *args, "--seed", 1)[1])
    assert other["continuation"] != report["continuation"]


def test_a_step_folder_will_do(run_dir, capsys):
    step_dir = run_dir / "checkpoints" / "step_00000007"
    assert generate(capsys, step_dir, "--max-new-tokens", 3)[0] == 0


def test_greedy_takes_the_most_likely_token_of_a_full_window():
    model = make_step().stages[0].model
    prompt = list(b"a long enough prompt")
    [token] = continue_tokens(
        model, prompt, num_new=1, seq_len=12, num_tokens=256, temperature=0, seed=0
    )
    logits = model(torch.tensor([prompt[-12:]]))
    assert token == logits[0, -1].argmax()


@pytest.mark.parametrize("temperature", [1e-12, 0.5, 2.0])
def test_temperature_sharpens(temperature):
    model = make_step().stages[0].model
    prompt = list(b"abc")
    logits = model(torch.tensor([prompt]))[0, -1].double()
    likely = ((logits - logits.max()) / temperature).softmax(-1)
    drawn = torch.zeros(256)
    for seed in range(300):
        [token] = continue_tokens(
            model, prompt, num_new=1, seq_len=12, num_tokens=256, temperature=temperature, seed=seed
        )
        drawn[token] += 1
    # The top half of the probability mass is drawn as often as it is likely, within 5 sigma.
    order = likely.argsort(descending=True)
    top = order[likely[order].cumsum(0) <= 0.5]
    top = order[: max(1, len(top))]
    mass = likely[top].sum().item()
    assert abs(drawn[top].sum() / 300 - mass) <= 5 * math.sqrt(max(mass * (1 - mass), 1e-9) / 300)


def test_tokens_beyond_the_bytes_are_never_sampled():
    config = Config.from_mapping({"model": {**SMALL, "vocab_size": 300}})
    assert Codec.of(config) == Codec(256, is_text=True)


def test_a_prompt_that_the_locale_cannot_read_keeps_its_bytes():
    as_ascii_locales_give_it = b"d\xc3\xa9".decode("ascii", errors="surrogateescape")
    assert Codec.of(Config()).encode(as_ascii_locales_give_it) == [0x64, 0xC3, 0xA9]


def test_a_token_file_model_speaks_in_numbers():
    config = Config()
    config = replace(config, data=replace(config.data, path="corpus.bin"))
    codec = Codec.of(config)
    assert codec.encode("12, 7 99") == [12, 7, 99]
    assert codec.decode([3, 4]) == " 3 4"
    with pytest.raises(ConfigError, match="token numbers below 256"):
        codec.encode("def ")
    with pytest.raises(ConfigError, match="'256'"):
        codec.encode("256")


@pytest.mark.parametrize(
    "flags, word",
    [
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--prompt", ""], "--prompt"),
    ],
)
def test_bad_input_is_refused(run_dir, capsys, flags, word):
    status, _, err = generate(capsys, run_dir, *flags)
    assert status == 2
    assert word in err


def test_no_checkpoint_and_a_damaged_one_are_refused(run_dir, tmp_path, capsys):
    status, _, err = generate(capsys, tmp_path)
    assert status == 2
    assert "train first" in err
    save_step(tmp_path, 3, make_step())
    step_dir = tmp_path / "checkpoints" / "step_00000003"
    [shard] = step_dir.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    status, _, err = generate(capsys, step_dir)
    assert status == 2
    assert shard.name in err
