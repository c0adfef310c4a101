"""What flash attention computes, written out: the definition behind the stand-ins of its packages."""

import itertools

import torch
import torch.nn.functional as F


def attention(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, dropout=0.0):
    """``[batch, queries, heads, E]``, the last query beside the last key: the output and the logarithms of the sums
    ``[batch, heads, queries]``.

    As kernels do, it takes plain tensors only, no empty batch and no empty heads, and whole groups of heads.
    """
    assert {type(x) for x in (q, k, v)} == {torch.Tensor}, "a kernel knows nothing of DTensors"
    assert 0 not in (q.shape[0], q.shape[2], k.shape[2]), q.shape
    assert q.shape[2] % k.shape[2] == 0, (q.shape, k.shape)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[-2:]
    distance = torch.arange(columns, device=q.device) - (
        torch.arange(rows, device=q.device).unsqueeze(1) + columns - rows
    )
    if slopes is not None:
        scores = scores - slopes[..., None, None] * distance.abs()
    before, behind = window[0], 0 if causal else window[1]
    unseen = torch.zeros_like(distance, dtype=torch.bool)
    if before >= 0:
        unseen |= distance < -before
    if behind >= 0:
        unseen |= distance > behind
    scores = scores.masked_fill(unseen, -torch.inf)
    blind = unseen.all(-1, keepdim=True)  # such a row gives zeros
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    sums = scores.detach().logsumexp(-1).float()
    return (F.dropout(weights, dropout) @ v).transpose(1, 2).contiguous(), sums


def packed_attention(q, k, v, starts_q, starts_k, **options):
    """The same for sequences packed in one dim, ``[tokens, heads, E]``; the sums are ``[heads, tokens]``."""
    slopes = options.pop("slopes", None)
    pieces = []
    for i, (rows, columns) in enumerate(zip(_ranges(starts_q), _ranges(starts_k), strict=True)):
        own = slopes[i : i + 1] if slopes is not None and slopes.ndim == 2 else slopes
        out, sums = attention(q[None, rows], k[None, columns], v[None, columns], slopes=own, **options)
        pieces.append((out[0], sums[0]))
    rest = q.shape[0] - int(starts_q[-1])  # tokens of no sequence
    out = F.pad(torch.cat([out for out, _ in pieces]), (0, 0, 0, 0, 0, rest))
    return out, F.pad(torch.cat([sums for _, sums in pieces], 1), (0, rest))


def _ranges(starts):
    numbers = starts.tolist()
    return [slice(a, b) for a, b in itertools.pairwise(numbers)]


def gradients(function, inputs, grad):
    """Of ``function(*inputs)[0]`` with respect to the inputs."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*inputs)[0], inputs, grad)
