"""A roofline estimate written down as a profile file, so that it can be looked at, corrected, and kept."""

from __future__ import annotations

from farfill.core.errors import ConfigError
from farfill.planner.curves import QuadraticCurve
from farfill.planner.profile import Profile
from farfill.planner.profile_file import DecodeFigure, PrefillFormula, ProfileFile


def estimate_file(name: str, profile: Profile) -> ProfileFile:
    """The file that gives `profile`, under another name."""
    if not isinstance(profile.prefill, QuadraticCurve):
        raise ConfigError(f"profile {profile.name} is no estimate")
    curve = profile.prefill
    return ProfileFile(
        name=name,
        accelerator=profile.accelerator,
        gpus_per_instance=profile.gpus_per_instance,
        source=profile.source,
        prefill_formula=PrefillFormula(
            fixed_s=curve.fixed_s,
            per_token_s=curve.per_token_s,
            per_token_squared_s=curve.per_token_squared_s,
            source=profile.source,
        ),
        decode=[
            DecodeFigure(batch=p.batch, context_tokens=p.context_tokens, step_s=p.step_s)
            for p in profile.decode
            if p.batch <= profile.max_batch
        ],
        max_batch=profile.max_batch,
    )
