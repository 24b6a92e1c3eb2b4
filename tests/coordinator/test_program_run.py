"""`splitspec run --program`: text in, the target's own text out, through a real child process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coordinator.program_run import ProgramRun, refuse_flags, statistics_line
from coordinator.text import ModelText
from splitspec.errors import UserError
from tests.eagle3_copy import write_copy_head, write_copy_target
from tests.graph_runtime.programs.speculators import CHUNK, export, greedy
from tests.tiny import write_tiny_model

pytest.importorskip("executorch")
ROOT = Path(__file__).parents[2]
QUESTION = "the and then some"
CHAT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_copy_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_copy_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def program(model: Path, head: Path, program_cache: Path) -> Path:
    return export(model, head, program_cache)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def splitspec(*arguments: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coordinator.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
        **settings,
    )


def answer(tokenizer: Tokenizer, model: Path, prompt: str, count: int) -> tuple[list[int], str]:
    """Return the target's own answer: its tokens up to the end token, and its text."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    said = greedy(model, ids, count)
    end = said.index(IM_END) + 1 if IM_END in said else count
    return said[:end], tokenizer.decode(said[:end])


def test_a_chat_is_answered_with_the_target_s_text_and_a_statistics_line(
    program: Path, model: Path, tokenizer: Tokenizer
) -> None:
    ids, text = answer(tokenizer, model, CHAT, 13)
    done = splitspec("run", "--program", program, "--model", model, "--max-tokens", 13, QUESTION)
    assert (done.returncode, done.stdout) == (0, f"{text}\n"), done.stderr
    assert re.fullmatch(
        rf"tokens {len(ids)}  tau [\d.]+  [\d.]+ tok/s  first token \d+ ms  draft eagle3  "
        r"rounds \d+  accepted \d+/\d+ \(\d+ %\)  verify [\d.]+ ms a round  "
        r"draft [\d.]+ ms a round  finish (stop|length)\n",
        done.stderr,
    ), done.stderr


def test_raw_text_a_shorter_chain_and_stop_ids(
    program: Path, model: Path, tokenizer: Tokenizer
) -> None:
    ids, _ = answer(tokenizer, model, QUESTION, 12)
    end = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    flags = ("--program", program, "--model", model, "--chain", 1, "--stop-ids", f"299,{ids[end]}")
    done = splitspec("run", *flags, "--raw", "-", input=QUESTION)
    # The stop token is no part of the text.
    assert (done.returncode, done.stdout) == (0, tokenizer.decode(ids[:end]) + "\n"), done.stderr
    assert f"tokens {end + 1}  " in done.stderr
    assert "finish stop" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-tokens", 0), "invalid value for '--max-tokens'"),
        (("--chain", 4), "chain is 4; the program takes 1 to 3"),
        (("--bos-id", 300), "token id 300 of the prompt is not in 0..299"),
        (("--stop-token", "two tokens"), "--stop-token 'two tokens' is "),
        (("--stop-ids", "1;2"), "--stop-ids '1;2': expected token ids"),
        (("--stop-ids", "9" * 5000), "--stop-ids '999"),
        (("--draft", "ngram"), "--draft does not go with --program"),
        (("--temperature", 0), "--temperature does not go with --program"),
        (("--compare",), "--compare does not go with --program"),
        (("--raw", "--chat-prefix", "x"), "--chat-prefix and --chat-suffix do not go with --raw"),
    ],
)
def test_a_user_s_mistake_is_one_line_and_nothing_is_answered(
    flags: tuple[object, ...], message: str, program: Path, model: Path
) -> None:
    done = splitspec("run", "--program", program, "--model", model, *flags, QUESTION)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_e11_a_prompt_that_one_prefill_cannot_take_is_one_line(program: Path, model: Path) -> None:
    done = splitspec("run", "--program", program, "--model", model, "--raw", "xy " * CHUNK)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"the program takes 2 to {CHUNK}\n" in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_model_s_tokenizer_is_refused_with_both_hashes(
    program: Path, model: Path, tmp_path: Path
) -> None:
    other = write_tiny_model(tmp_path / "other", vocab_size=290)
    done = splitspec("run", "--program", program, "--model", other, QUESTION)
    assert (done.returncode, done.stdout) == (2, "")
    for folder in (model, other):
        assert ModelText.load(folder).tokenizer_hash in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"", b"no program" * 100])
def test_a_file_that_is_no_program_is_one_line(
    content: bytes | None, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.pte"
    if content is not None:
        path.write_bytes(content)
    done = splitspec("run", "--program", path, "--model", model, QUESTION)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert str(path) in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_flags_of_a_program_need_one_and_others_have_none() -> None:
    own = ("chat_prefix", "chat_suffix", "stop_ids", "stop_token", "bos_id", "chain")
    for name in own:
        refuse_flags([name, "program"], with_program=True)
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} goes with --program only"):
            refuse_flags(["model", name], with_program=False)
    for name in ("model", "max_tokens", "chat", "system", "threads", "cache_dir"):
        refuse_flags([name], with_program=True)
        refuse_flags([name], with_program=False)
    for name in ("draft", "draft_count", "seed", "stop", "runtime", "precision", "trace_file"):
        refuse_flags([name], with_program=False)
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')} does not go with"):
            refuse_flags([name], with_program=True)


def asked(model: Path, **settings: Any) -> ProgramRun:
    return ProgramRun(
        **{
            "program": Path("x.pte"),
            "prompt": QUESTION,
            "model": str(model),
            "max_tokens": 8,
            "cache_dir": model,
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("settings", "written", "first"),
    [
        ({}, CHAT, []),
        ({"system": "be brief"}, f"<|im_start|>system\nbe brief<|im_end|>\n{CHAT}", []),
        ({"chat": False}, QUESTION, []),
        ({"chat_prefix": "A<|im_end|>", "chat_suffix": "Z"}, f"A<|im_end|>{QUESTION}Z", []),
        ({"chat_suffix": "Z"}, f"{QUESTION}Z", []),
        ({"chat": False, "bos_id": IM_START}, QUESTION, [IM_START]),
        ({"chat": False, "bos_id": 0}, QUESTION, [0]),
        ({"chat_prefix": "", "bos_id": -1}, QUESTION, []),
        ({"bos_id": 0}, CHAT, [0]),
        ({"bos_id": IM_START}, CHAT, []),  # the template has written it
        ({"bos_id": -1}, CHAT, []),
    ],
)
def test_the_prompt_is_framed_as_the_flags_say(
    settings: dict[str, Any], written: str, first: list[int], model: Path, tokenizer: Tokenizer
) -> None:
    ids = asked(model, **settings).prompt_ids(ModelText.load(model))
    assert ids == first + tokenizer.encode(written, add_special_tokens=False).ids


def test_a_tokenizer_s_own_first_token_is_left_out_on_demand(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer))
    text = ModelText.load(folder)
    raw = text.encode(QUESTION, add_special_tokens=False)
    assert asked(folder, chat=False).prompt_ids(text) == [1, *raw]
    assert asked(folder, chat=False, bos_id=-1).prompt_ids(text) == raw
    assert asked(folder, chat=False, bos_id=5).prompt_ids(text) == [5, *raw]
    assert asked(folder, chat_prefix="").prompt_ids(text) == [1, *raw]


def test_stop_tokens_are_the_model_s_own_unless_they_are_given(model: Path) -> None:
    text = ModelText.load(model)
    assert asked(model).stop_token_ids(text) == {IM_END}
    assert asked(model, stop_ids="1, 50,106").stop_token_ids(text) == {1, 50, 106}
    assert asked(model, stop_ids="").stop_token_ids(text) == frozenset()
    more = asked(model, stop_token=("<|endoftext|>", "<|im_start|>"))
    assert more.stop_token_ids(text) == {0, 1, IM_END}


@pytest.mark.parametrize("settings", [{"prompt": " "}, {"system": "x", "chat_prefix": "y"}])
def test_what_cannot_be_asked_is_refused_at_once(settings: dict[str, Any], model: Path) -> None:
    with pytest.raises(UserError, match=r"prompt is empty|--system goes with"):
        asked(model, **settings)


def test_e21_an_answer_without_rounds_has_a_statistics_line_too() -> None:
    seconds = dict.fromkeys(("prefill", "target_verify", "draft_decode"), 0.0)
    told = {"emitted": 1, "rounds": 0, "drafted": 0, "accepted": 0, "tau": 0.0, "finish": "stop"}
    line = statistics_line({**told, "seconds": seconds}, [10.0, 10.25])
    assert line == "tokens 1  0.0 tok/s  first token 250 ms  draft eagle3  rounds 0  finish stop"


def test_the_export_verb_prints_where_the_copy_is(
    program: Path, model: Path, head: Path, program_cache: Path, tmp_path: Path
) -> None:
    precision = ("--precision", "fp32", "--draft-precision", "fp32")
    limits = ("--max-context-length", 80, "--max-prefill-chunk", CHUNK)
    flags = ("--model", model, "--draft-model", head, *precision, *limits)
    verb = ("export", "speculator", *flags, "--cache-dir", program_cache)
    output = tmp_path / "copy.pte"
    done = splitspec(*verb, "--output", output)
    assert (done.returncode, done.stdout) == (0, f"{output}\n"), done.stderr
    assert output.read_bytes() == program.read_bytes()
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    assert output.with_suffix(".sha256").read_text() == digest
    assert splitspec(*verb).stdout == f"{program}\n"
    wrong = splitspec(*verb, "--chain", 8)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: chain is 8; expected 1 to 7")
    assert wrong.stderr.count("\n") == 1


@pytest.fixture
def copy(program: Path, tmp_path: Path) -> Path:
    """Return a copy of the program, without its digest."""
    path = tmp_path / "copy.pte"
    path.write_bytes(program.read_bytes())
    return path


def test_a_damaged_copy_is_refused_by_the_digest_beside_it(
    copy: Path, program: Path, model: Path
) -> None:
    data = bytearray(copy.read_bytes())
    data[-len(data) // 4] ^= 1  # a weight: nothing but the digest tells
    copy.write_bytes(data)
    copy.with_suffix(".sha256").write_text(program.with_suffix(".sha256").read_text())
    done = splitspec("run", "--program", copy, "--model", model, QUESTION)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"program {copy} is corrupt or truncated" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_damaged_program_in_the_cache_is_not_handed_out(
    program: Path, model: Path, head: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (cache / "programs").mkdir(parents=True)
    path = cache / "programs" / program.name
    path.write_bytes(program.read_bytes()[:-1])
    output = tmp_path / "out.pte"
    precision = ("--precision", "fp32", "--draft-precision", "fp32")
    limits = ("--max-context-length", 80, "--max-prefill-chunk", CHUNK)
    flags = ("--model", model, "--draft-model", head, *precision, *limits)
    verb = ("export", "speculator", *flags, "--cache-dir", cache, "--output", output)
    for digest, said in ((None, "has no digest beside it"), ("0" * 64, "is corrupt or truncated")):
        if digest is not None:
            path.with_suffix(".sha256").write_text(digest)
        done = splitspec(*verb)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert f"program {path} {said}" in done.stderr
        assert "delete it to export it again" in done.stderr
        assert not output.exists()


@pytest.mark.parametrize("request_line", ["x", "{}", '{"token_ids": ["a"], "max_tokens": 1}'])
def test_a_line_that_is_no_request_is_refused(request_line: str, program: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "graph_runtime", "speculate", str(program)],
        input=f"{request_line}\n",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the request is no JSON object with token_ids")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_program_s_process_ends_with_the_command(
    number: signal.Signals, program: Path, model: Path, tmp_path: Path
) -> None:
    link = tmp_path / "mine.pte"  # a name of our own, to know the process by
    link.symlink_to(program)
    flags = ["--program", str(link), "--model", str(model), QUESTION]
    with subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "run", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    ) as command:
        _wait_until(lambda: len(_processes_of(link)) == 2)
        os.kill(command.pid, number)
        command.wait(30)
        assert command.stderr is not None
        assert b"Traceback" not in command.stderr.read()
    _wait_until(lambda: not _processes_of(link))


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _processes_of(path: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if str(path) in line:
            found.append(line)
    return found
