"""Profile files: the figures of one kind of instance, each with where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from farfill.core.errors import ConfigError
from farfill.planner.curves import Curve, QuadraticCurve, fit_quadratic
from farfill.planner.inputs import Section, read_input, refuse
from farfill.planner.profile import DecodePoint, Profile, batch_speedup, curve_through


class PrefillFigure(Section):
    tokens: int = Field(ge=1, examples=[8192], description="Length of each prompt.")
    seconds: float = Field(gt=0, examples=[0.72], description="From the start of prefill to its end.")
    batch: int = Field(default=1, ge=1, description="Prompts prefilled together.")
    source: str = Field(default="", description="Where this figure comes from, when other than the file's source.")


class PrefillFormula(Section):
    fixed_s: float = Field(ge=0, examples=[0.4], description="Seconds that do not depend on the length.")
    per_token_s: float = Field(ge=0, examples=[0.00003], description="Seconds per token.")
    per_token_squared_s: float = Field(default=0.0, ge=0, description="Seconds per token squared: attention.")
    source: str = Field(min_length=1, examples=["fitted to …"], description="Where it comes from.")


class DecodeFigure(Section):
    batch: int = Field(ge=1, examples=[16], description="Sequences decoded together.")
    context_tokens: float = Field(ge=0, examples=[8192], description="Their mean length.")
    step_s: float = Field(gt=0, examples=[0.02], description="Seconds of one step, which makes one token of each.")
    source: str = Field(default="", description="Where this figure comes from, when other than the file's source.")


class ProfileFile(Section):
    version: Literal[1] = Field(default=1, description="Version of this file's format.")
    name: str = Field(min_length=1, examples=["h200-tp8"], description="Name of this kind of instance.")
    accelerator: str = Field(default="", description="What it runs on.")
    gpus_per_instance: int = Field(default=1, ge=1, description="Accelerators of one instance.")
    source: str = Field(min_length=1, examples=["measured on …"], description="Where the figures come from.")
    prefill: list[PrefillFigure] = Field(default=[], description="Prefill times.")
    fit: Literal["through", "quadratic"] = Field(
        default="through", description="through: a monotone curve through the times; quadratic: least squares."
    )
    prefill_formula: PrefillFormula | None = Field(default=None, description="Instead of prefill.")
    decode: list[DecodeFigure] = Field(default=[], description="Decode steps.")
    max_batch: int = Field(default=256, ge=1, description="Most sequences decoded together: what memory holds.")


def read_profile(path: Path) -> Profile:
    """Raises ConfigError naming line and key."""
    file, lines = read_input(path, ProfileFile, "profile")
    if file.prefill and file.prefill_formula is not None:
        raise refuse(path, lines, ("prefill_formula",), "stands beside prefill", "keep one of them")
    if not (file.prefill or file.prefill_formula or file.decode):
        raise refuse(path, lines, (), "neither prefill nor decode times", "add prefill, decode or both")
    try:
        return to_profile(file)
    except ConfigError as error:
        raise refuse(path, lines, ("prefill",), str(error), "see docs/planning.md") from error


def to_profile(file: ProfileFile) -> Profile:
    """The profile of a file. Raises ConfigError for times that contradict each other."""
    sources = [file.source, *(p.source for p in file.prefill), *(p.source for p in file.decode)]
    curve: Curve | None = None
    speedup = 1.0
    if file.prefill_formula is not None:
        formula = file.prefill_formula
        curve = QuadraticCurve(formula.fixed_s, formula.per_token_s, formula.per_token_squared_s)
        sources.append(formula.source)
    elif file.prefill:
        alone = sorted((float(p.tokens), p.seconds) for p in file.prefill if p.batch == 1)
        if not alone:
            raise ConfigError("no prefill time with batch 1, which all others are compared with")
        tokens = [point[0] for point in alone]
        if len(set(tokens)) < len(tokens):
            raise ConfigError("two prefill times for the same tokens and batch 1")
        seconds = [point[1] for point in alone]
        curve = fit_quadratic(tokens, seconds) if file.fit == "quadratic" else curve_through(alone)
        speedup = batch_speedup([(p.tokens, p.batch, p.seconds) for p in file.prefill], curve)
    return Profile(
        name=file.name,
        accelerator=file.accelerator,
        gpus_per_instance=file.gpus_per_instance,
        prefill=curve,
        decode=tuple(DecodePoint(batch=p.batch, context_tokens=p.context_tokens, step_s=p.step_s) for p in file.decode),
        max_batch=file.max_batch,
        sources=tuple(dict.fromkeys(source for source in sources if source)),
        batch_speedup=speedup,
    )


def write_profile(path: Path, file: ProfileFile) -> None:
    """As YAML. Raises ConfigError when it cannot be written."""
    values = file.model_dump(mode="json", exclude_defaults=True)
    try:
        path.write_text(yaml.safe_dump({"version": 1, **values}, sort_keys=False, allow_unicode=True), "utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
