"""Sequences of different lengths: padded to one batch, and folded by segments."""

import torch
from torch.nn.utils.rnn import pad_sequence

from hyper_parallel.testing import OpConformance, sample, tensor


class Few(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 10


class TestPadSequence(Few):
    op = pad_sequence
    samples = (
        sample([tensor(5, 2), tensor(3, 2), tensor(1, 2)], batch_first=True),
        sample([tensor(4), tensor(2)], padding_value=-1.0, padding_side="left"),
    )


class TestSegmentReduce(Few):
    op = torch.segment_reduce
    samples = (
        sample(tensor(5, 6), "sum", lengths=torch.tensor([2, 0, 3])),
        sample(tensor(5, 3, 2), "mean", lengths=torch.tensor([[1, 2]] * 5), axis=1),
        sample(tensor(5, 3), "sum", lengths=torch.tensor([[1, 2]] * 5), axis=-1),
        sample(tensor(5, 6), "max", offsets=torch.tensor([0, 2, 5])),
    )
