"""From a plan file to what the solvers need: profiles read, lengths made, names checked. Errors name line and key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from farfill.config.problems import KeyPath
from farfill.core.errors import ConfigError
from farfill.planner import lengths as lengths_of
from farfill.planner.accelerators import find_accelerator
from farfill.planner.geometry import Geometry, derive_geometry
from farfill.planner.inputs import read_input, refuse
from farfill.planner.kv_size import KVSize, LayoutKVSize, MeasuredKVSize
from farfill.planner.lengths import Lengths
from farfill.planner.model_config import Json, read_model_config
from farfill.planner.plan_file import (
    FixedInput,
    HistogramInput,
    InputLengths,
    LinkSection,
    LognormalInput,
    PlanFile,
    SiteSection,
    UniformInput,
)
from farfill.planner.profile import Profile
from farfill.planner.profile_file import read_profile
from farfill.planner.roofline import Efficiency, estimate_profile
from farfill.planner.trace import arrival_burstiness, read_trace

MIB = 1 << 20
_EVEN = 0.5
"""A smaller squared coefficient of variation of gaps is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of the sites. `requests_per_s` None: as much as they can. `source` says where it comes from,
    `warnings` what is doubtful about it."""

    lengths: Lengths
    input_tokens: float
    output_tokens: float
    context_tokens: float
    requests_per_s: float | None
    arrival_scv: float
    source: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site. `price` is of one instance for an hour."""

    name: str
    profile: Profile
    instances: int
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """From a far site to the near one; `bytes_per_s` are raw KV bytes, `compression` times those on the wire."""

    bytes_per_s: float
    rtt_s: float
    compression: float = 1.0

    @property
    def wire_bytes_per_s(self) -> float:
        """What the link itself carries."""
        return self.bytes_per_s / self.compression


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A plan file, read."""

    name: str
    kv: KVSize
    geometry: Geometry | None
    model_dir: Path | None
    workload: Workload
    near: Site
    far: tuple[tuple[Site, Link], ...]
    tpot_s: float
    ttft_s: float | None
    quantile: float
    headroom: float
    link_utilisation: float
    chunk_tokens: int
    at_mean_length: bool


def read_problem(path: Path) -> Problem:
    """Raises ConfigError naming line and key of whatever cannot be used."""
    file, lines = read_input(path, PlanFile, "plan file")
    return _Reader(path, file, lines).problem()


def lengths_from(given: InputLengths) -> Lengths:
    """The lengths a file describes. Raises ConfigError when a log-normal has nothing within its bounds."""
    match given:
        case LognormalInput():
            return lengths_of.lognormal(given.mu, given.sigma, given.min_tokens, given.max_tokens)
        case UniformInput():
            return lengths_of.uniform(given.min_tokens, given.max_tokens)
        case FixedInput():
            return lengths_of.observed([given.tokens])
        case HistogramInput():
            return lengths_of.observed([b.tokens for b in given.bins], [b.weight for b in given.bins])


class _Reader:
    def __init__(self, path: Path, file: PlanFile, lines: dict[KeyPath, int]) -> None:
        self._path = path
        self._base = path.resolve().parent
        self._file = file
        self._lines = lines
        self._config: Json | None = None
        self._geometry: Geometry | None = None

    def problem(self) -> Problem:
        file = self._file
        if file.near not in file.sites:
            raise self._refuse(("near",), f"{file.near!r} is not one of the sites", f"give one of: {_list(file.sites)}")
        kv, folder = self._kv()
        workload = self._workload()
        sites = {name: self._site(name, section) for name, section in file.sites.items()}
        links = self._links()
        far = tuple((sites[name], links[name]) for name in sites if name != file.near)
        planning = file.planning
        return Problem(
            name=file.model.name,
            kv=kv,
            geometry=self._geometry,
            model_dir=folder,
            workload=workload,
            near=sites[file.near],
            far=far,
            tpot_s=file.slo.tpot_ms / 1000,
            ttft_s=file.slo.ttft_s,
            quantile=file.slo.quantile,
            headroom=planning.headroom,
            link_utilisation=planning.link_utilisation,
            chunk_tokens=planning.chunk_tokens,
            at_mean_length=planning.times_at == "mean_length",
        )

    def _kv(self) -> tuple[KVSize, Path | None]:
        model = self._file.model
        if model.config is not None:
            if model.kv_sizes:
                raise self._refuse(("model", "kv_sizes"), "stands beside config", "keep one of them")
            try:
                self._config, found = read_model_config(str(self._base / model.config))
                self._geometry = derive_geometry(self._config, kv_dtype=model.kv_dtype, like=model.like)
            except ConfigError as error:
                raise self._refuse(("model", "config"), str(error), "see docs/planning.md") from error
            return LayoutKVSize(self._geometry.layout), found.parent
        points = sorted((float(p.tokens), p.mib * MIB) for p in model.kv_sizes)
        if not points:
            raise self._refuse(("model",), "neither config nor kv_sizes", "add config: path/to/config.json")
        if len({tokens for tokens, _ in points}) < len(points):
            raise self._refuse(("model", "kv_sizes"), "gives two sizes for one length", "keep one of them")
        return MeasuredKVSize(tuple(points)), None

    def _workload(self) -> Workload:
        section = self._file.workload
        if (section.input is None) == (section.trace is None):
            raise self._refuse(("workload",), "needs exactly one of input and trace", "see docs/planning.md")
        if section.trace is not None:
            return self._from_trace(self._base / section.trace)
        lengths = self._lengths()
        if section.output_tokens is None:
            raise self._refuse(("workload",), "output_tokens is missing", "add output_tokens: 1024")
        assert section.input is not None
        return Workload(
            lengths=lengths,
            input_tokens=lengths.mean,
            output_tokens=section.output_tokens,
            context_tokens=section.context_tokens or lengths.mean + section.output_tokens / 2,
            requests_per_s=section.requests_per_s,
            arrival_scv=section.arrival_scv or 1.0,
            source=f"distribution {section.input.distribution} of {self._path.name}",
        )

    def _from_trace(self, trace: Path) -> Workload:
        section = self._file.workload
        doubts: list[str] = []
        requests = read_trace(trace, cache_blocks=section.cache_blocks, doubts=doubts)
        count = len(requests)
        span_s = requests[-1].arrival_s - requests[0].arrival_s
        rate = section.requests_per_s or ((count - 1) / span_s if span_s > 0 else None)
        inputs = sum(r.input_tokens for r in requests) / count
        output = section.output_tokens or max(1.0, sum(r.output_tokens for r in requests) / count)
        cached = 1 - sum(r.uncached_tokens for r in requests) / (inputs * count)
        burstiness = arrival_burstiness(requests)
        if span_s <= 0:
            doubts.append(_no_rate(trace, count, given=rate is not None))
        elif burstiness < _EVEN and section.arrival_scv is None:
            doubts.append(
                f"{trace.name}: requests come more evenly than from users who know nothing of each other (arrival_scv"
                f" {burstiness:.2g}), and waits are predicted for that; unless it is so, set workload.arrival_scv: 1"
            )
        return Workload(
            lengths=lengths_of.observed([r.uncached_tokens for r in requests]),
            input_tokens=inputs,
            output_tokens=output,
            context_tokens=section.context_tokens or inputs + output / 2,
            requests_per_s=rate,
            arrival_scv=section.arrival_scv or burstiness,
            source=f"trace {trace.name}: {count} request{'s' if count > 1 else ''} over {span_s:.0f} s, {cached:.0%} of"
            " input tokens cached",
            warnings=tuple(doubts),
        )

    def _lengths(self) -> Lengths:
        given = self._file.workload.input
        key = ("workload", "input")
        if isinstance(given, LognormalInput | UniformInput) and given.min_tokens > given.max_tokens:
            what = f"min_tokens {given.min_tokens} is more than max_tokens {given.max_tokens}"
            raise self._refuse((*key, "min_tokens"), what, "exchange them")
        assert given is not None, "input or trace: checked before"
        try:
            return lengths_from(given)
        except ConfigError as error:
            raise self._refuse((*key, "mu"), str(error), "log(20000) is 9.9") from error

    def _site(self, name: str, section: SiteSection) -> Site:
        key = ("sites", name)
        if (section.profile is None) == (section.accelerator is None):
            raise self._refuse(key, "needs exactly one of profile and accelerator", "add profile: FILE")
        if section.profile is not None:
            profile = read_profile(self._base / section.profile)
        else:
            assert section.accelerator is not None
            profile = self._estimate(key, section.accelerator, section)
        if profile.prefill is None and section.instances:
            raise self._refuse(key, f"profile {profile.name} has no prefill times", "add prefill to it")
        if name == self._file.near and not profile.decode:
            raise self._refuse(
                key, f"profile {profile.name} has no decode steps, but users are here", "add decode to it"
            )
        return Site(name=name, profile=profile, instances=section.instances, price=section.price_per_instance_hour)

    def _estimate(self, key: KeyPath, accelerator: str, section: SiteSection) -> Profile:
        if self._config is None or self._geometry is None:
            raise self._refuse((*key, "accelerator"), "an estimate needs model.config", "add it, or give profile")
        try:
            device = find_accelerator(accelerator)
            efficiency = Efficiency(weight_bytes=section.weight_bytes)
            return estimate_profile(
                self._config, self._geometry, device, section.gpus_per_instance, efficiency=efficiency
            )
        except ConfigError as error:
            raise self._refuse((*key, "accelerator"), str(error), "see docs/planning.md") from error

    def _links(self) -> Mapping[str, Link]:
        file = self._file
        found: dict[str, Link] = {}
        for i, link in enumerate(file.links):
            if link.source not in file.sites or link.source == file.near:
                others = _list(name for name in file.sites if name != file.near) or "none"
                raise self._refuse(("links", i, "source"), f"{link.source!r} is no far site", f"far sites: {others}")
            if link.source in found:
                raise self._refuse(("links", i, "source"), f"two links from {link.source}", "add up what they carry")
            found[link.source] = _link(link)
        for name in file.sites:
            if name != file.near and name not in found:
                raise self._refuse(("sites", name), "no link leads from here to the near site", "add one to links")
        return found

    def _refuse(self, key: KeyPath, what: str, fix: str) -> ConfigError:
        return refuse(self._path, self._lines, key, what, fix)


def _no_rate(trace: Path, count: int, *, given: bool) -> str:
    what = "one request" if count == 1 else f"{count} requests, all at one time"
    then = "" if given else "; what all sites can serve is planned instead: set workload.requests_per_s"
    return f"{trace.name}: {what}, so neither a rate nor how requests bunch can be taken from it{then}"


def _link(section: LinkSection) -> Link:
    wire = section.gbit_per_s * 1e9 / 8
    return Link(bytes_per_s=wire * section.compression, rtt_s=section.rtt_ms / 1000, compression=section.compression)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
