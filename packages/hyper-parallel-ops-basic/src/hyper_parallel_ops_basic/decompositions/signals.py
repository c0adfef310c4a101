"""Functions of samples in time and of observations, in terms of others; see :mod:`.composed`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Replicate
from hyper_parallel_ops_basic.decompositions.composed import plain_like

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
    if window is not None or width < n_fft:
        window = _window_of(input, window, width, n_fft)
    if center:
        rows = input.reshape(1, *(input.shape if input.ndim == 2 else (1, -1)))
        input = F.pad(rows, (n_fft // 2,) * 2, pad_mode).reshape(*input.shape[:-1], -1)
    frames = input.unfold(-1, n_fft, hop)
    frames = frames if window is None else frames * window
    real = not frames.is_complex() and onesided is not False
    out = (torch.fft.rfft if real else torch.fft.fft)(frames, dim=-1).transpose(-1, -2)
    out = out / math.sqrt(n_fft) if normalized else out
    return out if return_complex is not False else torch.view_as_real(out.contiguous())


def istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """The frames, overlapping, added up, and divided by the sum of their squared windows."""
    hop = hop_length or n_fft // 4
    count, real = input.shape[-1], onesided is not False and not return_complex
    window = _window_of(input, window, win_length or n_fft, n_fft)
    spectra = input.reshape(-1, *input.shape[-2:]).transpose(-1, -2)
    frames = torch.fft.irfft(spectra, n_fft, dim=-1) if real else torch.fft.ifft(spectra, n_fft, dim=-1)
    frames = frames if real or return_complex else frames.real
    frames = frames * math.sqrt(n_fft) if normalized else frames
    total = n_fft + hop * (count - 1)
    start = n_fft // 2 if center else 0
    end = total - start if length is None else start + length
    wave = _overlapped(frames * window, total, hop)[..., start:end]
    weight = _overlapped((window * window).expand(1, count, n_fft), total, hop)[..., start:end]
    if not bool((weight.abs() > 1e-11).all()):
        least = weight.abs().min().item()
        raise RuntimeError(f"istft: the windows leave samples that no frame covers (window overlap add min: {least:g})")
    wave = F.pad(wave / weight, (0, max(end - total, 0)))
    return wave.reshape(*input.shape[:-2], -1)


def _overlapped(frames: Tensor, total: int, hop: int) -> Tensor:
    """``[batch, total]`` from ``[batch, frames, samples]`` that begin ``hop`` apart."""
    if frames.is_complex():
        return torch.complex(_overlapped(frames.real, total, hop), _overlapped(frames.imag, total, hop))
    columns = frames.transpose(-1, -2)
    return F.fold(columns, (1, total), (1, frames.shape[-1]), stride=(1, hop)).reshape(-1, total)


def _window_of(input: Tensor, window: Tensor | None, width: int, n_fft: int) -> Tensor:
    """The window, of ones where none was given, in the middle of ``n_fft`` samples."""
    if window is None:
        window = plain_like(input, torch.ones(width, dtype=input.real.dtype, device=input.device))
    before = (n_fft - width) // 2
    return F.pad(window, (before, n_fft - width - before))


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
    right = _all_variables((centred if weights is None else centred * weights).t().conj())
    return (centred @ right / (count.clamp_min(0) if isinstance(count, Tensor) else max(count, 0))).squeeze()


def _all_variables(x: Tensor) -> Tensor:
    """``[observations, variables]`` with all variables on every rank: each is compared with all."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(x.layout.with_placements(dict.fromkeys(x.layout.shard_order[1], Replicate())))


def corrcoef(input: Tensor) -> Tensor:
    c = cov(input)
    if c.ndim == 0:
        return c / c
    scale = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / scale.unsqueeze(1) / scale.unsqueeze(0)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)
