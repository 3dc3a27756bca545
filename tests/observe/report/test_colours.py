"""The page's colours: curves can be distinguished by colour-blind readers and have enough contrast."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import megatron_stppo

CSS = (Path(megatron_stppo.__file__).parent / "observe/report" / "page.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in CSS.split("@media", 2)[:2])
# Linear RGB as seen without red, green or blue cones: Machado, Oliveira, Fernandes 2009, severity 1.
EYES = [
    np.eye(3),
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
]
# Linear RGB to OKLab, where equal distances look about equal: Ottosson 2020.
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2. Example: black on white has 21."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (one, other))
    return high / low


def seen(colour: str, eye: object) -> np.ndarray:
    return np.asarray(LAB @ np.cbrt(CONES @ np.clip(np.asarray(eye) @ linear(colour), 0, 1)))


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_curves_differ_for_every_kind_of_colour_vision(scheme: dict[str, str]) -> None:
    """0.09 is about the distance between greys of 50 % and 60 %."""
    curves = [colour for name, colour in scheme.items() if re.fullmatch(r"c\d", name)]
    assert len(curves) == 8
    for one, other in [*itertools.combinations(curves, 2), (scheme["up"], scheme["down"])]:
        apart = [float(np.linalg.norm(seen(one, eye) - seen(other, eye))) for eye in EYES]
        assert min(apart) > 0.09, (one, other, apart)


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_text_and_curves_have_contrast_with_the_background(scheme: dict[str, str]) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for name, colour in scheme.items():
        wanted = 4.5 if name in {"ink", "dim", "link", "bad", "good"} else 3.0
        if re.fullmatch(r"c\d|ink|dim|link|bad|good", name):
            worst = min(contrast(colour, scheme[ground]) for ground in ("paper", "panel"))
            assert worst >= wanted, (name, colour, worst)
