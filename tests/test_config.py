"""The configuration: precedence, presence, origins, and what is refused before any weight is loaded."""

from __future__ import annotations

import re
from datetime import date, datetime

import pytest

from apcbatch import LLM, config, option_values, resolution
from apcbatch.address import hub_page
from apcbatch.cli.program import main
from apcbatch.draft_sources import draft_sources
from apcbatch.errors import ModelError, UsageError
from apcbatch.foreign_options import FOREIGN_COMMANDS, FOREIGN_OPTIONS
from apcbatch.job.continuation import command_words
from apcbatch.model.locate import locate_model
from tests.effort import table


def resolve(flags=None, environ=None, file=None):
    return resolution.resolve(flags or {}, environ or {}, file or {}, "c.yaml")


@table("flags, environ, file, expected", [
    ({"block_size": "544"}, {"APCBATCH_BLOCK_SIZE": "32", "APCBATCH_SEED": "7", "HOME": "/"},
     {"block_size": 16, "max_running": 4, "seed": 9},
     {"block_size": (544, "--block-size"), "seed": (7, "APCBATCH_SEED"), "max_running": (4, "c.yaml: max_running"),
      "max_batch_tokens": (2048, "default")}),
    # merging by truthiness leaves the 0.7 of the file in place
    *(({"temperature": zero, "limit": 0}, {}, {"temperature": 0.7, "limit": 3},
       {"temperature": (0.0, "--temperature"), "limit": (0, "--limit")}) for zero in ("0", 0, 0.0)),
    ({}, {"APCBATCH_LOGPROBS": "false"}, {"logprobs": True}, {"logprobs": (False, "APCBATCH_LOGPROBS")}),
    # what contributors set for `pip install` and the browser tests is no option of a run
    ({}, {"APCBATCH_CUDA": "0", "APCBATCH_CUDA_ARCHS": "90", "APCBATCH_BROWSER": "/usr/bin/chromium"}, {}, {}),
    # of options that exclude each other the stronger source wins: the printed command that continues is not refused
    ({"resume": True}, {"APCBATCH_OVERWRITE": "1"}, {}, {"resume": (True, "--resume"), "overwrite": (False, None)}),
    ({"no_store": True}, {"APCBATCH_STORE": "d"}, {}, {"store": (None, "--no-store")}),
    ({"retry_errors": True}, {}, {}, {"resume": (True, "--retry-errors")}),
])  # fmt: skip
def test_flags_win_over_environment_over_file_over_defaults(flags, environ, file, expected):
    """Fault: a weaker source overrules a stronger one, or the origin is not where the value came from."""
    resolved = resolve(flags, environ, file)
    for name, (value, origin) in expected.items():
        assert getattr(resolved, name) == value and origin in (None, resolved.origins[name])
    assert expected or resolved == resolve()


def test_null_in_the_file_is_a_value_where_an_option_may_be_unset():
    """Fault: `limit: null` is refused, or `block_size: null` reaches the engine."""
    assert resolve({}, {}, {"limit": None}).limit is None
    with pytest.raises(UsageError, match=r"c.yaml: block_size is null; expected an integer from 1"):
        resolve({}, {}, {"block_size": None})


@table("sources, sentence", [
    (({}, {}, {"blok_size": 1}), r"c.yaml: blok_size is not an option; did you mean block_size\?"),
    (({}, {"APCBATCH_STOER": "x"}, {}), r"APCBATCH_STOER is not an option .*; did you mean APCBATCH_STORE\?"),
    (({"block_size": "0"}, {}, {}), r"--block-size is '0'; expected an integer from 1"),
    (({"block_size": "1.5"}, {}, {}), r"--block-size is '1.5'; expected an integer from 1"),
    (({}, {}, {"block_size": 1.5}), r"c.yaml: block_size is 1.5; expected an integer"),
    (({}, {}, {"block_size": True}), r"c.yaml: block_size is True; expected an integer"),
    (({"temperature": "nan"}, {}, {}), r"--temperature is 'nan'; expected a number from 0"),
    (({"temperature": "3"}, {}, {}), r"--temperature is '3'; expected a number from 0 up to 2"),
    (({"device": "gpu"}, {}, {}), r"--device is 'gpu'; expected one of auto, cpu, cuda; did you mean cuda\?"),
    (({"top_p": "0"}, {}, {}), r"--top-p is '0'; expected a number above 0 up to 1"),
    (({"seed": str(2**63)}, {}, {}), r"--seed is .*; expected an integer from 0 up to 9223372036854775807"),
    (({"dtype": "float23"}, {}, {}), r"expected one of auto, float32, bfloat16; did you mean float32\?"),
    (({"policy": "planed"}, {}, {}), r"--policy is 'planed'; expected one of"),
    (({"store_size": "20 gibs"}, {}, {}), r"--store-size is '20 gibs'; expected a size such as 20GiB"),
    (({}, {"APCBATCH_STRICT": "maybe"}, {}), r"APCBATCH_STRICT is 'maybe'; expected true or false"),
    (({}, {"APCBATCH_MODEL": ""}, {}), r"APCBATCH_MODEL is ''; expected a text that is not empty"),
    (({"resume": True, "overwrite": True}, {}, {}), r"--resume and --overwrite exclude each other"),
    (({"retry_errors": True, "overwrite": True}, {}, {}), r"--retry-errors and --overwrite exclude each other"),
    (({"store": "d", "no_store": True}, {}, {}), r"--store and --no-store exclude each other"),
    (({"draft": "lookup,histroy"}, {}, {}),
     r"--draft has 'histroy'; expected auto, none, or of recorded, previous, siblings, history, lookup those "
     r"wanted, with commas between; did you mean history\?"),
    (({}, {}, {"draft": "nome"}), r"c.yaml: draft has 'nome'; .*; did you mean none\?"),
    (({}, {"APCBATCH_DRAFT": "lookup,"}, {}), r"APCBATCH_DRAFT has ''; expected auto"),
    (({"draft": "none,lookup"}, {}, {}), r"--draft has none beside another word; give none alone, or sources"),
    (({"draft": "lookup,auto"}, {}, {}), r"--draft has auto beside another word"),
    (({"draft": "none", "draft_from": "o"}, {}, {}),
     r"--draft-from is a source of drafts, and --draft none takes none; leave one of them out"),
    (({"draft_from": "o", "exact": False}, {}, {}),
     r"--draft-from is a source .* --draft auto takes none with --fast; give --draft previous too"),
    (({"draft": "previous"}, {}, {}), r"--draft has previous, and no earlier .*; give --draft-from FILE too"),
    (({"draft": "recorded,lookup", "turns": "rollout"}, {}, {}),
     r"--draft has recorded, and --turns rollout puts generated answers .*; leave recorded out, or give --turns"),
    (({"draft": "lookup", "score": True}, {}, {}),
     r"--score generates nothing, so that --draft has nothing to draft; leave it out"),
    (({"draft_from": "o", "score": True}, {}, {}), r"--score generates .* --draft-from has nothing to draft"),
    (({"draft_from": "s3://b/out.jsonl"}, {}, {}), r"--draft-from is s3://b/out.jsonl; expected a file on this"),
    (({"draft_memory": "64 MiBs"}, {}, {}), r"--draft-memory is '64 MiBs'; expected a size"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_with_a_sentence(sources, sentence):
    """Fault: a typing slip is ignored, and the job runs with a default that nobody asked for."""
    with pytest.raises(UsageError, match=sentence):
        resolve(*sources)


@table("text, size", [
    ("20GiB", 20 << 30), ("1.5 MB", 1_500_000), ("512m", 512 << 20), ("17", 17), (5, 5), ("0.5KiB", 512),
    *((no, None) for no in ("-1", "GiB", "1 GiBs", "", None, True, 1.5)),
])  # fmt: skip
def test_sizes(text, size):
    """Fault: a decimal unit is read as a binary one or the other way round, or nonsense as some number of bytes."""
    assert option_values.parse_size(text) == size
    assert size is None or option_values.parse_size(option_values.format_size(size)) == size


@table("value, found", [
    ("2026-01-05", "2026-01-05"), ("2026-1-5", "2026-01-05"), (date(2026, 1, 5), "2026-01-05"), (None, None),
    ("2026-02-30", ""), ("", ""), ("20260105", ""), ("2026-01-05T00:00", ""), (20260105, ""),
    (datetime(2026, 1, 5), ""),
])  # fmt: skip
def test_a_date_is_a_date(value, found):
    """Fault: a date of a YAML file, which reads it as one, is refused; or what is none reaches a template."""
    if found == "":
        with pytest.raises(UsageError, match="c.yaml: template_date is .*; expected a date, YYYY-MM-DD"):
            resolve({}, {}, {"template_date": value})
    else:
        assert resolve({}, {}, {"template_date": value}).template_date == found


def test_the_file_is_read_and_named_by_the_environment(tmp_path):
    """Fault: APCBATCH_CONFIG is ignored, or an address is a file that is missing."""
    path = tmp_path / "c.yaml"
    path.write_text("block_size: 16\nstore-size: 1MiB\n")
    resolved = resolution.load({}, None, {"APCBATCH_CONFIG": str(path)})
    assert (resolved.block_size, resolved.store_size) == (16, 1 << 20)
    assert resolved.origins["store_size"] == f"{path}: store_size"
    for file, environ in (("s3://b/c", {}), (None, {"APCBATCH_CONFIG": "s3://b/c"})):
        with pytest.raises(UsageError, match="^(--config|APCBATCH_CONFIG) is s3://b/c; expected a file on this"):
            resolution.load({}, file, environ)


def test_the_defaults_satisfy_their_own_specs():
    """Fault: a default that no user could give."""
    for name, value in config.Config().values().items():
        spec = config.OPTIONS[name]
        assert option_values.shown(spec, option_values.parse_value(spec, value, name)) == value


def test_auto_stands_for_null_where_it_is_named() -> None:
    """Catches a word that only one of the flag, a file and the command that continues takes, or one for any option."""
    for raw in ("auto", None):
        assert option_values.parse_value(config.OPTIONS["min_gain_tokens"], raw, "x") is None
    assert option_values.shown(config.OPTIONS["min_gain_tokens"], None) == "auto"
    given = resolution.resolve({"min_gain_tokens": "auto"}, {}, {"min_gain_tokens": 7}, "file")
    assert given.min_gain_tokens is None and given.gain_tokens == 64
    assert command_words(["apcbatch"], ["a"], "b", None, given, [])[-2:] == ["--min-gain-tokens", "auto"]
    for name in ("block_size", "limit"):
        with pytest.raises(ValueError, match="x is 'auto'; expected an integer from"):
            option_values.parse_value(config.OPTIONS[name], "auto", "x")


def test_an_option_may_come_several_times():
    """Fault: of several stop texts the last one alone counts, or one alone is taken for its letters."""
    spec = config.OPTIONS["stop"]
    assert option_values.parse_value(spec, ("b", "a", "b"), "--stop") == ("b", "a")
    assert option_values.parse_value(spec, "ab", "--stop") == ("ab",)
    assert option_values.parse_value(config.OPTIONS["stop_token_id"], ["5", 7], "x") == (5, 7)
    for raw, sentence in (
        (["x", ""], "--stop is ''; expected a text"),
        (["x"] * 65, "--stop has 65 values; expected at most 64"),
        ("x" * 1025, "--stop has 1,025 characters; expected at most 1,024"),
        ([["x"]], "--stop is a list; expected a text"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            option_values.parse_value(spec, raw, "--stop")


@table("flags, sources", [
    ({}, "recorded siblings history lookup"),
    ({"draft_from": "file:///o.jsonl"}, "recorded previous siblings history lookup"),
    ({"turns": "last", "draft": "auto"}, "recorded siblings history lookup"),
    ({"turns": "rollout"}, "siblings history lookup"),
    ({"turns": "rollout", "draft_from": "o"}, "previous siblings history lookup"),
    ({"draft": "none"}, ""), ({"draft": "none", "score": True}, ""), ({"score": True}, ""), ({"exact": False}, ""),
    ({"exact": False, "draft": "lookup"}, "lookup"),
    ({"exact": False, "draft": "previous", "draft_from": "o"}, "previous"),
    ({"draft": " lookup , siblings,lookup"}, "siblings lookup"),
    ({"draft": "lookup", "draft_from": "o"}, "previous lookup"),
])  # fmt: skip
def test_the_sources_of_drafts_are_those_that_apply(flags, sources):
    """Fault: auto leaves out a source, or has one that no request of the run has; or --draft-from is not read."""
    assert " ".join(draft_sources(resolve(flags))) == sources


NAMED = """
tensor_parallel_size tp pipeline_parallel_size data_parallel_size max_num_seqs max_num_batched_tokens
max_model_len gpu_memory_utilization enable_prefix_caching served_model_name lora_path quantization
kv_cache_dtype trust_remote_code tokenizer revision download_dir api_key host port batch_size max_new_tokens
do_sample num_beams torch_dtype device_map load_in_4bit
"""


@table("name", {*NAMED.split(), *FOREIGN_OPTIONS})
def test_options_of_other_tools_are_answered_by_name(name, capsys):
    """Fault: who comes from another tool is sent to an option of a near name and another meaning."""
    flag = f"-{name}" if len(name) == 2 else f"--{name.replace('_', '-')}"
    words = set(re.findall("{([a-z_]+)}", FOREIGN_OPTIONS[name]))
    assert words <= {*config.OPTIONS} and name not in config.OPTIONS
    for arguments in ([flag, "2"], [f"{flag}=2"]):
        assert main(["run", "x", *arguments]) == 2
        error = capsys.readouterr().err
        assert f"{flag} is not an option; " in error and "did you mean" not in error and "{" not in error
        assert all(config.flag_name(word) in error for word in words)
    with pytest.raises(UsageError, match=f"LLM: {name} is not an option; ") as raised:
        LLM(**{name: 2})
    assert "--" not in str(raised.value).replace("hf download --revision", "")


@table("name", FOREIGN_COMMANDS)
def test_commands_of_other_tools_are_answered_by_name(name, capsys):
    """Fault: `apcbatch serve` is no command, and nothing says which one is meant."""
    assert main([name, "model"]) == 2
    assert f"{name} is not a command of apcbatch; {FOREIGN_COMMANDS[name]}" in capsys.readouterr().err


@table(
    "page",
    [
        "https://huggingface.co/{}org/name-1.5",
        "huggingface.co/{}org/name-1.5/tree/main",
        "http://hf.co/{}org/name-1.5?a=b",
    ],
)
def test_pages_of_the_hub_name_what_to_give(page, capsys):
    """Fault: the address of a page is read as a file, or is no file of this machine, and nothing says what to give."""
    for arguments in (["plan", page.format("datasets/")], ["plan", "x", "--model", page.format("")]):
        assert main(arguments) == 2
        assert "is a page of the Hugging Face Hub; give hf:org/name-1.5\n" in capsys.readouterr().err
    assert not hub_page("https://huggingface.co/datasets/org/name/resolve/main/x.jsonl")
    with pytest.raises(ModelError, match="'org/name' is neither a folder nor in the Hugging Face cache"):
        locate_model("hf:org/name")
