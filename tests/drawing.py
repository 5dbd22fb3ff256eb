"""Draws by kernels beside their twins, on whatever device the tensors are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lmhead import candidates
from lmhead.kernels import sample as kernels
from lmhead.kernels.config import GemmConfig
from lmhead.sampling import Form, Records, Request


@dataclass
class Draw:
    """Logits [T, V] cut into shards of S columns, and the rows' records."""

    partials: list[torch.Tensor]
    records: Records
    vocab: int

    @property
    def form(self) -> Form:
        return self.records.form

    @property
    def shard(self) -> int:
        return self.partials[0].shape[1]

    def held(self, rank: int) -> int:
        return max(0, min(self.shard, self.vocab - rank * self.shard))

    def layout(self) -> kernels.Messages:
        parts = self.form.slices()
        return kernels.Messages(
            self.form.record_words,
            self.form.message_words,
            self.form.candidates,
            parts["lse"].start if self.form.logprobs else -1,
            parts["mass"].start if self.form.by_mass else -1,
            self.form.noisy,
        )

    def fresh(self) -> torch.Tensor:
        """Messages [N, T, words], poisoned."""
        shape = len(self.partials), self.partials[0].shape[0], self.form.message_words
        return torch.full(shape, 0x7FC00000, dtype=torch.int32, device=self.partials[0].device)

    def by_twin(self) -> torch.Tensor:
        out = self.fresh()
        for rank, partial in enumerate(self.partials):
            candidates.reduce(partial, rank * self.shard, self.vocab, self.records, None, out[rank])
        return out

    def by_kernels(self) -> torch.Tensor:
        out = self.fresh()
        for rank, partial in enumerate(self.partials):
            where = {"first": rank * self.shard, "held": self.held(rank)}
            shape = kernels.summary_shape(partial.shape[0], self.held(rank))
            summary = torch.full(shape, torch.nan, device=partial.device)
            kernels.scan(partial, self.records.words, summary, self.layout(), **where)
            self.pick(summary, partial, out[rank], rank, kernels.SCAN_COLUMNS)
        return out

    def pick(
        self,
        summary: torch.Tensor,
        partial: torch.Tensor,
        out: torch.Tensor,
        rank: int,
        block_v: int,
    ) -> None:
        first, held = rank * self.shard, self.held(rank)
        words, layout, parts = self.records.words, self.layout(), self.form.slices()
        kernels.pick(summary, partial, words, out, layout, first=first, held=held, block_v=block_v)
        if self.form.top_sent:
            kernels.pick(
                summary,
                partial,
                words,
                out,
                kernels.Messages(layout.words, layout.width, self.form.top_sent),
                first=first,
                held=held,
                block_v=block_v,
                values_at=parts["top_values"].start,
                plain=True,
            )

    def check(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Messages are equal: candidates bit for bit, sums to the last bits of fp32."""
        parts = self.form.slices()

        def floats(messages: torch.Tensor, name: str) -> torch.Tensor:
            return messages[:, :, parts[name]].contiguous().view(torch.float32)

        heads = got[:, :, parts["ids"].start], want[:, :, parts["ids"].start]
        nan = heads[1] == candidates.NAN_SEEN
        assert torch.equal(heads[0] == candidates.NAN_SEEN, nan)
        for values, ids in (("values", "ids"), ("top_values", "top_ids")):
            there = want[:, :, parts[ids]][~nan]
            assert torch.equal(got[:, :, parts[ids]][~nan], there)
            a, b = floats(got, values)[~nan], floats(want, values)[~nan]
            assert torch.equal(a[there >= 0], b[there >= 0])
        warm = ~nan & ~self.records.greedy
        for name, rows in (("lse", ~nan), ("mass", warm)):
            a, b = floats(got, name)[rows], floats(want, name)[rows]
            torch.testing.assert_close(a, b, rtol=2e-6, atol=0)

    def check_merged(self, messages: torch.Tensor) -> candidates.Merged:
        """The kernel's tokens and log-probabilities are the twin's."""
        want = candidates.merge(messages, self.records, self.shard, self.vocab)
        got = candidates.merge(messages, self.records, self.shard, self.vocab, kernels.merge)
        for name in ("ids", "status", "asked_logprobs", "top_ids"):
            a, b = getattr(got, name), getattr(want, name)
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
        for name in ("logprobs", "top_logprobs"):
            a, b = getattr(got, name), getattr(want, name)
            assert (a is None) == (b is None)
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        return got


def draw(logits: torch.Tensor, ranks: int, **parameters: Any) -> Draw:
    """logits [T, V] -> the draw on `ranks` shards, whose padding would win if it counted."""
    rows, vocab = logits.shape
    shard = -(-vocab // ranks)
    padded = torch.nn.functional.pad(logits, (0, ranks * shard - vocab), value=1e30)
    request = Request(**parameters)
    form = request.form(vocab, shard)
    request.check(rows, vocab, logits.device, True)
    unseeded = torch.arange(rows, device=logits.device), torch.arange(rows, device=logits.device)
    records = request.records(rows, form, vocab, logits.device, unseeded)
    partials = [part.contiguous() for part in padded.split(shard, dim=1)]
    return Draw(partials, records, vocab)


def fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    drawn: Draw,
    rank: int,
    partial: torch.Tensor,
    config: GemmConfig,
    *,
    write: bool,
    softcap: float | None = None,
) -> torch.Tensor:
    """The summary that a GEMM of `config` makes of its own tiles."""
    shape = kernels.summary_shape(hidden.shape[0], weight.shape[0], config.block_v)
    summary = torch.full(shape, torch.nan, device=hidden.device)
    kernels.fused(
        hidden,
        weight,
        bias,
        drawn.records.words,
        summary,
        drawn.layout(),
        first=rank * drawn.shard,
        held=drawn.held(rank),
        scale=0.5,
        softcap=softcap,
        partial=partial,
        write=write,
        config=config,
    )
    return summary
