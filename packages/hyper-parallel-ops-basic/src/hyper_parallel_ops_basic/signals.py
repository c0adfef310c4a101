"""Functions of samples in time and of observations, in terms of others; see :mod:`.composed`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .composed import plain_like

Tensor = torch.Tensor


def stft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    if return_complex is None and not input.is_complex():
        raise RuntimeError("stft requires the return_complex parameter be given for real inputs")
    if align_to_window:
        raise NotImplementedError("stft of a DTensor has no rule for align_to_window: pad the input instead")
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    if window is None and width < n_fft:
        window = plain_like(input, torch.ones(width, dtype=input.real.dtype, device=input.device))
    if window is not None and width < n_fft:
        before = (n_fft - width) // 2
        window = F.pad(window, (before, n_fft - width - before))
    if center:
        rows = input.reshape(1, *(input.shape if input.ndim == 2 else (1, -1)))
        input = F.pad(rows, (n_fft // 2,) * 2, pad_mode).reshape(*input.shape[:-1], -1)
    frames = input.unfold(-1, n_fft, hop)
    frames = frames if window is None else frames * window
    real = not frames.is_complex() and onesided is not False
    out = (torch.fft.rfft if real else torch.fft.fft)(frames, dim=-1).transpose(-1, -2)
    out = out / math.sqrt(n_fft) if normalized else out
    return out if return_complex is not False else torch.view_as_real(out.contiguous())


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    x = input if input.ndim == 2 else input.reshape(1, -1)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total = x.shape[1] if weights is None else weights.sum()
    centred = x - (x if weights is None else x * weights).sum(1, keepdim=True) / total
    if aweights is None or not correction:
        count = total - correction
    else:
        assert weights is not None
        count = total - correction * (weights * aweights).sum() / total
    right = (centred if weights is None else centred * weights).t().conj()
    return (centred @ right / (count.clamp_min(0) if isinstance(count, Tensor) else max(count, 0))).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    c = cov(input)
    if c.ndim == 0:
        return c / c
    scale = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / scale.unsqueeze(1) / scale.unsqueeze(0)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)
