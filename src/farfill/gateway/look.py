"""A running gateway's status, put together from its parts."""

from __future__ import annotations

import farfill
from farfill.core.cluster import Role
from farfill.gateway.service import GatewayService
from farfill.gateway.status import GatewayStatus, LinkStatus, ShareStatus


def status_of(service: GatewayService) -> GatewayStatus:
    """As it is now."""
    instances = service.deps.membership.instances()
    far = [instance for instance in instances if instance.role is not Role.DECODE]
    breakers = {instance.name: str(service.health.state(instance)) for instance in far}
    return GatewayStatus(
        gateway=service.name,
        site=service.deps.config.gateway.site,
        version=farfill.__version__,
        registry_away_s=service.deps.registry_away_s(),
        requests_in_progress=service.admission.in_progress,
        threshold_tokens=service.threshold.tokens,
        index_blocks=service.prefixes.blocks,
        exact_workers=service.prefixes.exact,
        config_version=service.reloader.version,
        needs_restart=list(service.reloader.restart),
        traffic=service.traffic.status(),
        links=[
            LinkStatus(
                site=link.site,
                breaker=str(service.health.site_state(link.site)),
                bytes_per_s=link.rate.value,
                rtt_s=link.rtt.value,
                utilisation=service.links.utilisation(link.site),
                bandwidth=str(link.regime.state),
            )
            for link in service.links.all_sites()
        ],
        breakers={name: state for name, state in breakers.items() if state != "closed"},
        outstanding_tokens={i.name: service.work.tokens(i) for i in instances if service.work.tokens(i)},
        shares=[
            ShareStatus(
                model=model,
                tenant=tenant,
                percent=record.percent,
                version=record.version,
                automatic=record.automatic,
            )
            for (model, tenant), record in sorted(service.rollout.records.items())
        ],
    )
