"""The audio front end, in plain torch: 30 s of sound to 120 tokens of 128 numbers.

Windows of 1 s begin every 0.25 s, from 0 to 29.75 s; what lies beyond the end of the clip is silence. Each window
becomes the mean and the deviation over time of 64 log-mel bands:

    power spectrum of frames of 25 ms (Hann) every 10 ms → 64 triangular filters from 125 to 7500 Hz → ln(energy + 0.01)

that is the spectrogram that VGGish and YAMNet start from; mean and deviation stand where they have a network. Filters
follow the sampling rate of the file, so nothing is resampled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOKENS, BANDS = 120, 64
WINDOW, HOP = 1.0, 0.25  # seconds
FRAME, FRAME_HOP = 0.025, 0.010  # seconds
LOWEST, HIGHEST = 125.0, 7500.0  # Hz
OFFSET = 0.01
VERSION = 1
"""Enters the name of cached features: count it up when any of this changes."""


def mel(hertz: float) -> float:
    return 1127 * math.log(1 + hertz / 700)


def mel_filters(rate: int, size: int) -> Tensor:
    """Triangles that are equally wide in mel, (size // 2 + 1, BANDS)."""
    corners = torch.linspace(mel(LOWEST), mel(HIGHEST), BANDS + 2, dtype=torch.float64)
    at = 1127 * torch.log1p(torch.arange(size // 2 + 1, dtype=torch.float64) * rate / size / 700)
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising = (at[:, None] - low) / (middle - low)
    falling = (high - at[:, None]) / (high - middle)
    return torch.minimum(rising, falling).clamp(min=0).float()


def log_mel(samples: Tensor, rate: int) -> Tensor:
    """Samples from −1 to 1 to log-mel frames (frames, BANDS), one every 10 ms."""
    length, hop = round(FRAME * rate), round(FRAME_HOP * rate)
    size = 1 << (length - 1).bit_length()
    frames = samples.unfold(0, length, hop) * torch.hann_window(length)
    power = torch.fft.rfft(frames, size).abs().square()
    return torch.log(power @ mel_filters(rate, size) + OFFSET)


def tokens(samples: Tensor, rate: int) -> Tensor:
    """One channel of samples to float32 (TOKENS, 2 · BANDS); a longer clip is cut, a shorter one ends in silence."""
    whole = round(((TOKENS - 1) * HOP + WINDOW) * rate) + round((FRAME + FRAME_HOP) * rate)
    padded = torch.nn.functional.pad(samples[: round(TOKENS * HOP * rate)].float(), (0, whole))[:whole]
    frames = log_mel(padded, rate)
    per_second = rate / round(FRAME_HOP * rate)
    starts = (torch.arange(TOKENS) * HOP * per_second).round().long()
    windows = frames[starts[:, None] + torch.arange(int((WINDOW - FRAME) * per_second) + 1)]
    return torch.cat([windows.mean(1), windows.std(1, correction=0)], dim=1)
