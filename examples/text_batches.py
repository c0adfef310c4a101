"""Batches of byte-level tokens from a text file: a token is a byte, so there is no tokenizer to train or ship."""

from __future__ import annotations

from pathlib import Path

import torch

VOCAB_SIZE = 256


class TextBatches:
    """Random windows of a text. The batch of a step depends on the seed and the step only.

    So every rank, a resumed run and the one-rank reference run see the same data without exchanging any.
    """

    def __init__(self, path: Path, *, batch_size: int, length: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        if len(self.text) < length:
            raise ValueError(f"{path} has {len(self.text)} bytes, fewer than one sequence of {length}")
        self.batch_size, self.length, self.seed = batch_size, length, seed

    def rows(self, step: int, part: int = 0, parts: int = 1) -> torch.Tensor:
        """Token ids of one step, int64, on the CPU: of its ``batch_size`` sequences those of data rank ``part``.

        Each data rank reads its own windows of the text; together they are what one rank reads.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.length + 1, (self.batch_size, 1), generator=generator)
        mine = starts.tensor_split(parts)[part]
        return self.text[mine + torch.arange(self.length)].long()
