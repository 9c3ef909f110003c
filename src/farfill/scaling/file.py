"""The autoscale file: groups with bounds, where their load is read, and who is told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from farfill.config.problems import KeyPath
from farfill.config.section import Address
from farfill.planner.inputs import Section, read_input, refuse
from farfill.policy.scaling import Group, GroupLimits, Scaler, ScalingLimits, Schedule

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_CLOCK = r"^([01]\d|2[0-3]):[0-5]\d$"


class GroupSection(Section):
    minimum: int = Field(ge=0, examples=[1], description="Fewest instances.")
    maximum: int = Field(ge=0, examples=[8], description="Most instances.")
    price: float = Field(default=1.0, ge=0, description="Of one instance for an hour.")
    batch: int = Field(default=32, ge=1, description="decode: sequences of one instance at its full load.")
    deployment: str | None = Field(default=None, description="kubernetes: what is scaled.")
    kind: Literal["deployments", "statefulsets"] = Field(default="deployments", description="kubernetes: its kind.")


class ScheduleSection(Section):
    group: str = Field(examples=["far/prefill"], description="SITE/ROLE.")
    start: str = Field(pattern=_CLOCK, examples=["22:00"], description="From then on.")
    end: str = Field(pattern=_CLOCK, examples=["06:00"], description="Until then; the next day if that is earlier.")
    days: list[Day] = Field(default=[], description="Days it begins on; unset: every day.")
    minimum: int = Field(ge=0, examples=[4], description="Fewest instances meanwhile.")
    maximum: int = Field(ge=0, examples=[16], description="Most instances meanwhile.")
    utc_offset_minutes: int = Field(default=0, ge=-720, le=840, description="Of the clock.")


class PrometheusSection(Section):
    url: str = Field(pattern=r"^https?://", examples=["http://prometheus:9090"], description="Where metrics are.")
    window: str = Field(default="2m", pattern=r"^\d+[smh]$", description="Over which rates are taken.")


class WebhookSection(Section):
    url: str = Field(pattern=r"^https?://", examples=["https://ops.example/scale"], description="POSTed to.")
    secret_file: Path = Field(examples=["webhook.key"], description="Key of the signature, at least 16 bytes.")


class KubernetesSection(Section):
    api: str = Field(default="https://kubernetes.default.svc", pattern=r"^https?://", description="API server.")
    namespace: str = Field(min_length=1, examples=["farfill"], description="Namespace of the deployments.")
    token_file: Path = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount/token"), description="Read anew for every call."
    )
    ca_file: Path | None = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"), description="CA of the API server."
    )


class AutoscaleFile(Section):
    version: Literal[1] = Field(default=1, description="Version of this file's format.")
    prometheus: PrometheusSection
    groups: dict[str, GroupSection] = Field(
        min_length=1, examples=["{near/decode: {minimum: 1, maximum: 8}}"], description="By SITE/ROLE."
    )
    schedules: list[ScheduleSection] = Field(default=[], description="Other bounds by the time of day.")
    webhook: WebhookSection | None = Field(default=None, description="Told of every change.")
    kubernetes: KubernetesSection | None = Field(default=None, description="Scaled at every change.")
    listen: Address | None = Field(
        default=None, description="host:port of GET /metrics and /healthz; unset: none. Plain HTTP."
    )
    period_s: float = Field(default=30.0, ge=1, description="How often is decided.")
    target: float = Field(default=0.7, gt=0, lt=1, description="Utilisation to size for.")
    out_above: float = Field(default=0.85, gt=0, le=1, description="Utilisation that adds instances.")
    in_below: float = Field(default=0.5, gt=0, lt=1, description="Utilisation that takes some away.")
    drain_s: float = Field(default=60.0, gt=0, description="Work that waits is to be gone in this time.")
    cooldown_out_s: float = Field(default=60.0, ge=0, description="Between two additions.")
    cooldown_in_s: float = Field(default=600.0, ge=0, description="Low load must last so long.")
    convert: list[str] = Field(default=[], description="Sites whose instances may change their role.")
    price_limit: float | None = Field(default=None, gt=0, description="Most that all may cost in an hour.")


def read_autoscale(path: Path) -> AutoscaleFile:
    """Paths in it are made relative to it. Raises ConfigError naming line and key."""
    file, lines = read_input(path, AutoscaleFile, "autoscale file")
    for key, section in file.groups.items():
        if section.minimum > section.maximum:
            raise refuse(path, lines, ("groups", key, "minimum"), "more than maximum", "exchange them")
        if key.rpartition("/")[2] not in ("prefill", "decode", "mixed") or not key.rpartition("/")[0]:
            raise refuse(path, lines, ("groups", key), "is not SITE/ROLE", "write near/decode, say")
        if file.kubernetes is not None and section.deployment is None:
            raise refuse(path, lines, ("groups", key), "has no deployment to scale", "add deployment: NAME")
    for i, schedule in enumerate(file.schedules):
        _check_schedule(path, lines, file, ("schedules", i), schedule)
    if not file.in_below < file.target < file.out_above:
        raise refuse(path, lines, ("target",), "not between in_below and out_above", "set all three")
    return _with_paths(path.resolve().parent, file)


def scaler_of(file: AutoscaleFile) -> Scaler:
    """The machine that decides."""
    limits = ScalingLimits(
        target=file.target,
        out_above=file.out_above,
        in_below=file.in_below,
        drain_s=file.drain_s,
        cooldown_out_s=file.cooldown_out_s,
        cooldown_in_s=file.cooldown_in_s,
        convert=frozenset(file.convert),
        price_limit=file.price_limit,
    )
    groups = {
        group_of(key): GroupLimits(minimum=s.minimum, maximum=s.maximum, price=s.price)
        for key, s in file.groups.items()
    }
    return Scaler(limits, groups, [_schedule(s) for s in file.schedules])


def group_of(key: str) -> Group:
    """SITE/ROLE as a group."""
    site, _, role = key.rpartition("/")
    return Group(site, role)


def _schedule(section: ScheduleSection) -> Schedule:
    return Schedule(
        group=group_of(section.group),
        from_minute=_minute(section.start),
        to_minute=_minute(section.end),
        minimum=section.minimum,
        maximum=section.maximum,
        days=tuple(_DAYS.index(day) for day in section.days),
        utc_offset_minutes=section.utc_offset_minutes,
    )


def _minute(clock: str) -> int:
    return int(clock[:2]) * 60 + int(clock[3:])


def _check_schedule(
    path: Path, lines: dict[KeyPath, int], file: AutoscaleFile, key: KeyPath, schedule: ScheduleSection
) -> None:
    if schedule.group not in file.groups:
        known = ", ".join(file.groups)
        raise refuse(path, lines, (*key, "group"), f"{schedule.group!r} is no group", f"there are: {known}")
    if schedule.minimum > schedule.maximum:
        raise refuse(path, lines, (*key, "minimum"), "more than maximum", "exchange them")


def _with_paths(base: Path, file: AutoscaleFile) -> AutoscaleFile:
    changes: dict[str, object] = {}
    if file.webhook is not None:
        changes["webhook"] = file.webhook.model_copy(update={"secret_file": base / file.webhook.secret_file})
    if file.kubernetes is not None:
        given = file.kubernetes
        ca_file = None if given.ca_file is None else base / given.ca_file
        changes["kubernetes"] = given.model_copy(update={"token_file": base / given.token_file, "ca_file": ca_file})
    return file.model_copy(update=changes)
